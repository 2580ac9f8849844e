"""Choosing which frames of a video are read, and reading them by the back end that is asked for."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ...config import VIDEO_BACKEND_NAMES, require_frame_rate
from ...hosts import fair_share_of_cores
from .decoding import AtWork, pyav_chunks
from .file import VideoError, VideoInfo

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
_END = object()


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


def read_frames(info: VideoInfo, indices: Sequence[int], threads: int = 0) -> np.ndarray:
    """Decode frames: uint8 ``[len(indices), height, width, 3]``, RGB as displayed.

    The result is bit-equal to decoding the whole file and picking the frames. Arguments and errors are those of
    :func:`iter_frames`, of which this is the only chunk.
    """
    chunks = list(iter_frames(info, indices, max(len(indices), 1), threads))  # all: an error may come behind
    return chunks[0] if chunks else np.empty((0, info.height, info.width, 3), np.uint8)


def iter_frames(
    info: VideoInfo,
    indices: Sequence[int],
    chunk_len: int,
    threads: int = 0,
    backend: str = "auto",
    device: str = "cpu",
    at_work: AtWork = lambda thread: nullcontext(),
) -> "Iterator[np.ndarray | Tensor]":
    """Decode frames chunk by chunk: uint8 ``[<= chunk_len, height, width, 3]``, RGB as displayed, in order.

    Together the chunks are bit-equal to decoding the whole file and picking the frames. Decoding seeks wherever a
    keyframe lets it skip packets, leaves out frames that are neither wanted nor needed by others, and goes on
    while a chunk is in use. Besides the chunks that were given out there are at most two in memory, and in each
    thread one frame and what its decoder holds. Closing the iterator ends the threads and closes the file.

    Args:
        info: the video, from :func:`apbv.input.video.probe`.
        indices: of the frames, strictly ascending.
        chunk_len: frames in each chunk but the last.
        threads: how many runs of frames to decode at the same time, where there are several; 0 for this
            process's fair share of its machine's cores.
        backend: "pyav" decodes on the CPU, "torchcodec" on the device, with other promises
            (:mod:`apbv.input.video.torchcodec_reading`). "auto" takes torchcodec for a CUDA device where it can be
            loaded, and goes on with PyAV where it fails.
        device: where torchcodec decodes. The chunks of a CUDA device are tensors on it; all others are arrays.
        at_work: called by each thread that decodes with its number, and entered while it works, but not while it
            waits for room.

    Raises:
        VideoError: a frame, or one that was decoded on the way to it, is damaged so that the decoder notices, or
            does not come; or the frame size changes, or the file. It may be raised before the frame's own chunk,
            and behind the last.
        ValueError: the indices do not ascend, or chunk_len < 1, or no such back end; at once, as all that follow.
        IndexError: an index is out of range.
        ImportError: torchcodec is asked for, and cannot be loaded.
    """
    wanted = [int(i) for i in indices]
    if any(a >= b for a, b in itertools.pairwise(wanted)):
        raise ValueError("frame indices must be strictly ascending")
    if wanted and (wanted[0] < 0 or wanted[-1] >= info.num_frames):
        raise IndexError(f"frame indices {wanted[0]}..{wanted[-1]} of {info.num_frames} frames")
    if chunk_len < 1:
        raise ValueError(f"need chunk_len >= 1, got {chunk_len}")
    if backend not in VIDEO_BACKEND_NAMES:
        raise ValueError(f"no back end {backend!r} decodes videos; there are {', '.join(VIDEO_BACKEND_NAMES)}")
    threads = threads or fair_share_of_cores()
    on_gpu = str(device).startswith("cuda")
    if backend == "pyav" or (backend == "auto" and not on_gpu):
        return pyav_chunks(info, wanted, chunk_len, threads, at_work)
    from .torchcodec_reading import load_decoder, torchcodec_chunks

    try:
        decoder_type = load_decoder()
    except ImportError:
        if backend == "torchcodec":
            raise
        return pyav_chunks(info, wanted, chunk_len, threads, at_work)
    chunks = ahead(torchcodec_chunks(decoder_type, info, wanted, chunk_len, threads, str(device), at_work))
    if backend == "torchcodec":
        return chunks
    return _with_pyav_behind(chunks, info, wanted, chunk_len, threads, at_work)


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Make each item in a thread while the one before is in use.

    Args:
        items: a generator, which is closed with this one.
    """
    with ThreadPoolExecutor(1) as pool, closing(items):
        future = pool.submit(next, items, _END)
        try:
            while (item := future.result()) is not _END:
                future = pool.submit(next, items, _END)
                yield item
        finally:
            wait([future])


def require_backend(name: str) -> None:
    """Make sure that a back end can be used.

    Raises:
        ValueError: torchcodec is asked for, and cannot be loaded.
    """
    if name == "torchcodec":
        from .torchcodec_reading import load_decoder

        try:
            load_decoder()
        except ImportError as error:
            raise ValueError(f"the video back end torchcodec cannot be used: {error}") from error


def _with_pyav_behind(
    chunks: "Iterator[Tensor]",
    info: VideoInfo,
    wanted: list[int],
    chunk_len: int,
    threads: int,
    at_work: AtWork,
) -> "Iterator[np.ndarray | Tensor]":
    """Give out the chunks, and from the first on that torchcodec cannot decode those of PyAV."""
    given = 0
    try:
        for chunk in chunks:
            yield chunk
            given += len(chunk)
    except VideoError:
        yield from pyav_chunks(info, wanted[given:], chunk_len, threads, at_work)
