"""Several sequences in one call: each in buffers of its own, or packed into one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
        """Reject appending rows to a full buffer.

        Raises:
            ValueError: a buffer has no room for its sequence's new rows.
        """
        for index, (keys, length) in enumerate(zip(self.keys, self.lengths, strict=True)):
            count = 1 if self.counts is None else self.counts[index]
            capacity = keys.shape[2]
            if length + count > capacity:
                raise ValueError(f"a buffer of {capacity} rows has no room after row {length}")

    @property
    def places(self) -> list[list[int]]:
        """The rows of :attr:`BufferTable.places`: addresses of K, addresses of V, capacities."""
        return [
            [keys.data_ptr() for keys in self.keys],
            [values.data_ptr() for values in self.values],
            [keys.shape[2] for keys in self.keys],
        ]


@dataclass(frozen=True, eq=False)
class BufferTable:
    """Addresses of the buffers of R sequences, on a device, for kernels that look them up.

    The table does not keep the memory alive. A kernel that is launched again with the same table
    reads what the table holds then.

    Attributes:
        places: int64 ``[3, R]``, addresses of keys and of values, multiples of 16, and capacities.
        lengths: int64 ``[R]``: how many rows of each are in use; -1: the slot is empty.
        most_rows: an upper bound of all lengths, which decides how far keys are split.
        starts: int64 ``[R + 1]``: the new rows of sequence r are starts[r] .. starts[r + 1] - 1;
            None: one each.
        most_new: an upper bound of new rows of a sequence; a power of 2, for each of which kernels
            are compiled.
    """

    places: Tensor
    lengths: Tensor
    most_rows: int
    starts: Tensor | None = None
    most_new: int = 1


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Sequences packed along the first dimension of a tensor ``[T, ...]``.

    What is computed from the boundaries is kept, so that all layers of a model share it.

    Attributes:
        boundaries: int32 ``[N + 1]``, ascending from 0 to T: where each sequence begins, and the
            last one ends.
        longest: the number of rows of the longest sequence.
    """

    boundaries: Tensor
    longest: int

    @cached_property
    def by_length(self) -> list[tuple[int, Tensor | None]]:
        """Sequences grouped by length, as (length, rows), shortest first, without empty ones.

        Rows are int64 indices along the first dimension, one sequence after the other; None stands
        for all rows. Where the boundaries are on a GPU, this waits for it.
        """
        lengths = self.boundaries.diff().cpu()
        starts = lengths.cumsum(0) - lengths
        distinct_lengths = [length for length in lengths.unique().tolist() if length > 0]
        if len(distinct_lengths) == 1:
            return [(distinct_lengths[0], None)]

        groups: list[tuple[int, Tensor | None]] = []
        for length in distinct_lengths:
            starts_of_length = starts[lengths == length]
            rows = (starts_of_length[:, None] + torch.arange(length)).flatten()
            groups.append((length, rows.to(self.boundaries.device)))
        return groups
