"""Files in prompts: identifies known files, and probes each video once for all hosts."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...hosts import HostGroup
from ...stats import StageTimer
from .video import VideoError, VideoInfo, probe

MOST_KNOWN = 16  # files; one of 100,000 frames takes 2 MB


@dataclass(frozen=True)
class FileIdentity:
    """Path, size and modification time of a file; if equal, the content is assumed to be the same.

    Attributes:
        path: absolute, without links.
        size: bytes.
        mtime_ns: when it was last written, in nanoseconds.
    """

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | Path) -> "FileIdentity":
        """Read a file's identity.

        Raises:
            VideoError: the file does not exist, or is not accessible.
        """
        try:
            resolved = Path(path).resolve()
            status = resolved.stat()
        except OSError as error:
            raise VideoError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        return cls(str(resolved), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Source:
    """Source of a prompt's item, as part of a cache key.

    Attributes:
        file: the video, image or audio file, as it was when it was read.
        part: of a video the indices of the sampled frames, of audio the first sample, and how many.
        size: height and width of a video's frames in patches, or of an image in pixels, where a
            request sets them.
    """

    file: FileIdentity
    part: tuple[int, ...] = ()
    size: tuple[int, int] | None = None


class KnownVideos:
    """LRU cache of probed videos; thread-safe.

    A file that has changed, by its size and date, is probed again.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._found: dict[FileIdentity, VideoInfo] = {}  # from the least recently used on

    def probe(self, path: str | Path, check: Callable[[int], None] | None = None) -> VideoInfo:
        """Probe a video (:func:`apbv.input.media.video.probe`), unless it is known.

        A file that is known by this path gives the same object again.
        """
        identity = FileIdentity.of(path)
        with self._lock:
            info = self._found.pop(identity, None)
        if info is None:
            info = probe(path, check)
        elif info.path != str(path):
            info = replace(info, path=str(path))
        with self._lock:
            self._found[identity] = info
            if len(self._found) > MOST_KNOWN:
                del self._found[next(iter(self._found))]
        return info


def probe_once(
    videos: KnownVideos, paths: Sequence[str], hosts: HostGroup, timer: StageTimer
) -> tuple[VideoInfo, ...]:
    """Probe a prompt's videos on the leader, and broadcast the result; collective.

    Args:
        paths: of the files on this host, as many on every host.

    Raises:
        VideoError: a file cannot be read, or is not the same here.
        HostError: another host cannot read one.
    """
    infos = []
    for path in paths:
        info: VideoInfo | None = None
        data = b""
        with hosts.local_stage("reading the video"), timer.stage("decode_video"):
            if hosts.is_leader:
                info = videos.probe(path)
                data = info.to_bytes() if hosts.num_processes > 1 else b""
        data = hosts.broadcast_bytes(data)
        with hosts.local_stage("reading the video"):
            if not hosts.is_leader:
                size = FileIdentity.of(path).size
                info = replace(VideoInfo.from_bytes(data), path=path)
                if size != info.num_bytes:
                    raise VideoError(
                        f"{path}: is {size} bytes long here, but {info.num_bytes} on "
                        f"{hosts.name_of(0)}"
                    )
        assert info is not None  # it was read, or received
        infos.append(info)
    return tuple(infos)
