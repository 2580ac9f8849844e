"""Probing a video once: one host lists its packets, for all hosts and for further questions about it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from ..hosts import HostGroup
from ..stats import StageTimer
from .files import FileIdentity
from .video import VideoError, VideoInfo, probe

_SIZE_BYTES = 8


class KnownVideos:
    """Remembers what probing found in the latest files; any thread may use it.

    A file that was written since, by its size and date, is probed again.

    Args:
        limit: how many files are remembered. One of 100,000 packets takes 5 MB.
    """

    def __init__(self, limit: int = 16):
        self._limit, self._lock = limit, Lock()
        self._known: OrderedDict[FileIdentity, VideoInfo] = OrderedDict()

    def probe(self, path: str | Path) -> VideoInfo:
        """See :func:`apbv.input.video.probe`."""
        identity = _identify(path)
        with self._lock:
            if identity in self._known:
                self._known.move_to_end(identity)
                return replace(self._known[identity], path=str(path))
        info = probe(path)
        with self._lock:
            self._known[identity] = info
            while len(self._known) > self._limit:
                self._known.popitem(last=False)
        return info


def probe_once(
    videos: KnownVideos, paths: Sequence[str], hosts: HostGroup, timer: StageTimer, beside: Sequence[int] = ()
) -> tuple[VideoInfo, ...]:
    """Let the leader probe a prompt's videos, and tell everybody what it found; collective.

    Args:
        paths: of the files on this host.
        beside: the sizes of the prompt's other files on this host, in bytes; they have to be the same everywhere.

    Raises:
        VideoError: a file cannot be read, or is not the same here.
        HostError: another host cannot read one, or has a prompt of more or fewer, or other files beside.
    """
    hosts.require_same("the number of videos, or an image file,", f"{len(paths)} {list(beside)}".encode())
    return tuple(_probe_one(videos, path, hosts, timer) for path in paths)


def _probe_one(videos: KnownVideos, path: str, hosts: HostGroup, timer: StageTimer) -> VideoInfo:
    info, data = None, b""
    with hosts.local_stage("reading the video"), timer.stage("decode_video"):
        if hosts.is_leader:
            info = videos.probe(path)
            if hosts.num_processes > 1:
                data = _identify(path).size.to_bytes(_SIZE_BYTES, "big") + info.to_bytes()
    data = hosts.broadcast_bytes(data)
    with hosts.local_stage("reading the video"):
        if hosts.is_leader:
            return info
        size, expected = _identify(path).size, int.from_bytes(data[:_SIZE_BYTES], "big")
        if size != expected:
            raise VideoError(f"{path}: is {size} bytes long here, but {expected} bytes on {hosts.name_of(0)}")
        return replace(VideoInfo.from_bytes(data[_SIZE_BYTES:]), path=path)


def _identify(path: str | Path) -> FileIdentity:
    try:
        return FileIdentity.of(path)
    except FileNotFoundError as error:
        raise VideoError(f"{path}: no such file") from error
    except OSError as error:
        raise VideoError(f"{path}: cannot be read ({error.strerror})") from error
