"""The videos and images of a prompt, sharded over hosts, chunk by chunk.

The visual input of a prompt is a sequence of *items*, each a video or an image. Work is counted in
temporal patches, which are numbered over all items in prompt order: hosts get adjacent ones, of
about the same cost.

Another kind of item needs a name for :attr:`VisualItem.kind`; what identifies its content, as
:class:`Source` does; its place in the prompt (:func:`~apbv.input.skeleton.lay_out`); a reader of
its pixels (:class:`~apbv.input.pixels.VideoReader`), made where
:meth:`~apbv.input.reading.PromptReader.read` makes the others; and the call of the model that
encodes it, in :mod:`apbv.prefilling.encode`. An item's temporal patches are adjacent: what
alternates with another's, such as a video and its audio, is several items each.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..layout import intersect, split_evenly
from .files import Source

# Memory of decoding, preprocessing and the vision tower for a chunk, in multiples of its frames
# (decoded, waiting, being resized) and of its fp32 pixels (twice over, and activations of several
# times their size).
FRAME_COPIES = 3
PIXEL_COPIES = 12
# Chunks per share, so that its stages overlap, unless the chunks would be too small.
_CHUNKS_PER_SHARE = 8
_LEAST_BYTES = 32 * 2**20


class PromptError(ValueError):
    """Raised if this model cannot answer the prompt; the message says why."""


@dataclass(frozen=True)
class VisualItem:
    """Video or image of a prompt.

    A temporal patch is one frame, or several that the model merges; an image is one.

    Attributes:
        kind: ``"video"`` or ``"image"``.
        num_rows: its visual tokens.
        num_patches: its temporal patches.
        num_ending_rows: how many of its rows, the last, belong to no frame (LLaVA's newline after a
            video).
        patch_bytes: an estimate of the memory in use while one temporal patch is encoded, and so of
            its cost.
        source: identity of its content; None if the caller prepared the pixels.
        size: height and width of an image; None for a video, or where it is not known.
        kept: of VideoLLaMA 3's videos bool ``[num_patches, h, w]``, which tokens of the frames the
            prompt has: its processor may leave out what repeats the frame before. None: all of
            them.
    """

    kind: str
    num_rows: int
    num_patches: int = 1
    num_ending_rows: int = 0
    patch_bytes: int = 0
    source: Source | None = None
    size: tuple[int, int] | None = None
    kept: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether the prompt has all tokens of its frames."""
        return self.kept is None or bool(self.kept.all())

    @property
    def rows_of_patches(self) -> list[int]:
        """How many rows each temporal patch has; the last one's are also those that belong to no
        frame."""
        if self.kept is not None:
            return self.kept.flatten(1).sum(dim=1).tolist()
        rows = (self.num_rows - self.num_ending_rows) // self.num_patches
        return [rows] * (self.num_patches - 1) + [rows + self.num_ending_rows]


@dataclass(frozen=True)
class PixelChunk:
    """Pixels of adjacent temporal patches of one kind of item.

    Attributes:
        values: keyword arguments of the model's ``get_*_features``.
        patches: which temporal patches of the prompt they are.
        kind: of the item, ``"video"`` or ``"image"``.
        ready: where the values are made on a GPU, by kernels that another stream has to wait for:
            when.
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
            chunks: the temporal patches of each, as :meth:`~apbv.input.visual.VisualInput.chunks`
                returns them.

        Raises:
            VideoError, PromptError: by the iterator, where a frame or an image cannot be decoded.
        """


