"""The videos and images of a prompt, sharded over hosts, chunk by chunk.

The visual input of a prompt is a sequence of *items*, each a video or an image. Work is counted in
temporal patches, which are numbered over all items in prompt order: hosts get adjacent ones, of
about the same cost.

Another kind of item needs:

- a name for :attr:`VisualItem.kind`;
- an identity of its content, as :class:`Source` is for files;
- its place in the prompt (:func:`~apbv.input.prompts.tokenized_prompt.lay_out`);
- a reader of its pixels (:class:`~apbv.input.prompts.pixels.VideoReader`), made where
  :meth:`~apbv.input.prompts.prompt_reader.PromptReader.read` makes the others;
- the call of the model that encodes it, in :mod:`apbv.prefilling.encoding.vision`.

An item's temporal patches are adjacent: a video and audio that alternate would be several items
each.
"""

from bisect import bisect
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ...hosts import HostGroup
from ...layout import intersect, split_evenly
from ..media.files import Source

# Memory of decoding, preprocessing and the vision tower for a chunk, in multiples of its frames
# (decoded, waiting, being resized) and of its fp32 pixels (twice over, and activations of several
# times their size).
FRAME_COPIES = 3
PIXEL_COPIES = 12
# Chunks per share, so that its stages overlap, unless the chunks would be too small.
_CHUNKS_PER_SHARE = 8
_LEAST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class VisualItem:
    """Video or image of a prompt.

    A temporal patch is one frame, or several that the model merges; an image is one.

    Attributes:
        kind: ``"video"`` or ``"image"``.
        num_rows: its visual tokens.
        num_patches: its temporal patches.
        num_ending_rows: how many of its last rows belong to no frame (LLaVA's newline after a
            video).
        patch_bytes: an estimate of the memory in use while one temporal patch is encoded, and so of
            its cost.
        source: identity of its content; None if the caller prepared the pixels.
        size: height and width of an image; None for a video, or where it is not known.
        kept: bool ``[num_patches, h, w]``, which tokens of the frames the prompt has: the processor
            of VideoLLaMA 3 may leave out those that repeat the frame before. None: all of them.
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
        """How many rows each temporal patch has; the last one has the ending rows, too."""
        if self.kept is not None:
            return self.kept.flatten(1).sum(dim=1).tolist()
        rows_per_patch = (self.num_rows - self.num_ending_rows) // self.num_patches
        num_rows = [rows_per_patch] * self.num_patches
        num_rows[-1] += self.num_ending_rows
        return num_rows


@dataclass(frozen=True)
class PixelChunk:
    """Pixels of adjacent temporal patches of one kind of item.

    Attributes:
        values: keyword arguments of the model's ``get_*_features``.
        patches: which temporal patches of the prompt they are.
        kind: of the item, ``"video"`` or ``"image"``.
        ready: recorded after the kernels that make the values on a GPU, for other streams to wait
            for; None where the values are on the CPU.
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
        values = {}
        for name, value in self.values.items():
            if isinstance(value, Tensor):
                value = value.to(device, non_blocking=True)
            values[name] = value
        return values


