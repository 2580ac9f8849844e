"""Where keys and values lie, as the attention kernel reads them: in runs of pieces at equal distances."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from torch import Tensor

Segment = tuple[Tensor, Tensor]  # k and v, each [B, Hkv, T, D]


@dataclass(frozen=True)
class Run:
    """Equally long pieces of K and V at equal distances in memory; one piece, if need be.

    Attributes:
        k, v: the first piece, ``[B, Hkv, piece_len, D]``.
        num_rows: of all pieces together.
        k_strides, v_strides: elements from piece to piece, and of batch, head and row.
    """

    k: Tensor
    v: Tensor
    num_rows: int
    piece_len: int
    k_strides: tuple[int, int, int, int]
    v_strides: tuple[int, int, int, int]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, num_pieces: int = 1, k_step: int = 0, v_step: int = 0) -> "Run":
        length = k.shape[2]
        return cls(k, v, num_pieces * length, length, (k_step, *row_strides(k)), (v_step, *row_strides(v)))


def find_runs(segments: list[Segment]) -> list[Run]:
    """Segments as runs, in order: neighbours are one where they are alike and each is as far from the next."""
    groups: list[list[Segment]] = []
    for k, v in segments:
        if not k.shape[2]:
            continue
        if groups and _continues(groups[-1], (k, v)):
            groups[-1].append((k, v))
        else:
            groups.append([(k, v)])
    return [Run.of(*group[0], len(group), *(_distances(*group[:2]) if len(group) > 1 else ())) for group in groups]


def _continues(group: list[Segment], segment: Segment) -> bool:
    """Whether a segment is like those of a group, and as far from the last as they are from each other."""
    if any(a.shape != b.shape or a.stride() != b.stride() for a, b in zip(group[0], segment, strict=True)):
        return False
    return len(group) == 1 or _distances(group[-1], segment) == _distances(group[0], group[1])


def _distances(first: Segment, second: Segment) -> tuple[int, int]:
    """Elements from one segment's K to the other's, and from V to V."""
    return tuple((b.data_ptr() - a.data_ptr()) // a.element_size() for a, b in zip(first, second, strict=True))


def row_strides(states: Tensor) -> tuple[int, ...]:
    """Of batch, head and row; 0 where there is only one, whose stride may be anything."""
    rows = zip(states.shape[:3], states.stride()[:3], strict=True)
    return tuple(0 if size == 1 else stride for size, stride in rows)


def in_rows(states: Tensor) -> Tensor:
    """With neighbouring numbers in the last dimension, as kernels read them; a copy only where it has to be."""
    return states if states.stride(-1) == 1 else states.contiguous()


def alignment(element_size: int, strides: Iterable[int]) -> int:
    """How many elements all rows are known to be aligned to: enough for loads of 16 bytes, if they allow it."""
    return gcd(16 // element_size, *strides)
