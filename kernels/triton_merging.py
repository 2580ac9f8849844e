"""Merging in Triton, bound by reading the partial results."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .strides import (
    cdiv,
    common_alignment,
    in_units,
    next_power_of_2,
    row_strides,
    with_contiguous_rows,
)
from .triton_specialization import hide, reveal

_MOST_PARTS = 128  # partial results of a row that one program loads together
_TILE = 4096  # elements of a program's tile; a longer row has a program of its own
# Of all rows of a partial result, or of the result if its elements are larger: from here on one
# warp per program is too few.
_LARGE_BYTES = 2**20
_LOADS_OF_THREAD = 2  # of each partial result, where each is a tensor of its own
_LOAD_BYTES = 16
_WARP_THREADS = 32


def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge as :func:`apbv.kernels.merge_states` does, in one launch.

    Nothing is copied where D's stride is 1. Partial results in one tensor are a single stack,
    ``[N, B, H, S, D]``; of separate tensors each is a stack of one.
    """
    if isinstance(outs, Tensor) and isinstance(lses, Tensor):
        out_stacks = [with_contiguous_rows(outs)]
        lse_stacks = [lses]
    else:
        out_stacks = [with_contiguous_rows(partial[None]) for partial in outs]
        lse_stacks = [partial[None] for partial in lses]
    num_parts, batch, heads, _, dim = out_stacks[0].shape

    # Results: all queries, of which a stack may have only the last ones.
    if out is None:
        longest = max(stack.shape[3] for stack in out_stacks)
        out = out_stacks[0].new_empty(batch, longest, heads, dim, dtype=torch.float32)
        out = out.transpose(1, 2)
    queries = out.shape[2]
    lse = lse_stacks[0].new_empty(batch, heads, queries, dtype=torch.float32)
    num_rows = lse.numel()
    if num_rows == 0:
        return out, lse
    first_queries = [queries - stack.shape[3] for stack in lse_stacks]

    # Strides, in units of elements to which all rows are aligned.
    stack_strides = []
    for stack in out_stacks:
        # The stride of a single part may be anything, and must not lower the alignment.
        part_stride = stack.stride(0) if num_parts > 1 else 0
        stack_strides.append((part_stride, *row_strides(stack[0])))
    out_strides = row_strides(out)
    all_strides = list(out_strides)
    for strides in stack_strides:
        all_strides += strides
    # A load of 16 bytes has most elements of the smallest size. Lses are loaded one by one.
    element_sizes = [tensor.element_size() for tensor in (*out_stacks, out)]
    align = common_alignment(min(element_sizes), all_strides)

    # Tiles.
    parts_at_once = min(next_power_of_2(num_parts), _MOST_PARTS)
    padded_dim = next_power_of_2(dim)
    rows_at_once, num_warps = _rows_and_warps(
        num_rows,
        parts_at_once,
        padded_dim,
        max(element_sizes),
    )
    # Arguments in the order of the signature: by keyword, each launch takes microseconds longer.
    _merge_kernel[(cdiv(num_rows, rows_at_once),)](
        tuple(out_stacks),
        tuple(lse_stacks),
        out,
        lse,
        tuple([hide(*in_units(strides, align)) for strides in stack_strides]),
        tuple([hide(*stack.stride()) for stack in lse_stacks]),
        hide(*first_queries),
        hide(*in_units(out_strides, align)),
        num_parts,
        num_rows,
        heads,
        queries,
        BN=parts_at_once,
        D=dim,
        BR=rows_at_once,
        BD=padded_dim,
        ALIGN=align,
        HEADS_INNERMOST=out_strides[1] < out_strides[2],
        num_warps=num_warps,
    )
    return out, lse


