"""Memory layouts of keys and values: runs of pieces, one tensor, or several buffers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import gcd

import torch
from torch import Tensor

Segment = tuple[Tensor, Tensor]  # k and v, each [B, Hkv, T, D]


@dataclass(frozen=True)
class Run:
    """One or more equally long pieces of K and V at equal distances in memory.

    Attributes:
        k, v: the first piece, ``[B, Hkv, piece_len, D]``.
        num_rows: rows of all pieces together.
        piece_len: rows of one piece.
        k_strides, v_strides: distances in elements from batch to batch, head to head, row to row,
            and what every further piece adds to that.
    """

    k: Tensor
    v: Tensor
    num_rows: int
    piece_len: int
    k_strides: tuple[int, int, int, int]
    v_strides: tuple[int, int, int, int]

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, num_pieces: int = 1, k_step: int = 0, v_step: int = 0
    ) -> "Run":
        """Describe pieces like (k, v), each ``k_step`` and ``v_step`` elements after the one before
        it."""
        length = k.shape[2]
        k_strides, v_strides = (
            (*head, step, 0)
            if length == 1
            else (*head, row, step - length * row if num_pieces > 1 else 0)
            for (*head, row), step in ((row_strides(k), k_step), (row_strides(v), v_step))
        )
        # Pieces of one row are rows of one piece.
        return cls(
            k, v, num_pieces * length, num_pieces if length == 1 else length, k_strides, v_strides
        )

    @property
    def form(self) -> "RunForm":
        """What decides how a kernel reads it, besides where it lies; of equal forms plans can be
        shared."""
        return self.num_rows, self.piece_len, self.k_strides, self.v_strides


RunForm = tuple[int, int, tuple[int, int, int, int], tuple[int, int, int, int]]


def divisor(length: int) -> tuple[int, int]:
    """Return magic and shift so that ``(row * magic >> 32) >> shift`` is ``row // length`` of a row
    below 2 ** 31.

    A processor has no division of integers (Granlund and Montgomery, 1994).
    """
    length = max(2, length)
    bits = (length - 1).bit_length()
    return (1 << (31 + bits)) // length + 1, bits - 1


def cdiv(number: int, by: int) -> int:
    """Divide and round up. Triton's own function of the name takes as long as half a launch."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the lowest power of 2 that is at least a number above 0."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, eq=False)
class SequenceBuffers:
    """Keys and values of R sequences in one layer, each with spare room after its rows.

    Attributes:
        keys, values: of every sequence ``[1, Hkv, capacity, D]``, contiguous.
        lengths: how many rows of each are in use, less than its capacity.
        counts: how many new rows each gets; None: one.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Sequence[int]
    counts: Sequence[int] | None = None

    def require_room(self) -> None:
        """Reject to append rows where a buffer is full.

        Raises:
            ValueError: it is.
        """
        for keys, length, count in zip(self.keys, self.lengths, self.counts or repeat(1)):  # noqa: B905
            if length + count > keys.shape[2]:
                raise ValueError(f"a buffer of {keys.shape[2]} rows has no room after row {length}")

    @property
    def places(self) -> list[list[int]]:
        """The addresses of keys, those of values, and the capacities:
        :attr:`BufferTable.places`."""
        addresses = [
            [buffer.data_ptr() for buffer in buffers] for buffers in (self.keys, self.values)
        ]
        return [*addresses, [keys.shape[2] for keys in self.keys]]


@dataclass(frozen=True, eq=False)
class BufferTable:
    """Addresses of the buffers of R sequences, on a device, for kernels that look them up.

    The memory must be kept by others. A kernel that is given the same table later finds what it
    holds then.

    Attributes:
        places: int64 ``[3, R]``, addresses of keys and of values, multiples of 16, and capacities.
        lengths: int64 ``[R]``: how many rows of each are in use; -1: the slot is empty.
        most_rows: no sequence is longer, which tells how far it is worth splitting.
        starts: int64 ``[R + 1]``: the new rows of sequence r are starts[r] .. starts[r + 1] - 1;
            None: one each.
        most_new: no sequence gets more new rows; a power of 2, for each of which kernels are
            compiled.
    """

    places: Tensor
    lengths: Tensor
    most_rows: int
    starts: Tensor | None = None
    most_new: int = 1


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Sequences packed along the first dimension of a tensor ``[T, ...]``.

    What is worked out of the boundaries is kept, so that all layers of a model can share it.

    Attributes:
        boundaries: int32 ``[N + 1]``, ascending from 0 to T: where each sequence begins, and the
            last one ends.
        longest: the number of rows of the longest sequence.
    """

    boundaries: Tensor
    longest: int

    @cached_property
    def by_length(self) -> list[tuple[int, Tensor | None]]:
        """Sequences of equal length together, as (length, rows), shortest first; empty sequences
        are left out.

        Rows are int64 indices along the first dimension, one sequence after the other; None stands
        for all rows. Where the boundaries are on a GPU, this waits for it.
        """
        lengths = self.boundaries.diff().cpu()
        starts = lengths.cumsum(0) - lengths
        distinct = list(filter(None, lengths.unique().tolist()))
        if len(distinct) == 1:
            return [(distinct[0], None)]
        rows = [(starts[lengths == n][:, None] + torch.arange(n)).flatten() for n in distinct]
        return [
            (n, of_length.to(self.boundaries.device))
            for n, of_length in zip(distinct, rows, strict=True)
        ]


