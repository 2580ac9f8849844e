"""This module implements :mod:`apbv.kernels.merging` in Triton; reading the partial results bounds its speed."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import in_rows

MAX_UNROLLED = 8  # partial results whose loads are in flight together


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge as :func:`apbv.kernels.merge_states` does, with any strides, and without a copy where D's is 1."""
    outs = in_rows(outs)
    parts, batch, heads, queries, dim = outs.shape
    out = outs.new_empty(batch, heads, queries, dim, dtype=torch.float32)
    lse = lses.new_empty(batch, heads, queries, dtype=torch.float32)
    if not out.numel():
        return out, lse
    rows, width = lse.numel(), triton.next_power_of_2(dim)
    rows_per_block, num_warps = _block_rows(rows, width * outs.element_size())
    # Triton itself distinguishes only strides that 16 divides from all others.
    strides = [stride for stride, size in zip(outs.stride()[:4], outs.shape, strict=False) if size > 1]
    _merge_kernel[(triton.cdiv(rows, rows_per_block),)](
        outs,
        lses,
        out,
        lse,
        parts,
        rows,
        heads,
        queries,
        *outs.stride()[:4],
        *lses.stride(),
        BN=triton.next_power_of_2(parts),
        D=dim,
        BR=rows_per_block,
        BD=width,
        ALIGNED=math.gcd(16, *strides),
        UNROLL=min(triton.next_power_of_2(parts), MAX_UNROLLED),
        num_warps=num_warps,
    )
    return out, lse


def _block_rows(rows: int, row_bytes: int) -> tuple[int, int]:
    """Choose rows per program and its warps: two loads of 16 bytes per thread and partial result."""
    num_warps = 4 if rows * row_bytes >= 2**20 else 1  # few rows: many small programs keep all processors busy
    return max(1, num_warps * 32 * 32 // row_bytes), num_warps


@triton.jit(
    do_not_specialize=[
        "num_parts", "num_rows", "heads", "queries", "s_outs_n", "s_outs_b", "s_outs_h", "s_outs_s",
        "s_lses_n", "s_lses_b", "s_lses_h", "s_lses_s",
    ]  # one compiled kernel for all lengths, and few for all numbers of partial results
)  # fmt: skip
def _merge_kernel(
    outs,
    lses,
    out,
    lse,
    num_parts,
    num_rows,
    heads,
    queries,
    s_outs_n,
    s_outs_b,
    s_outs_h,
    s_outs_s,
    s_lses_n,
    s_lses_b,
    s_lses_h,
    s_lses_s,
    BN: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLL: tl.constexpr,
):
    # One program merges BR rows, a row being one query of one head: first it finds their highest lse, then it
    # reads every partial row once, except those that saw nothing, which may hold anything.
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_d = tl.arange(0, BD)
    i_s = (o_row % queries).to(tl.int64)
    i_h = (o_row // queries % heads).to(tl.int64)
    i_b = (o_row // queries // heads).to(tl.int64)
    o_outs = i_b * s_outs_b + i_h * s_outs_h + i_s * s_outs_s
    p_lses = lses + i_b * s_lses_b + i_h * s_lses_h + i_s * s_lses_s
    s_outs_n = tl.cast(s_outs_n, tl.int64)
    s_lses_n = tl.cast(s_lses_n, tl.int64)
    nothing = float("-inf")

    b_highest = tl.full([BR], nothing, tl.float32)
    for i_n in tl.range(0, BN, loop_unroll_factor=UNROLL):
        m_part = o_row < num_rows * (i_n < num_parts)
        # [BR]
        b_lse = tl.load(p_lses + i_n * s_lses_n, mask=m_part, other=nothing)
        b_highest = tl.maximum(b_highest, tl.where(b_lse == float("inf"), nothing, b_lse))
    b_highest = tl.where(b_highest == nothing, 0.0, b_highest)

    b_total = tl.zeros([BR], tl.float32)
    b_out = tl.zeros([BR, BD], tl.float32)
    for i_n in tl.range(0, BN, loop_unroll_factor=UNROLL):
        m_part = o_row < num_rows * (i_n < num_parts)
        # [BR], from the cache
        b_lse = tl.load(p_lses + i_n * s_lses_n, mask=m_part, other=nothing)
        m_seen = (b_lse != nothing) & (b_lse != float("inf"))
        b_weight = tl.where(m_seen, tl.exp(b_lse - b_highest), 0.0)
        # [BR, BD]
        p_outs = outs + tl.multiple_of(o_outs + i_n * s_outs_n, ALIGNED)[:, None] + o_d
        b_part = tl.load(p_outs, mask=m_seen[:, None] & (o_d < D), other=0.0)
        b_total += b_weight
        b_out += b_weight[:, None] * b_part.to(tl.float32)

    m_empty = b_total == 0.0
    b_total = tl.where(m_empty, 1.0, b_total)
    b_out = b_out / b_total[:, None]
    o_out = o_row.to(tl.int64) * D
    tl.store(out + o_out[:, None] + o_d, b_out, mask=m_row[:, None] & (o_d < D))
    tl.store(lse + o_row, tl.where(m_empty, nothing, b_highest + tl.log(b_total)), mask=m_row)
