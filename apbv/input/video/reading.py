"""Decoding chosen frames, from the keyframes before them."""

import bisect
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import av
import numpy as np
from av.video.frame import PictureType

from .file import SeekFailed, VideoFile
from .info import VideoError, VideoInfo, keyframe_indices, packet_indices

# Pictures that refer to no other; decoders that do not say give NONE.
_INTRA = (PictureType.I, PictureType.SI, PictureType.NONE)
# Packets after which a run of wanted frames may be split at a keyframe, for several threads to share.
_PACKETS_PER_RUN = 64
_MAX_THREADS = 16


def read_frames(info: VideoInfo, indices: Sequence[int], threads: int = 0) -> np.ndarray:
    """Decode frames: uint8 ``[len(indices), height, width, 3]``, RGB as displayed.

    The result is bit-equal to decoding the whole file and picking the frames. This seeks wherever a keyframe lets
    it skip packets, and holds no frames but those it returns and the decoders' own.

    Args:
        info: the video, from :func:`apbv.input.video.probe`.
        indices: of the frames, strictly ascending.
        threads: how many runs of frames to decode at the same time, where there are several; 0 for one per CPU, up
            to 16.

    Raises:
        VideoError: a wanted frame, or one decoded on the way to it from its keyframe, cannot be decoded or is
            damaged so that the decoder notices; or the frame size changes; or the file no longer holds the packets
            that were probed.
        ValueError: the indices do not ascend.
        IndexError: an index is out of range.
    """
    wanted = [int(i) for i in indices]
    if any(a >= b for a, b in itertools.pairwise(wanted)):
        raise ValueError("frame indices must be strictly ascending")
    if wanted and (wanted[0] < 0 or wanted[-1] >= info.num_frames):
        raise IndexError(f"frame indices {wanted[0]}..{wanted[-1]} of {info.num_frames} frames")
    out = np.empty((len(wanted), info.height, info.width, 3), np.uint8)
    if wanted:
        if info.packets:
            _read_by_seeking(info, wanted, out, threads or min(os.cpu_count() or 1, _MAX_THREADS))
        else:
            _read_from_start(info, wanted, out)
    return out


class _Undecodable(Exception):
    """Decoding from a keyframe did not work out.

    Attributes:
        entered: whether the keyframe itself came out well.
    """

    def __init__(self, reason: str, entered: bool):
        super().__init__(reason)
        self.entered = entered


class FrameRun(NamedTuple):
    """Wanted frames that are decoded in one go.

    Attributes:
        rows: a frame's presentation time to its row in the result.
        key: the keyframe to start at, a number among the keyframes.
        stop: the packet after the last one needed.
        frames: what messages call them.
    """

    rows: dict[int, int]
    key: int
    stop: int
    frames: str


def plan_runs(info: VideoInfo, keyframes: list[int], wanted: list[int]) -> list[FrameRun]:
    """Split the wanted frames into runs: a new one wherever a seek skips a packet, and in long runs at keyframes.

    So every packet decoded lies between a wanted frame and that frame's keyframe, and whether a frame is
    found damaged does not depend on what else is asked for.
    """
    runs: list[FrameRun] = []
    rows: dict[int, int] = {}
    key, stop = -1, -1

    def close() -> None:
        frames = f"{wanted[min(rows.values())]}..{wanted[max(rows.values())]}"
        runs.append(FrameRun(rows, key, stop, frames))

    for row, frame in enumerate(wanted):
        index = info.frame_packets[frame]
        own = bisect.bisect_right(keyframes, index) - 1
        # A frame displayed before the keyframe that precedes it in the file may refer to the group before.
        while own > 0 and info.packets[keyframes[own]].pts > info.packets[index].pts:
            own -= 1
        if rows and (keyframes[own] > stop or keyframes[own] >= keyframes[key] + _PACKETS_PER_RUN):
            close()
            rows = {}
        if not rows:
            key, stop = own, index + 1
        rows[info.packets[index].pts] = row
        stop = max(stop, index + 1)
    close()
    return runs