class RowStarts:
    """Numbers the rows of adjacent pieces.

    Attributes:
        row_starts: where the rows of each piece begin, and where the last one's end.
    """

    row_starts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The tokens of this kind in the prompt."""
        return self.row_starts[-1]

    def rows_of(self, pieces: range) -> range:
        """Return the rows of adjacent pieces."""
        return range(self.row_starts[pieces.start], self.row_starts[pieces.stop])


@dataclass(frozen=True)
class VisualInput(RowStarts):
    """Videos and images of a prompt, and this host's share of them.

    Temporal patches are numbered over all items. A row is a visual token's embedding; rows are
    numbered in prompt order.

    Attributes:
        items: the videos and images, in prompt order.
        patches: for every host, the temporal patches that it encodes; ascending with the host. One
            range of all where every host encodes everything.
        host: the host whose share ``pixels`` are, an index of ``patches``.
        row_starts: P + 1 numbers: temporal patch p has the rows row_starts[p] .. row_starts[p + 1].
        pixels: of this host's share; None if it is empty, or encoded already.
        chunk_bytes: the memory that every host may take for a chunk; None: not agreed on yet.
    """

    items: tuple[VisualItem, ...]
    patches: tuple[range, ...]
    host: int
    row_starts: tuple[int, ...]
    pixels: Pixels | None = None
    chunk_bytes: int | None = None

    @property
    def kind(self) -> str:
        """``"video"`` or ``"image"`` where all items are, else ``"mixed"``."""
        kinds = {item.kind for item in self.items}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def is_shared_out(self) -> bool:
        """Whether each of several hosts encodes a share; else every host encodes everything."""
        return len(self.patches) > 1

    @property
    def pieces(self) -> tuple[range, ...]:
        """The rows that each host encodes."""
        return tuple(self.rows_of(share) for share in self.patches)

    @property
    def identity(self) -> tuple | None:
        """Cache key of the embeddings of this host's share, without the model; None if unknown."""
        sources = tuple(item.source for item in self.items)
        return None if None in sources else sources

    @cached_property
    def item_patches(self) -> tuple[range, ...]:
        """The temporal patches of every item."""
        ends = list(accumulate(map(attrgetter("num_patches"), self.items), initial=0))
        return tuple(map(range, ends, ends[1:]))

    @cached_property
    def frames(self) -> tuple[range, ...]:
        """The rows of every temporal patch, without those that end a video."""
        frames = list(map(range, self.row_starts, self.row_starts[1:]))
        for item, patches in zip(self.items, self.item_patches, strict=True):
            last = frames[patches.stop - 1]
            frames[patches.stop - 1] = range(last.start, last.stop - item.num_ending_rows)
        return tuple(frames)

    def item_of(self, patch: int) -> int:
        """Return the number of the item that a temporal patch belongs to."""
        return bisect(self.item_patches, patch, key=attrgetter("stop"))

    def kept_of(self, patches: range) -> Tensor | None:
        """Return which tokens of an item's adjacent temporal patches are rows, bool ``[tokens]``;
        None: all."""
        number = self.item_of(patches.start)
        item = self.items[number]
        first = self.item_patches[number].start
        return (
            None
            if item.kept is None
            else item.kept[patches.start - first : patches.stop - first].flatten()
        )

    def ending_rows_of(self, patches: range) -> int:
        """Count the rows after the last frame of adjacent temporal patches of an item; 0 unless
        they end it."""
        return self.rows_of(patches).stop - self.frames[patches.stop - 1].stop

    @cached_property
    def runs(self) -> tuple[tuple[range, range], ...]:
        """The temporal patches that one reader reads, and their items: a video, or all images side
        by side."""
        runs: list[tuple[range, range]] = []
        for number, patches in enumerate(self.item_patches):
            if number and self.items[number].kind == self.items[number - 1].kind == "image":
                before, items = runs.pop()
                runs.append((range(before.start, patches.stop), range(items.start, number + 1)))
            else:
                runs.append((patches, range(number, number + 1)))
        return tuple(runs)

    def chunks(self, host: int, num_bytes: int) -> list[range]:
        """Return the temporal patches that a host encodes at a time, each time of one run.

        Args:
            num_bytes: how much memory their frames, pixels and activations may take, if a single
                one does not take more.
        """
        costs = _costs(self.items)
        longest = max(sum(costs[share.start : share.stop]) for share in self.patches)
        most = most_in_a_chunk(longest, max(costs), num_bytes)
        share = self.patches[host]
        chunks = []
        for run, _ in self.runs:
            chunks += _cut(intersect(run, share), costs, most)
        return chunks


def most_in_a_chunk(share: int, patch: int, num_bytes: int) -> int:
    """Return the maximum bytes of a chunk of the longest share, given the maximum per patch."""
    return min(num_bytes, max(share // _CHUNKS_PER_SHARE + patch - 1, _LEAST_BYTES))


def _cut(patches: range, costs: Sequence[int], most: int) -> Iterator[range]:
    """Cut adjacent temporal patches into as long chunks as cost no more than ``most``."""
    start = patches.start
    cost = 0
    for patch in patches:
        if cost + costs[patch] > most and patch > start:
            yield range(start, patch)
            start = patch
            cost = 0
        cost += costs[patch]
    if patches:
        yield range(start, patches.stop)


def encoding_hosts(hosts: HostGroup, frame_parallel: bool) -> HostGroup:
    """Return the hosts among which a prompt's frames, images and audio are shared out.

    Args:
        frame_parallel: as in :class:`apbv.PrefillConfig`; off, that is this host alone.
    """
    return hosts if frame_parallel else HostGroup.single(hosts.device)


def share_out(items: Sequence[VisualItem], hosts: HostGroup) -> VisualInput:
    """Share the temporal patches of a prompt's items out among the hosts that encode them (Eq. 6).

    Args:
        items: the videos and images, in prompt order.
        hosts: this host alone, where every host encodes everything.
    """
    row_starts = accumulate(
        chain.from_iterable(map(attrgetter("rows_of_patches"), items)), initial=0
    )
    return VisualInput(
        tuple(items), split_by_cost(_costs(items), hosts.size), hosts.rank, tuple(row_starts)
    )


def _costs(items: Sequence[VisualItem]) -> list[int]:
    """Return for every temporal patch an estimate of the memory in use while it is encoded."""
    return [item.patch_bytes for item in items for _ in range(item.num_patches)]


def split_by_cost(costs: Sequence[int], parts: int) -> tuple[range, ...]:
    """Cut a sequence into adjacent parts so that the costliest costs as little as is possible.

    Where all costs are equal, lengths differ by one at most.

    Returns:
        For every part its range of indices; the last ones may be empty.
    """
    if len(set(costs)) < 2:
        return tuple(split_evenly(range(len(costs)), parts))
    everything, candidates = range(len(costs)), range(max(costs), sum(costs))
    suffices = bisect(
        candidates, False, key=lambda most: len(list(_cut(everything, costs, most))) <= parts
    )
    cut = list(_cut(everything, costs, max(costs) + suffices))
    return (*cut, *(range(len(costs), len(costs)) for _ in range(parts - len(cut))))


def num_frames_told(family: str, num_frames: int, num_merged: int) -> int:
    """Return the number of frames to pass to a processor for a video's layout in the prompt.

    Where a video's last frames do not fill a temporal patch, Qwen's processors repeat the last one.
    Qwen3-VL's and GLM's reject to compute the size of a video of fewer frames than one patch, which
    is told to be that long.

    Args:
        num_merged: the frames of a temporal patch.
    """
    return max(num_frames, num_merged) if family in ("qwen3_vl", "glm4v") else num_frames