class Pixels(Protocol):
    """One host's share of a prompt's pixels."""

    def chunks(self, chunks: Sequence[range]) -> Generator[PixelChunk, None, None]:
        """Return an iterator over chunks, in order; it has to be closed.

        Args:
            chunks: the temporal patches of each, as
                :meth:`~apbv.input.prompts.visual.VisualInput.chunks` returns them.

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
        if len(kinds) == 1:
            return kinds.pop()
        return "mixed"

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
        ends = accumulate((item.num_patches for item in self.items), initial=0)
        return tuple(range(start, stop) for start, stop in pairwise(ends))

    @cached_property
    def frames(self) -> tuple[range, ...]:
        """The rows of every temporal patch, without those that end a video."""
        frames = [range(start, stop) for start, stop in pairwise(self.row_starts)]
        for item, patches in zip(self.items, self.item_patches, strict=True):
            last = frames[patches.stop - 1]
            frames[patches.stop - 1] = range(last.start, last.stop - item.num_ending_rows)
        return tuple(frames)

    def item_of(self, patch: int) -> int:
        """Return the number of the item that a temporal patch belongs to."""
        return bisect(self.item_patches, patch, key=attrgetter("stop"))

    def kept_of(self, patches: range) -> Tensor | None:
        """Return which tokens of an item's adjacent patches are rows, bool ``[tokens]``; None: all.

        Args:
            patches: temporal patches, numbered over all items.
        """
        number = self.item_of(patches.start)
        item = self.items[number]
        if item.kept is None:
            return None
        first = self.item_patches[number].start
        return item.kept[patches.start - first : patches.stop - first].flatten()

    def ending_rows_of(self, patches: range) -> int:
        """Count the rows after the last frame of an item's adjacent patches; 0 unless they end it.

        Args:
            patches: temporal patches, numbered over all items.
        """
        return self.rows_of(patches).stop - self.frames[patches.stop - 1].stop

    @cached_property
    def runs(self) -> tuple[tuple[range, range], ...]:
        """The temporal patches that one reader reads, and their items: a video, or adjacent images.

        Both are ranges of numbers over the whole prompt.
        """
        runs: list[tuple[range, range]] = []
        for number, patches in enumerate(self.item_patches):
            continues_images = (
                number > 0
                and self.items[number].kind == "image"
                and self.items[number - 1].kind == "image"
            )
            if continues_images:
                patches_before, items = runs.pop()
                patches = range(patches_before.start, patches.stop)
                runs.append((patches, range(items.start, number + 1)))
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
        chunks: list[range] = []
        for run, _ in self.runs:
            chunks += _cut(intersect(run, share), costs, most)
        return chunks


def most_in_a_chunk(share: int, patch: int, num_bytes: int) -> int:
    """Return the maximum bytes of a chunk.

    Args:
        share: the bytes of the longest share.
        patch: the bytes of the largest temporal patch.
        num_bytes: the memory that a chunk may take.
    """
    even_bytes = share // _CHUNKS_PER_SHARE + patch - 1
    return min(num_bytes, max(even_bytes, _LEAST_BYTES))


def _cut(patches: range, costs: Sequence[int], most: int) -> Iterator[range]:
    """Cut adjacent temporal patches into the longest chunks that cost no more than ``most``."""
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
        frame_parallel: of :class:`apbv.PrefillConfig`; False: this host alone.
    """
    return hosts if frame_parallel else HostGroup.single(hosts.device)


def share_out(items: Sequence[VisualItem], hosts: HostGroup) -> VisualInput:
    """Share the temporal patches of a prompt's items out among the hosts that encode them (Eq. 6).

    Args:
        items: the videos and images, in prompt order.
        hosts: this host alone, where every host encodes everything.
    """
    rows_of_patches = []
    for item in items:
        rows_of_patches += item.rows_of_patches
    return VisualInput(
        items=tuple(items),
        patches=split_by_cost(_costs(items), hosts.size),
        host=hosts.rank,
        row_starts=tuple(accumulate(rows_of_patches, initial=0)),
    )


def _costs(items: Sequence[VisualItem]) -> list[int]:
    """Return for every temporal patch an estimate of the memory in use while it is encoded."""
    costs = []
    for item in items:
        costs += [item.patch_bytes] * item.num_patches
    return costs


def split_by_cost(costs: Sequence[int], parts: int) -> tuple[range, ...]:
    """Cut a sequence into adjacent parts so that the costliest costs as little as is possible.

    Where all costs are equal, lengths differ by one at most.

    Returns:
        For every part its range of indices; the last ones may be empty.
    """
    num_items = len(costs)
    if len(set(costs)) < 2:
        return tuple(split_evenly(range(num_items), parts))

    def cut(most: int) -> list[range]:
        return list(_cut(range(num_items), costs, most))

    # Bisect for the lowest cost of a part with which the parts suffice.
    lowest = max(costs)
    limits = range(lowest, sum(costs))
    num_too_low = bisect(limits, False, key=lambda most: len(cut(most)) <= parts)
    ranges = cut(lowest + num_too_low)
    while len(ranges) < parts:
        ranges.append(range(num_items, num_items))
    return tuple(ranges)
