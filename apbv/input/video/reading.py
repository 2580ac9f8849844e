"""Reading chosen frames, chunk by chunk or in one piece, by the back end that is asked for."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from ...config import VIDEO_BACKEND_NAMES
from ...hosts import fair_share_of_cores
from .info import VideoError, VideoInfo
from .streaming import pyav_chunks

if TYPE_CHECKING:
    from torch import Tensor

AtWork = Callable[[int], AbstractContextManager]


def read_frames(info: VideoInfo, indices: Sequence[int], threads: int = 0) -> np.ndarray:
    """Decode frames: uint8 ``[len(indices), height, width, 3]``, RGB as displayed.

    The result is bit-equal to decoding the whole file and picking the frames. Arguments and errors are those of
    :func:`iter_frames`, of which this is the only chunk.
    """
    with closing(iter_frames(info, indices, max(len(indices), 1), threads)) as chunks:
        return next(chunks, np.empty((0, info.height, info.width, 3), np.uint8))


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
        VideoError: a frame of the next chunk cannot be decoded, or it or what it needs is damaged so that the
            decoder notices; or the frame size changes; or the file no longer holds the packets that were probed.
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
    chunks = torchcodec_chunks(decoder_type, info, wanted, chunk_len, threads, str(device), at_work)
    if backend == "torchcodec":
        return chunks
    return _with_pyav_behind(chunks, info, wanted, chunk_len, threads, at_work)


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
