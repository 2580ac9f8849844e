"""Which packets are decoded for chosen frames: in runs that begin at keyframes."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from .info import VideoInfo

# Packets after which a run of wanted frames may be split at a keyframe, for several threads to share.
_PACKETS_PER_RUN = 64


@dataclass(frozen=True)
class FrameRun:
    """Wanted frames that are decoded in one go.

    Attributes:
        frames: their numbers in the video, ascending.
        key: the keyframe to start at, a number among the keyframes.
        stop: the packet after the last one needed.
    """

    frames: Sequence[int]
    key: int
    stop: int


def plan_runs(info: VideoInfo, wanted: Sequence[int]) -> list[FrameRun]:
    """Split the wanted frames into runs: a new one wherever a seek skips a packet, and in long runs at keyframes.

    So every packet that is read lies between a wanted frame and that frame's keyframe.
    """
    pts, keyframes = info.packets.pts, info.packets.keyframes.tolist()
    runs: list[FrameRun] = []
    frames: list[int] = []
    key, stop = -1, -1
    for frame in wanted:
        index = int(info.frame_packets[frame])
        own = bisect.bisect_right(keyframes, index) - 1
        # A frame displayed before the keyframe that precedes it in the file may refer to the group before.
        while own > 0 and pts[keyframes[own]] > pts[index]:
            own -= 1
        if frames and (keyframes[own] > stop or keyframes[own] >= keyframes[key] + _PACKETS_PER_RUN):
            runs.append(FrameRun(frames, key, stop))
            frames = []
        if not frames:
            key, stop = own, index + 1
        frames.append(frame)
        stop = max(stop, index + 1)
    return [*runs, FrameRun(frames, key, stop)] if frames else runs
