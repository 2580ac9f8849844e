"""Pixels as a vision tower takes them, in chunks: given by the caller, or made of frames as these are read.

A chunk of a video is some of its temporal patches. While the tower encodes one, the next is preprocessed and the
one after that decoded, each by a thread of its own; so no more than a few chunks are in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
_END = object()


@dataclass(frozen=True)
class PixelChunk:
    """The pixels of adjacent temporal patches.

    Attributes:
        values: keyword arguments of the model's ``get_*_features``.
        num_temporal_patches: how many they are.
        ready: where the values are made on a GPU, by kernels that another stream has to wait for: when.
    """

    values: dict[str, Any]
    num_temporal_patches: int
    ready: "torch.cuda.Event | None" = None

    def on(self, device: torch.device) -> dict[str, Any]:
        """Return the values on a device, for kernels of the current stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.ready)
            for value in self.values.values():
                if isinstance(value, Tensor) and value.is_cuda:
                    value.record_stream(stream)  # it was allocated for the stream that made it
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in self.values.items()
        }


class Pixels(Protocol):
    """One host's share of a prompt's pixels."""

    def chunks(self, size: int) -> Iterator[PixelChunk]:
        """Return an iterator over the chunks, in order; it has to be closed.

        Args:
            size: the temporal patches of a chunk; the last may have fewer.

        Raises:
            VideoError: by the iterator, where a frame cannot be decoded.
        """


class GivenPixels:
    """Pixels that the caller holds.

    Args:
        values: a processor's batch: the whole video, or all images.
        patches: this host's temporal patches of the video; ``range(1)`` for images.
    """

    def __init__(self, values: Mapping[str, Any], patches: range):
        self._values, self._patches = values, patches

    def chunks(self, size: int) -> Iterator[PixelChunk]:
        """See :class:`Pixels`."""
        for start in range(0, len(self._patches), size):
            patches = self._patches[start : start + size]
            yield PixelChunk(self._cut(patches), len(patches))

    def _cut(self, patches: range) -> dict[str, Any]:
        pixels, grid = self._values.get("pixel_values_videos"), self._values.get("video_grid_thw")
        if pixels is None:  # images
            return dict(self._values)
        if grid is None:
            cut = slice(patches.start, patches.stop)
            return {"pixel_values_videos": pixels[:, cut] if pixels.dim() == 5 else pixels[cut]}
        rows = int(grid[0, 1] * grid[0, 2])  # of pixels, for one temporal patch
        grid = grid.clone()
        grid[0, 0] = len(patches)
        return {
            "pixel_values_videos": pixels[patches.start * rows : patches.stop * rows],
            "video_grid_thw": grid,
        }


class KeptPixels:
    """Pixels that are read once and kept, for a draft's vision tower beside or after the target's.

    Any number of threads may iterate over them. :meth:`close` has to be called in the end.
    """

    def __init__(self, pixels: Pixels):
        self._pixels, self._lock = pixels, Lock()
        self._kept: list[PixelChunk] = []
        self._source: Iterator[PixelChunk] | None = None
        self._error: BaseException | None = None
        self._is_complete = self._is_closed = False

    def chunks(self, size: int) -> Iterator[PixelChunk]:
        """See :class:`Pixels`; the chunks are as long as the first caller wants them."""
        number = 0
        while (chunk := self._chunk(number, size)) is not None:
            yield chunk
            number += 1

    def close(self) -> None:
        """End the threads that read, and forget the pixels."""
        with self._lock:
            self._is_closed = True
            self._kept, self._error, source, self._source = [], None, self._source, None
            if source is not None:
                source.close()

    def _chunk(self, number: int, size: int) -> PixelChunk | None:
        with self._lock:
            if self._is_closed:
                raise ValueError("the request whose pixels these are has ended")
            if number < len(self._kept):
                return self._kept[number]
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return None
            if self._source is None:
                self._source = self._pixels.chunks(size)
            try:
                chunk = next(self._source, None)
            except BaseException as error:
                self._error = error
                raise
            if chunk is None:
                self._is_complete = True
            else:
                self._kept.append(chunk)
            return chunk


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


def stream(
    decode: Callable[[], Iterator[Tensor]], prepare: Callable[[Tensor], PixelChunk], runs_ahead: bool
) -> Iterator[PixelChunk]:
    """Decode chunks of frames and make pixels of them, ahead of their use.

    Args:
        decode: returns a generator of uint8 ``[t, H, W, 3]``, which may decode ahead by itself.
        prepare: turns a chunk's frames into pixels.
        runs_ahead: whether a thread makes pixels beforehand, or the caller's thread when it asks.
    """
    with ExitStack() as stack:
        frames = stack.enter_context(closing(decode()))
        pixels = stack.enter_context(closing(_prepared(frames, prepare)))
        if runs_ahead:
            pixels = stack.enter_context(closing(ahead(pixels)))
        yield from pixels


def _prepared(frames: Iterator[Tensor], prepare: Callable[[Tensor], PixelChunk]) -> Iterator[PixelChunk]:
    for chunk in frames:
        yield prepare(chunk)
