"""Merging in Triton, bound by reading the partial results."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import alignment, cdiv, in_rows, next_power_of_2, row_strides

_MOST_PARTS = 128  # partial results of a row that one program loads together
_TILE = 4096  # numbers of a program's tile, where a row has no more


def merge_states(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge as :func:`apbv.kernels.merge_states` does, in one launch, and without a copy where D's stride is 1."""
    if isinstance(outs, Tensor) and (out is None or out.shape[2] == outs.shape[3]):
        return _merge_stacked(in_rows(outs), lses, out)
    return _merge_separate([in_rows(partial) for partial in outs], tuple(lses), out)


def veiled(*numbers: int) -> tuple[int, ...]:
    """Encode integers so that Triton sees neither that one is 1 nor that 16 divides it.

    Triton would compile anew for each such combination, as ``do_not_specialize`` has no effect inside tuples.
    """
    return tuple(4 * number + 3 for number in numbers)


@triton.jit
def plain(number):
    """Return the integer that :func:`veiled` hid."""
    return number >> 2


def _merge_stacked(outs: Tensor, lses: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge any number of partial results of all queries, at equal distances in memory."""
    parts, batch, heads, queries, dim = outs.shape
    out = outs.new_empty(batch, heads, queries, dim, dtype=torch.float32) if out is None else out
    lse = lses.new_empty(batch, heads, queries, dtype=torch.float32)
    if not lse.numel():
        return out, lse
    width, together = next_power_of_2(dim), min(next_power_of_2(parts), _MOST_PARTS)
    rows_per_block = max(1, _TILE // (together * width))
    # Triton itself distinguishes only strides that 16 divides from all others.
    strides = [*outs.stride()[:4], *out.stride()[:3]]
    strides = [stride for stride, size in zip(strides, (*outs.shape[:4], *out.shape[:3]), strict=True) if size > 1]
    _merge_kernel[(cdiv(lse.numel(), rows_per_block),)](
        outs, lses, out, lse, parts, lse.numel(), heads, queries, *outs.stride()[:4], *lses.stride(),
        *out.stride()[:3], BN=together, D=dim, BR=rows_per_block, BD=width, ALIGNED=math.gcd(16, *strides),
        num_warps=4 if rows_per_block * together * width <= _TILE else 8,
    )  # fmt: skip
    return out, lse


def _merge_separate(outs: list[Tensor], lses: tuple[Tensor, ...], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge a few partial results, each where it lies, of all queries or the last ones."""
    batch, heads, _, dim = outs[0].shape
    if out is None:
        longest = max(partial.shape[2] for partial in outs)
        out = outs[0].new_empty(batch, longest, heads, dim, dtype=torch.float32).transpose(1, 2)
    queries = out.shape[2]
    lse = lses[0].new_empty(batch, heads, queries, dtype=torch.float32)
    if not lse.numel():
        return out, lse
    rows, width = lse.numel(), next_power_of_2(dim)
    widest = max(partial.element_size() for partial in (*outs, out))
    rows_per_block, num_warps = _block_rows(rows, width * widest)
    strides = [row_strides(partial) for partial in outs]
    out_strides = row_strides(out)
    align = alignment(widest, [stride for of_one in (*strides, out_strides) for stride in of_one])
    _merge_separate_kernel[(cdiv(rows, rows_per_block),)](
        tuple(outs), lses, out, lse, tuple(veiled(*(stride // align for stride in of_one)) for of_one in strides),
        tuple(veiled(*partial.stride()) for partial in lses),
        veiled(*(queries - partial.shape[2] for partial in outs)),
        veiled(*(stride // align for stride in out_strides)), rows, heads, queries,
        D=dim, BR=rows_per_block, BD=width, ALIGN=align, HEADS_FIRST=out_strides[1] < out_strides[2],
        num_warps=num_warps,
    )  # fmt: skip
    return out, lse


def _block_rows(rows: int, row_bytes: int) -> tuple[int, int]:
    """Choose rows per program and its warps: two loads of 16 bytes per thread and partial result."""
    num_warps = 4 if rows * row_bytes >= 2**20 else 1  # few rows: many small programs keep all processors busy
    return max(1, num_warps * 32 * 32 // row_bytes), num_warps


@triton.jit(
    do_not_specialize=[
        "num_parts", "num_rows", "heads", "queries", "s_outs_n", "s_outs_b", "s_outs_h", "s_outs_s",
        "s_lses_n", "s_lses_b", "s_lses_h", "s_lses_s", "s_out_b", "s_out_h", "s_out_s",
    ]  # one compiled kernel for all lengths, and few for all numbers of partial results
)  # fmt: skip
def _merge_kernel(
    outs, lses, out, lse, num_parts, num_rows, heads, queries, s_outs_n, s_outs_b, s_outs_h, s_outs_s, s_lses_n,
    s_lses_b, s_lses_h, s_lses_s, s_out_b, s_out_h, s_out_s,
    BN: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # One program merges BR rows, a row being one query of one head: first it finds their highest lse, then it
    # reads every partial row once, except those that saw nothing, which may hold anything. The loads of BN partial
    # results are in flight together.
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_d, o_tile = tl.arange(0, BD), tl.arange(0, BN)
    i_s = (o_row % queries).to(tl.int64)
    i_h = (o_row // queries % heads).to(tl.int64)
    i_b = (o_row // queries // heads).to(tl.int64)
    o_outs = i_b * s_outs_b + i_h * s_outs_h + i_s * s_outs_s
    p_lses = lses + (i_b * s_lses_b + i_h * s_lses_h + i_s * s_lses_s)[:, None]
    s_outs_n = tl.cast(s_outs_n, tl.int64)
    s_lses_n = tl.cast(s_lses_n, tl.int64)
    nothing = float("-inf")

    b_highest = tl.full([BR], nothing, tl.float32)
    for i_n in range(0, num_parts, BN):
        o_n = i_n + o_tile
        # [BR, BN]
        b_lse = tl.load(p_lses + o_n * s_lses_n, mask=m_row[:, None] & (o_n < num_parts)[None, :], other=nothing)
        b_highest = tl.maximum(b_highest, tl.max(tl.where(b_lse == float("inf"), nothing, b_lse), axis=1))
    b_highest = tl.where(b_highest == nothing, 0.0, b_highest)

    b_total = tl.zeros([BR], tl.float32)
    b_out = tl.zeros([BR, BD], tl.float32)
    for i_n in range(0, num_parts, BN):
        o_n = i_n + o_tile
        # [BR, BN], from the cache
        b_lse = tl.load(p_lses + o_n * s_lses_n, mask=m_row[:, None] & (o_n < num_parts)[None, :], other=nothing)
        m_seen = (b_lse != nothing) & (b_lse != float("inf"))
        b_weight = tl.where(m_seen, tl.exp(b_lse - b_highest[:, None]), 0.0)
        # [BR, BN, BD]
        p_outs = outs + tl.multiple_of(o_outs[:, None] + o_n * s_outs_n, (ALIGNED, ALIGNED))[:, :, None] + o_d
        b_part = tl.load(p_outs, mask=m_seen[:, :, None] & (o_d < D), other=0.0)
        b_total += tl.sum(b_weight, axis=1)
        b_out += tl.sum(b_weight[:, :, None] * b_part.to(tl.float32), axis=1)

    o_out = tl.multiple_of(i_b * s_out_b + i_h * s_out_h + i_s * s_out_s, ALIGNED)
    _store_merged(out + o_out, lse + o_row, b_out, b_total, b_highest, m_row, D, BD)


@triton.jit
def _store_merged(p_out, p_lse, b_out, b_total, b_highest, m_row, D: tl.constexpr, BD: tl.constexpr):
    """Divide BR rows' sums by their weights, and store them; zeros and -inf where nothing was seen."""
    o_d = tl.arange(0, BD)
    m_empty = b_total == 0.0
    b_total = tl.where(m_empty, 1.0, b_total)
    b_out = b_out / b_total[:, None]
    tl.store(p_out[:, None] + o_d, b_out.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_d < D))
    tl.store(p_lse, tl.where(m_empty, float("-inf"), b_highest + tl.log(b_total)), mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "heads", "queries"])
def _merge_separate_kernel(
    outs, lses, out, lse, outs_strides, lses_strides, firsts, out_strides, num_rows, heads, queries,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """One program merges BR rows, in the order in which they are stored; all its loads are in flight together.

    Strides of outs are in units of ALIGN elements, in the order (batch, head, row). Integers in tuples are hidden
    by :func:`veiled`.
    """
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_d = tl.arange(0, BD)
    if HEADS_FIRST:
        i_h = o_row % heads
        i_s = o_row // heads % queries
    else:
        i_s = o_row % queries
        i_h = o_row // queries % heads
    i_b = (o_row // heads // queries).to(tl.int64)
    nothing = float("-inf")

    b_highest = tl.full([BR], nothing, tl.float32)
    for i in tl.static_range(len(outs)):
        first = plain(firsts[i])
        o_lse = i_b * plain(lses_strides[i][0]) + i_h.to(tl.int64) * plain(lses_strides[i][1])
        o_lse += (i_s - first).to(tl.int64) * plain(lses_strides[i][2])
        # [BR]
        b_lse = tl.load(lses[i] + o_lse, mask=m_row & (i_s >= first), other=nothing)
        b_highest = tl.maximum(b_highest, tl.where(b_lse == float("inf"), nothing, b_lse))
    b_highest = tl.where(b_highest == nothing, 0.0, b_highest)

    b_total = tl.zeros([BR], tl.float32)
    b_out = tl.zeros([BR, BD], tl.float32)
    for i in tl.static_range(len(outs)):
        first = plain(firsts[i])
        o_lse = i_b * plain(lses_strides[i][0]) + i_h.to(tl.int64) * plain(lses_strides[i][1])
        o_lse += (i_s - first).to(tl.int64) * plain(lses_strides[i][2])
        # [BR], from the cache
        b_lse = tl.load(lses[i] + o_lse, mask=m_row & (i_s >= first), other=nothing)
        m_seen = (b_lse != nothing) & (b_lse != float("inf"))
        b_weight = tl.where(m_seen, tl.exp(b_lse - b_highest), 0.0)
        o_part = i_b * plain(outs_strides[i][0]) + i_h.to(tl.int64) * plain(outs_strides[i][1])
        o_part += (i_s - first).to(tl.int64) * plain(outs_strides[i][2])
        # [BR, BD]
        p_part = outs[i] + (o_part * ALIGN)[:, None] + o_d
        b_part = tl.load(p_part, mask=m_seen[:, None] & (o_d < D), other=0.0)
        b_total += b_weight
        b_out += b_weight[:, None] * b_part.to(tl.float32)

    o_out = i_b * plain(out_strides[0]) + i_h.to(tl.int64) * plain(out_strides[1])
    o_out += i_s.to(tl.int64) * plain(out_strides[2])
    o_lse = (i_b * heads + i_h) * queries + i_s
    _store_merged(out + o_out * ALIGN, lse + o_lse, b_out, b_total, b_highest, m_row, D, BD)
