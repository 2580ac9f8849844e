"""Choosing which frames of a video are read: evenly spaced in number, or in time."""

import numpy as np

from ...config import require_frame_rate
from .info import VideoInfo


def sample_uniform(info_or_n: VideoInfo | int, num_frames: int) -> list[int]:
    """Spread ``min(n, num_frames)`` distinct indices evenly over all n frames; ascending.

    Index i of k is i * (n - 1) / (k - 1) rounded to nearest, halves up, in integer arithmetic: both ends are
    included, steps differ by at most one. For k = 1 it is frame 0. This is even in frame numbers;
    :func:`sample_fps` is even in time.

    Args:
        info_or_n: the video, or n.
        num_frames: how many indices are wanted.

    Raises:
        ValueError: ``num_frames`` < 1 or n < 0.
    """
    n = info_or_n.num_frames if isinstance(info_or_n, VideoInfo) else info_or_n
    if num_frames < 1 or n < 0:
        raise ValueError(f"cannot sample {num_frames} of {n} frames")
    k = min(n, num_frames)
    if k < 2:
        return [0] * k
    return [(2 * i * (n - 1) + k - 1) // (2 * (k - 1)) for i in range(k)]


def sample_fps(info: VideoInfo, fps: float, min_frames: int = 1, max_frames: int | None = None) -> list[int]:
    """Find the frames nearest to the times 0, 1/fps, 2/fps... up to the last; indices ascending, distinct.

    The frames are found by their timestamps, which is right for a variable frame rate too; of two equally near,
    the earlier. An ``fps`` well above the video's own gives every frame.

    Args:
        info: the video.
        fps: frames per second.
        min_frames, max_frames: where the times make fewer or more frames than this, the result is
            :func:`sample_uniform` of that many instead.

    Raises:
        ValueError: ``fps`` is not in 0 < fps <= MAX_FPS, or the limits are not 1 <= min_frames <= max_frames.
    """
    require_frame_rate(fps)
    if min_frames < 1 or (max_frames is not None and max_frames < min_frames):
        raise ValueError(f"need 1 <= min_frames <= max_frames, got {min_frames} and {max_frames}")
    times = np.asarray(info.timestamps)
    # A frame is nearest to the times from half way to the one before (excluded) to half way to the next, and
    # is taken if a grid time lies there. Counting the grid times up to each edge needs no grid in memory. The
    # small term makes ties, common at 2 of 25 fps, fall the same way however the times are rounded.
    edges = np.concatenate([(times[1:] + times[:-1]) / 2, times[-1:]])
    count = np.floor(edges * fps + 1e-6)
    chosen = np.flatnonzero(np.diff(count, prepend=-1) > 0).tolist()
    if len(chosen) < min_frames:
        return sample_uniform(info, min_frames)
    if max_frames is not None and len(chosen) > max_frames:
        return sample_uniform(info, max_frames)
    return chosen