def find_runs(segments: list[Segment]) -> list[Run]:
    """Join segments to runs, in order: neighbours of one shape at equal distances become one
    run."""
    # The first of each, and where all of them lie.
    runs: list[tuple[Segment, list[tuple[int, int]]]] = []
    before = step = None
    for k, v in segments:
        if not k.shape[2]:
            continue
        form = (k.shape, k.stride(), v.shape, v.stride())
        (at_k, at_v) = (k.data_ptr(), v.data_ptr())
        if form == before:
            places = runs[-1][1]
            from_k, from_v = places[-1]
            if len(places) == 1 or step == (at_k - from_k, at_v - from_v):
                step = at_k - from_k, at_v - from_v
                places.append((at_k, at_v))
                continue
        before = form
        step = None
        runs.append(((k, v), [(at_k, at_v)]))
    found = []
    for (k, v), places in runs:
        steps = (0, 0) if len(places) == 1 else [y - x for x, y in zip(*places[:2], strict=True)]
        found.append(Run.of(k, v, len(places), *(step // k.element_size() for step in steps)))
    return found


def row_strides(states: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row; 0 where there is only one, whose stride may be
    anything."""
    return strides_of(states.shape[:3], states.stride()[:3])


def strides_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides, with 0 for sizes of 1."""
    return tuple([0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)])


def in_rows(states: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, as kernels read it; copy only where
    necessary."""
    return states if states.stride(-1) == 1 else states.contiguous()


def alignment(element_size: int, strides: Iterable[int]) -> int:
    """Count the elements to which all rows are known to be aligned, at most as many as a load of 16
    bytes has."""
    return gcd(16 // element_size, *strides)


@dataclass(frozen=True, eq=False)
class ListedBlocks:
    """The keys that each query of one causal sequence attends to, block by block, for every head.

    The queries are cut into blocks of ``query_block`` rows, and the keys into blocks of
    ``key_block``, from the first token on; the last block may be shorter. A query sees its own
    block of rows up to itself, whatever is listed, and of the keys before that the blocks that are
    listed.

    Attributes:
        counts: int32 ``[B, Hq, nq]``, how many blocks are listed for each block of queries.
        indices: int32 ``[B, Hq, nq, nk]``, ascending; those after the counted ones mean nothing.
        query_block: rows of a block of queries, a multiple of ``key_block``.
        key_block: rows of a block of keys.
    """

    counts: Tensor
    indices: Tensor
    query_block: int
    key_block: int

    @classmethod
    def of(cls, kept: Tensor, query_block: int, key_block: int) -> "ListedBlocks":
        """List the blocks of a mask, without waiting for the device.

        Args:
            kept: bool ``[B, Hq, nq, nk]``. What it says of blocks that are not wholly before the
                queries is not looked at.
            query_block, key_block: see the class.

        Raises:
            ValueError: the blocks' rows are not powers of two of at least 16, or blocks of keys are
                longer.
        """
        # A kernel's tiles are powers of two: then a block is one tile, or several whole ones.
        if (
            any(rows < 16 or rows & (rows - 1) for rows in (query_block, key_block))
            or key_block > query_block
        ):
            raise ValueError(
                f"invalid blocks of {query_block} queries and {key_block} keys: not 16, 32, 64, …, "
                "or more keys"
            )
        rows, columns = (torch.arange(n, device=kept.device) for n in kept.shape[2:])
        kept = kept & (columns < rows[:, None] * (query_block // key_block))
        places = kept.cumsum(dim=-1, dtype=torch.int32)
        # Blocks that are not kept are written to one more place, which is then cut off.
        targets = torch.where(kept, places - 1, len(columns)).long()
        indices = places.new_zeros(*kept.shape[:3], len(columns) + 1)
        indices.scatter_(3, targets, columns.int().expand_as(targets))
        return cls(
            kept.sum(dim=-1, dtype=torch.int32),
            indices[..., :-1].contiguous(),
            query_block,
            key_block,
        )

    @property
    def kept(self) -> Tensor:
        """The mask of the listed blocks, bool ``[B, Hq, nq, nk]``; none is on the diagonal or after
        it."""
        is_listed = (
            torch.arange(self.indices.shape[3], device=self.indices.device) < self.counts[..., None]
        )
        kept = torch.zeros_like(is_listed)
        # Of equal places the listed one must win: what is not listed is added as nothing.
        return kept.int().scatter_add_(3, self.indices.long(), is_listed.int()).bool()

    def num_scores(self, num_tokens: int) -> Tensor:
        """Count the scores that are computed for a number of tokens, in fp64 on the device."""
        last = (
            torch.arange(self.counts.shape[2], device=self.counts.device)
            == self.counts.shape[2] - 1
        )
        short = num_tokens - self.query_block * (self.counts.shape[2] - 1)
        rows = torch.where(last, short, self.query_block).double()
        return (self.counts * self.key_block * rows + rows * (rows + 1) / 2).sum()
