"""Key segments: rows of K and V that an attention kernel reads in place, one after the other."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .strides import row_strides

Segment = tuple[Tensor, Tensor]  # k and v, each [B, Hkv, T, D]


class SegmentLayout(NamedTuple):
    """Describes where the rows of a :class:`KeySegment` lie, from its first row on.

    Attributes:
        num_rows: rows of all pieces together.
        piece_len: rows of one piece.
        k_strides, v_strides: distances in elements from batch to batch, head to head, row to row,
            and what every further piece adds to that.
    """

    num_rows: int
    piece_len: int
    k_strides: tuple[int, int, int, int]
    v_strides: tuple[int, int, int, int]


@dataclass(frozen=True)
class KeySegment:
    """Holds one or more equally long pieces of K and V at equal distances in memory.

    Attributes:
        k, v: the first piece, ``[B, Hkv, piece_len, D]``.
        layout: where the rows lie. Equal layouts can share a launch plan.
    """

    k: Tensor
    v: Tensor
    layout: SegmentLayout

    @classmethod
    def of_pieces(
        cls,
        k: Tensor,
        v: Tensor,
        num_pieces: int = 1,
        k_step: int = 0,
        v_step: int = 0,
    ) -> "KeySegment":
        """Describe pieces of the shape of (k, v), ``k_step`` and ``v_step`` elements apart."""
        piece_len = k.shape[2]
        k_strides = _segment_strides(k, num_pieces, k_step)
        v_strides = _segment_strides(v, num_pieces, v_step)
        num_rows = num_pieces * piece_len
        if piece_len == 1:
            piece_len = num_pieces  # pieces of one row are the rows of one piece
        return cls(k, v, SegmentLayout(num_rows, piece_len, k_strides, v_strides))


def _segment_strides(piece: Tensor, num_pieces: int, step: int) -> tuple[int, int, int, int]:
    """Return a piece's strides of batch, head and row, and what every further piece adds."""
    batch_stride, head_stride, row_stride = row_strides(piece)
    piece_len = piece.shape[2]
    if piece_len == 1:
        return batch_stride, head_stride, step, 0
    jump = 0
    if num_pieces > 1:
        jump = step - piece_len * row_stride
    return batch_stride, head_stride, row_stride, jump


@dataclass
class _EqualPieces:
    """Collects neighbouring segments of one shape at equal distances.

    Attributes:
        first: the first of them.
        addresses: where the K and V of each begin, in bytes.
    """

    first: Segment
    addresses: list[tuple[int, int]]

    @property
    def step(self) -> tuple[int, int] | None:
        """The bytes from K to K and from V to V of neighbours; None: there is one piece."""
        if len(self.addresses) == 1:
            return None
        (k_first, v_first), (k_second, v_second) = self.addresses[:2]
        return k_second - k_first, v_second - v_first

    def continues_at(self, k_address: int, v_address: int) -> bool:
        """Return whether a piece at these addresses is as far from the last one as the others."""
        if self.step is None:
            return True
        k_last, v_last = self.addresses[-1]
        return self.step == (k_address - k_last, v_address - v_last)


def find_key_segments(segments: list[Segment]) -> list[KeySegment]:
    """Join neighbouring segments of one shape at equal distances, and leave out empty ones."""
    joined: list[_EqualPieces] = []
    form_before = None
    for k, v in segments:
        if k.shape[2] == 0:
            continue
        form = (k.shape, k.stride(), v.shape, v.stride())
        k_address = k.data_ptr()
        v_address = v.data_ptr()
        if form == form_before and joined[-1].continues_at(k_address, v_address):
            joined[-1].addresses.append((k_address, v_address))
        else:
            joined.append(_EqualPieces((k, v), [(k_address, v_address)]))
        form_before = form

    key_segments = []
    for pieces in joined:
        k, v = pieces.first
        k_step, v_step = pieces.step or (0, 0)
        key_segments.append(
            KeySegment.of_pieces(
                k,
                v,
                num_pieces=len(pieces.addresses),
                k_step=k_step // k.element_size(),
                v_step=v_step // k.element_size(),
            )
        )
    return key_segments