def _rows_and_warps(
    num_rows: int,
    parts_at_once: int,
    padded_dim: int,
    element_size: int,
) -> tuple[int, int]:
    """Choose the rows and warps of a program.

    Args:
        parts_at_once: the parts of a stack that are loaded together; 1 for separate tensors.
    """
    # A stack: the parts of some rows fill a tile.
    if parts_at_once > 1:
        numbers_of_row = parts_at_once * padded_dim
        num_warps = 4 if numbers_of_row <= _TILE else 8
        return max(1, _TILE // numbers_of_row), num_warps
    # Separate tensors: of each a thread loads twice 16 bytes. With few rows programs are small, so
    # that all SMs have some.
    row_bytes = padded_dim * element_size
    num_warps = 4 if num_rows * row_bytes >= _LARGE_BYTES else 1
    program_bytes = num_warps * _WARP_THREADS * _LOADS_OF_THREAD * _LOAD_BYTES
    return max(1, program_bytes // row_bytes), num_warps


@triton.jit(do_not_specialize=["num_rows", "heads", "queries"])
def _merge_kernel(
    p_outs,
    p_lses,
    p_out,
    p_lse,
    outs_strides,
    lses_strides,
    first_queries,
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
    HEADS_INNERMOST: tl.constexpr,
):
    """One program merges BR rows, in the order in which they are stored.

    A row is one query of one head. First the program finds the highest lse of each row, then it
    reads every partial row once, except those that saw nothing, which may hold anything; the loads
    of BN partial results are in flight together.

    Strides are in the order (part, batch, head, row), those of outs and out in units of ALIGN
    elements. Integers in tuples are hidden by ``hide``. ``num_parts`` is specialized, so that no
    loop is left for stacks of one.
    """
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_d = tl.arange(0, BD)
    o_tile = tl.arange(0, BN)
    if HEADS_INNERMOST:
        i_h = o_row % heads
        i_s = o_row // heads % queries
    else:
        i_s = o_row % queries
        i_h = o_row // queries % heads
    i_b = (o_row // heads // queries).to(tl.int64)
    i_h = i_h.to(tl.int64)
    i_s = i_s.to(tl.int64)
    nothing = float("-inf")

    # The highest lse of each row.
    # [BR]
    b_highest = tl.full([BR], nothing, tl.float32)
    for i in tl.static_range(len(p_outs)):
        for i_n in range(0, num_parts, BN):
            o_n = i_n + o_tile
            # [BR, BN]
            m_query = m_row & (i_s >= reveal(first_queries[i]))
            m_part = m_query[:, None] & (o_n < num_parts)[None, :]
            o_lse = _part_offsets(lses_strides[i], first_queries[i], o_n, i_b, i_h, i_s)
            b_lse = tl.load(p_lses[i] + o_lse, mask=m_part, other=nothing)
            b_lse = tl.where(b_lse == float("inf"), nothing, b_lse)
            b_highest = tl.maximum(b_highest, tl.max(b_lse, axis=1))
    b_highest = tl.where(b_highest == nothing, 0.0, b_highest)

    # The sums of weights, and of weighted results.
    # [BR]
    b_total = tl.zeros([BR], tl.float32)
    # [BR, BD]
    b_out = tl.zeros([BR, BD], tl.float32)
    for i in tl.static_range(len(p_outs)):
        for i_n in range(0, num_parts, BN):
            o_n = i_n + o_tile
            # [BR, BN], from the cache
            m_query = m_row & (i_s >= reveal(first_queries[i]))
            m_part = m_query[:, None] & (o_n < num_parts)[None, :]
            o_lse = _part_offsets(lses_strides[i], first_queries[i], o_n, i_b, i_h, i_s)
            b_lse = tl.load(p_lses[i] + o_lse, mask=m_part, other=nothing)
            m_seen = (b_lse != nothing) & (b_lse != float("inf"))
            b_weight = tl.where(m_seen, tl.exp(b_lse - b_highest[:, None]), 0.0)
            # [BR, BN, BD]
            o_part = _part_offsets(outs_strides[i], first_queries[i], o_n, i_b, i_h, i_s) * ALIGN
            p_part = p_outs[i] + o_part[:, :, None] + o_d
            b_part = tl.load(p_part, mask=m_seen[:, :, None] & (o_d < D), other=0.0)
            b_total += tl.sum(b_weight, axis=1)
            b_out += tl.sum(b_weight[:, :, None] * b_part.to(tl.float32), axis=1)

    # Zeros and -inf where nothing was seen.
    m_empty = b_total == 0.0
    b_total = tl.where(m_empty, 1.0, b_total)
    o_batch = i_b * reveal(out_strides[0])
    o_head = i_h * reveal(out_strides[1])
    o_query = i_s * reveal(out_strides[2])
    o_out = o_batch + o_head + o_query
    # [BR, BD]
    b_out = (b_out / b_total[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + (o_out * ALIGN)[:, None] + o_d, b_out, mask=m_row[:, None] & (o_d < D))
    # [BR]
    b_lse = tl.where(m_empty, nothing, b_highest + tl.log(b_total))
    tl.store(p_lse + (i_b * heads + i_h) * queries + i_s, b_lse, mask=m_row)


@triton.jit
def _part_offsets(strides, first_query, o_n, i_b, i_h, i_s):
    """Return the offsets ``[BR, BN]`` of rows of the partial results ``o_n`` of a stack.

    The stack's first row is that of query ``first_query``.
    """
    o_batch = i_b * reveal(strides[1])
    o_head = i_h * reveal(strides[2])
    o_query = (i_s - reveal(first_query)) * reveal(strides[3])
    o_row = o_batch + o_head + o_query
    o_part = o_n.to(tl.int64) * reveal(strides[0])
    return o_row[:, None] + o_part[None, :]