def _read_by_seeking(info: VideoInfo, wanted: list[int], out: np.ndarray, threads: int) -> None:
    keyframes, indices = keyframe_indices(info.packets), packet_indices(info.packets)
    planned = plan_runs(info, keyframes, wanted)
    runs = iter(planned)

    def work() -> None:
        with VideoFile(info.path) as file:
            file.expect(info.packets, indices)
            try:
                for run in runs:  # shared by all threads: whichever is free takes the next
                    _read_run(file, info, keyframes, run, out)
            finally:
                for _ in runs:  # after an error the rest is of no use
                    pass

    workers = min(threads, len(planned))
    if workers == 1:
        work()
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()


def _read_run(file: VideoFile, info: VideoInfo, keyframes: list[int], run: FrameRun, out: np.ndarray) -> None:
    """Fill a run's rows of ``out``; VideoError where they cannot be decoded."""
    back = 0
    while True:
        number = max(run.key - back, 0)
        try:
            return _decode_run(file, info, keyframes[number], number == 0, run, out)
        except SeekFailed:
            file.can_seek = False
        except _Undecodable as error:
            # The keyframe may be none, as with intra refresh: then only an earlier one helps. If it is fine,
            # the data after it is damaged, or refers further back than it should: one more try.
            if number == 0 or (error.entered and back):
                raise file.error(f"a frame among {run.frames} cannot be decoded: {error}") from error
            back = 2 * back + 1


def _decode_run(
    file: VideoFile, info: VideoInfo, start: int, is_first: bool, run: FrameRun, out: np.ndarray
) -> None:
    """Decode from one keyframe and fill a run's rows of ``out``.

    Args:
        start: the keyframe's packet.
        is_first: whether it is the first keyframe of the file, so that there is no earlier one to decode from.

    Raises:
        _Undecodable, SeekFailed: the rows hold nothing of use.
        VideoError: as :func:`read_frames`.
    """
    packets, key = info.packets, info.packets[start]
    unseen = {packet.pts for packet in packets[start : run.stop] if packet.shown}
    missing = set(run.rows)
    origin = packets[info.frame_packets[0]].pts if is_first else key.pts
    entered, latest = is_first or not key.shown, None
    # Nothing more is fed once the last wanted frame is in, so the decoder needs to be drained to give it out.
    for packet in itertools.chain(file.packets_between(start, run.stop), (None,)):
        try:
            frames = file.decode(packet)
        except av.error.FFmpegError as error:
            raise _Undecodable(error.strerror, entered) from error
        for frame in frames:
            if frame.pts is not None and frame.pts < origin:
                continue  # displayed before the keyframe: may lack what it refers to
            if frame.pts not in unseen or (latest is not None and frame.pts < latest):
                raise _Undecodable("frames come out of the decoder that the file does not announce", entered)
            if frame.is_corrupt:
                raise _Undecodable("the data is damaged", entered)
            unseen.remove(frame.pts)
            latest = frame.pts
            # The second field of an interlaced keyframe may be predicted from the first.
            if frame.pts == key.pts and (frame.pict_type in _INTRA or frame.interlaced_frame):
                entered = True
            if frame.pts in run.rows:
                out[run.rows[frame.pts]] = _to_rgb(info, frame)
                missing.remove(frame.pts)
    if missing or not entered:
        raise _Undecodable("the decoder does not give it out", entered)


def _read_from_start(info: VideoInfo, wanted: list[int], out: np.ndarray) -> None:
    row = 0
    with VideoFile(info.path) as file:
        for index, frame in enumerate(file.decode_all()):
            if frame.is_corrupt:
                raise file.error(f"frame {index} is damaged")
            if index == wanted[row]:
                out[row] = _to_rgb(info, frame)
                row += 1
                if row == len(wanted):
                    return
        raise file.error(f"frame {wanted[row]} cannot be decoded")


def _to_rgb(info: VideoInfo, frame: av.VideoFrame) -> np.ndarray:
    """Convert a frame to uint8 ``[height, width, 3]`` as displayed."""
    image = frame.to_ndarray(format="rgb24")
    if info.transpose:
        image = image.transpose(1, 0, 2)
    if image.shape != (info.height, info.width, 3):
        raise VideoError(f"{info.path}: the frame size changes within the video")
    return image[:: -1 if info.flip_vertical else 1, :: -1 if info.flip_horizontal else 1]
