"""Pixels as a vision tower takes them, in chunks: given by the caller, or made of frames as these are read.

A chunk is some temporal patches of a video, or some images side by side. While the tower encodes one, the next
is preprocessed and the one after that decoded, each by a thread of its own; so no more than a few chunks are in
memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..layout import intersect

Item = TypeVar("Item")
_END = object()


@dataclass(frozen=True)
class PixelChunk:
    """The pixels of adjacent temporal patches of one kind of item.

    Attributes:
        values: keyword arguments of the model's ``get_*_features``.
        patches: which temporal patches of the prompt they are.
        kind: of the item, ``"video"`` or ``"image"``.
        ready: where the values are made on a GPU, by kernels that another stream has to wait for: when.
    """

    values: dict[str, Any]
    patches: range
    kind: str
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

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """Return an iterator over chunks, in order; it has to be closed.

        Args:
            chunks: the temporal patches of each, as :meth:`~apbv.input.visual.VisualInput.chunks` returns them.

        Raises:
            VideoError, PromptError: by the iterator, where a frame or an image cannot be decoded.
        """


class PixelReader(Protocol):
    """How the pixels of a run of temporal patches are read: those of a video, or of images side by side."""

    kind: str

    def read(self, chunks: Sequence[range]) -> Iterator[Any]:
        """Return a generator of what is read for each chunk; it may read ahead by itself.

        Args:
            chunks: temporal patches, numbered within the run; adjacent, and all but the last as many where the run
                is a video.
        """

    def prepare(self, read: Any) -> "tuple[dict[str, Any], torch.cuda.Event | None]":
        """Make pixels of what was read for a chunk: a :class:`PixelChunk`'s values, and when they are ready."""


@dataclass(frozen=True)
class SourcePixels:
    """Pixels that are read from their files as they are asked for.

    Attributes:
        readers: of every run of temporal patches (:attr:`~apbv.input.visual.VisualInput.runs`).
        runs_ahead: whether a thread makes chunks before they are asked for, or the caller's thread when it asks.
    """

    readers: tuple[tuple[range, PixelReader], ...]
    runs_ahead: bool = True

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`."""
        with ExitStack() as stack:
            pixels = stack.enter_context(closing(self._read(chunks)))
            if self.runs_ahead:
                pixels = stack.enter_context(closing(ahead(pixels)))
            yield from pixels

    def _read(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        for run, reader in self.readers:
            inside = [chunk for chunk in chunks if chunk.start in run]
            if not inside:
                continue
            with closing(reader.read([_shifted(chunk, run) for chunk in inside])) as read:
                for chunk, what in zip(inside, read, strict=True):
                    values, ready = reader.prepare(what)
                    yield PixelChunk(values, chunk, reader.kind, ready)


class GivenPixels:
    """Pixels that the caller holds.

    Args:
        items: for every item its kind, its temporal patches, and its part of a processor's batch.
    """

    def __init__(self, items: Sequence[tuple[str, range, Mapping[str, Any]]]):
        self._items = items

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`."""
        for chunk in chunks:
            parts = [
                (kind, _cut(kind, values, _shifted(intersect(chunk, patches), patches)))
                for kind, patches, values in self._items
                if intersect(chunk, patches)
            ]
            yield PixelChunk(_joined([values for _, values in parts]), chunk, parts[0][0])


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

    def chunks(self, chunks: Sequence[range]) -> Iterator[PixelChunk]:
        """See :class:`Pixels`; the chunks are those that the first caller wants."""
        number = 0
        while (chunk := self._chunk(number, chunks)) is not None:
            yield chunk
            number += 1

    def close(self) -> None:
        """End the threads that read, and forget the pixels."""
        with self._lock:
            self._is_closed = True
            self._kept, self._error, source, self._source = [], None, self._source, None
            if source is not None:
                source.close()

    def _chunk(self, number: int, chunks: Sequence[range]) -> PixelChunk | None:
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
                self._source = self._pixels.chunks(chunks)
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


def _shifted(patches: range, run: range) -> range:
    """Number temporal patches from a run's first."""
    return range(patches.start - run.start, patches.stop - run.start)


def _cut(kind: str, values: Mapping[str, Any], patches: range) -> dict[str, Any]:
    """Return the part of an item's pixels that is of some of its temporal patches."""
    if kind == "image":
        return dict(values)
    pixels, grid = values["pixel_values_videos"], values.get("video_grid_thw")
    if grid is None:
        cut = slice(patches.start, patches.stop)
        return {"pixel_values_videos": pixels[:, cut] if pixels.dim() == 5 else pixels[cut]}
    rows = int(grid[0, 1] * grid[0, 2])  # of pixels, for one temporal patch
    grid = grid.clone()
    grid[0, 0] = len(patches)
    return {"pixel_values_videos": pixels[patches.start * rows : patches.stop * rows], "video_grid_thw": grid}


def _joined(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the batches of several items."""
    return {name: torch.cat([torch.as_tensor(values[name]) for values in items]) for name in items[0]}
