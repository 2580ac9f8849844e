"""Merging in Triton, bound by reading the partial results."""

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
    """Merge as :func:`apbv.kernels.merge_states` does, in one launch, and without a copy where D's
    stride is 1.

    Partial results in one tensor are a single stack, ``[N, B, H, S, D]``; of others each is a stack
    of its own.
    """
    is_stack = isinstance(outs, Tensor)
    stacks = [
        in_rows(each) for each in ([outs] if is_stack else [partial[None] for partial in outs])
    ]
    lses = (lses,) if is_stack else tuple([partial[None] for partial in lses])
    parts, batch, heads, _, dim = stacks[0].shape
    if out is None:
        longest = max(stack.shape[3] for stack in stacks)
        out = stacks[0].new_empty(batch, longest, heads, dim, dtype=torch.float32).transpose(1, 2)
    queries = out.shape[2]
    lse = lses[0].new_empty(batch, heads, queries, dtype=torch.float32)
    if not lse.numel():
        return out, lse
    rows = lse.numel()
    width = next_power_of_2(dim)
    together = min(next_power_of_2(parts), _MOST_PARTS)
    sizes = [each.element_size() for each in (*stacks, out)]
    rows_per_block, num_warps = _block_rows(rows, together, width, max(sizes))
    strides = [(stack.stride(0) if parts > 1 else 0, *row_strides(stack[0])) for stack in stacks]
    out_strides = row_strides(out)
    align = alignment(min(sizes), [stride for own in (*strides, out_strides) for stride in own])
    _merge_kernel[(cdiv(rows, rows_per_block),)](
        tuple(stacks),
        lses,
        out,
        lse,
        tuple([veiled(*(stride // align for stride in own)) for own in strides]),
        tuple([veiled(*partial.stride()) for partial in lses]),
        veiled(*(queries - partial.shape[3] for partial in lses)),
        veiled(*(stride // align for stride in out_strides)),
        parts,
        rows,
        heads,
        queries,
        BN=together,
        D=dim,
        BR=rows_per_block,
        BD=width,
        ALIGN=align,
        HEADS_FIRST=out_strides[1] < out_strides[2],
        num_warps=num_warps,
    )
    return out, lse


def veiled(*numbers: int) -> tuple[int, ...]:
    """Encode integers so that Triton sees neither that one is 1 nor that 16 divides it.

    Triton would compile anew for each such combination, as ``do_not_specialize`` has no effect
    inside tuples.
    """
    return tuple([4 * number + 3 for number in numbers])


@triton.jit
def plain(number):
    """Return the integer that :func:`veiled` hid."""
    return number >> 2


def _block_rows(rows: int, parts: int, width: int, element_size: int) -> tuple[int, int]:
    """Choose rows per program, and its warps.

    Of a stack a program's loads fill a tile; of other partial results a thread has two loads of 16
    bytes of each.
    """
    if parts > 1:
        return max(1, _TILE // (parts * width)), 4 if parts * width <= _TILE else 8
    # Few rows: small programs keep all SMs busy.
    num_warps = 4 if rows * width * element_size >= 2**20 else 1
    return max(1, num_warps * 32 * 32 // (width * element_size)), num_warps


@triton.jit(do_not_specialize=["num_rows", "heads", "queries"])
def _merge_kernel(
    outs,
    lses,
    out,
    lse,
    outs_strides,
    lses_strides,
    firsts,
    out_strides,
    num_parts,
    num_rows,
    heads,
    queries,
    BN: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """One program merges BR rows, in the order in which they are stored; a row is one query of one
    head.

    First it finds their highest lse, then it reads every partial row once, except those that saw
    nothing, which may hold anything; the loads of BN partial results are in flight together.
    Strides are in the order (part, batch, head, row), those of outs and out in units of ALIGN
    elements. Integers in tuples are hidden by :func:`veiled`; that there is one partial result in a
    stack is not, so that no loop is left.
    """
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_d = tl.arange(0, BD)
    o_tile = tl.arange(0, BN)
    if HEADS_FIRST:
        i_h = o_row % heads
        i_s = o_row // heads % queries
    else:
        i_s = o_row % queries
        i_h = o_row // queries % heads
    i_b = (o_row // heads // queries).to(tl.int64)
    i_h = i_h.to(tl.int64)
    i_s = i_s.to(tl.int64)
    nothing = float("-inf")

    b_highest = tl.full([BR], nothing, tl.float32)
    for i in tl.static_range(len(outs)):
        for i_n in range(0, num_parts, BN):
            m_part = (m_row & (i_s >= plain(firsts[i])))[:, None] & (i_n + o_tile < num_parts)[
                None, :
            ]
            o_lse = _places(lses_strides[i], firsts[i], i_n + o_tile, i_b, i_h, i_s)
            # [BR, BN]
            b_lse = tl.load(lses[i] + o_lse, mask=m_part, other=nothing)
            b_highest = tl.maximum(
                b_highest, tl.max(tl.where(b_lse == float("inf"), nothing, b_lse), axis=1)
            )
    b_highest = tl.where(b_highest == nothing, 0.0, b_highest)

    b_total = tl.zeros([BR], tl.float32)
    b_out = tl.zeros([BR, BD], tl.float32)
    for i in tl.static_range(len(outs)):
        for i_n in range(0, num_parts, BN):
            m_part = (m_row & (i_s >= plain(firsts[i])))[:, None] & (i_n + o_tile < num_parts)[
                None, :
            ]
            o_lse = _places(lses_strides[i], firsts[i], i_n + o_tile, i_b, i_h, i_s)
            # [BR, BN], from the cache
            b_lse = tl.load(lses[i] + o_lse, mask=m_part, other=nothing)
            m_seen = (b_lse != nothing) & (b_lse != float("inf"))
            b_weight = tl.where(m_seen, tl.exp(b_lse - b_highest[:, None]), 0.0)
            # [BR, BN, BD]
            o_part = _places(outs_strides[i], firsts[i], i_n + o_tile, i_b, i_h, i_s) * ALIGN
            b_part = tl.load(
                outs[i] + o_part[:, :, None] + o_d, mask=m_seen[:, :, None] & (o_d < D), other=0.0
            )
            b_total += tl.sum(b_weight, axis=1)
            b_out += tl.sum(b_weight[:, :, None] * b_part.to(tl.float32), axis=1)

    # Zeros and -inf where nothing was seen.
    m_empty = b_total == 0.0
    b_total = tl.where(m_empty, 1.0, b_total)
    o_out = i_b * plain(out_strides[0]) + i_h * plain(out_strides[1]) + i_s * plain(out_strides[2])
    b_out = (b_out / b_total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (o_out * ALIGN)[:, None] + o_d, b_out, mask=m_row[:, None] & (o_d < D))
    b_lse = tl.where(m_empty, nothing, b_highest + tl.log(b_total))
    tl.store(lse + (i_b * heads + i_h) * queries + i_s, b_lse, mask=m_row)


@triton.jit
def _places(strides, first, o_n, i_b, i_h, i_s):
    """Return where rows of some of a stack's partial results lie, which are of the queries from
    ``first`` on."""
    o_row = (
        i_b * plain(strides[1]) + i_h * plain(strides[2]) + (i_s - plain(first)) * plain(strides[3])
    )
    return o_row[:, None] + (o_n.to(tl.int64) * plain(strides[0]))[None, :]
