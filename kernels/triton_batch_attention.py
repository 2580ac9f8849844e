"""Batch decode attention in Triton, in one launch plus one for merging.

The kernel reads the addresses and lengths of the sequences' buffers from GPU memory, so that one
CUDA graph serves any sequences.
"""

from dataclasses import replace
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import num_processors
from .runs import BufferTable, SequenceBuffers, alignment, cdiv, in_rows, next_power_of_2
from .tiles import tile_of
from .torch_attention import empty_output
from .triton_attention_kernels import (
    _attend_tile,
    _factors,
    _load_queries,
    _load_tile,
    _nothing_seen,
    _store_rows,
)
from .triton_merging import merge_states

_FEWEST_KEYS = 256  # fewer are not worth a program of their own
_MOST_SPLITS = 128


def batch_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers | BufferTable, scale: float
) -> Tensor:
    """Attend as :func:`apbv.kernels.batch_decode_attention` does."""
    q = in_rows(q)
    k = in_rows(k)
    v = in_rows(v)
    heads, rows, dim = q.shape[1:]
    group = heads // k.shape[1]
    table = _table_of(buffers, q.device) if isinstance(buffers, SequenceBuffers) else buffers
    block = tile_of("few", group * table.most_new, dim, q.element_size(), q.device)
    tiles = cdiv(group * table.most_new, block.rows)
    # The CPU does not know which sequences are long: each could occupy all SMs. The extra programs
    # of short ones exit at once.
    splits = min(num_processors(q.device) * 2 // k.shape[1], cdiv(table.most_rows, _FEWEST_KEYS))
    splits = min(max(1, splits), _MOST_SPLITS)
    out = empty_output(q)
    parts = out[None] if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    # A length of 1 may have any stride.
    strides = [0 if x.shape[i] == 1 else x.stride(i) for x in (q, k, v) for i in (1, 2)]
    strides += [parts.stride(0), *parts.stride()[2:4]]
    align = alignment(q.element_size(), [*strides, dim])
    batch_decode_kernel[(len(table.lengths) * tiles, k.shape[1], splits)](
        q,
        k,
        v,
        parts,
        lse,
        table.places,
        table.lengths,
        table.starts,
        scale,
        *(stride // align for stride in strides),
        table.places.stride(0),
        rows,
        GROUP=group,
        NEW=table.most_new,
        TILES=tiles,
        D=dim,
        BR=block.rows,
        BT=block.keys,
        BD=block.dim,
        ALIGN=align,
        FEWEST=_FEWEST_KEYS,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
    )
    return out if splits == 1 else merge_states(parts, lse, out=out)[0]


def _table_of(buffers: SequenceBuffers, device: torch.device) -> BufferTable:
    """Copy the addresses of buffers to a device."""
    numbers = torch.tensor(
        [*buffers.places, list(buffers.lengths)], dtype=torch.int64, device=device
    )
    table = BufferTable(numbers[:3], numbers[3], max(keys.shape[2] for keys in buffers.keys))
    if buffers.counts is None:
        return table
    starts = torch.tensor([0, *accumulate(buffers.counts)], device=device)
    return replace(table, starts=starts, most_new=next_power_of_2(max(buffers.counts)))


@triton.jit(
    do_not_specialize=[
        "q_h",
        "q_r",
        "k_h",
        "k_r",
        "v_h",
        "v_r",
        "out_n",
        "out_h",
        "out_r",
        "places_n",
        "num_rows",
    ]
)
def batch_decode_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_places,
    p_lengths,
    p_starts,
    scale,
    q_h,
    q_r,
    k_h,
    k_r,
    v_h,
    v_r,
    out_n,
    out_h,
    out_r,
    places_n,
    num_rows,
    GROUP: tl.constexpr,
    NEW: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    FEWEST: tl.constexpr,
):
    """One program attends from a tile of a sequence's newest tokens to a range of one head's keys.

    The newest keys and values come from the layer's input; the programs that have the first of them
    in their range attend to all, and that of the first tile appends them to the buffers, where no
    program reads those rows. A program whose range is empty writes an lse of -inf.
    """
    i_r = tl.program_id(0).to(tl.int64) // TILES
    i_tile = tl.program_id(0) % TILES
    i_h = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    o_r = i_tile * BR + tl.arange(0, BR)
    i_first = i_r
    count = 1
    if NEW > 1:
        i_first = tl.load(p_starts + i_r)
        count = (tl.load(p_starts + i_r + 1) - i_first).to(tl.int32)
    o_s = o_r // GROUP
    m_r = o_s < count
    o_row = i_first + o_s
    o_head = i_h * GROUP + o_r % GROUP
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    sign, scale = _factors(scale)
    b_q = _load_queries(p_q, (o_head * q_h + o_row * q_r) * ALIGN, sign, m_r, D, BD)

    length = tl.load(p_lengths + i_r).to(tl.int32)
    head = i_h * tl.load(p_places + 2 * places_n + i_r) * D
    p_keys = tl.load(p_places + i_r).to(tl.pointer_type(p_k.dtype.element_ty))
    p_values = tl.load(p_places + places_n + i_r).to(tl.pointer_type(p_v.dtype.element_ty))
    p_keys = tl.multiple_of(p_keys, 16) + head
    p_values = tl.multiple_of(p_values, 16) + head
    keys_per_split = tl.maximum(
        tl.cdiv(tl.cdiv(length + count, tl.num_programs(2)), BT) * BT, FEWEST
    )
    first_key = (i_split * keys_per_split).to(tl.int32)
    stop_key = first_key + keys_per_split
    b_acc, b_max, b_sum = _nothing_seen(BR, BD)
    o_tile = tl.arange(0, BT)

    stop = tl.minimum(stop_key, length)
    whole = first_key + tl.maximum(stop - first_key, 0) // BT * BT
    for i_t in range(first_key, whole, BT):
        o_t = (i_t + o_tile).to(tl.int64) * D
        b_acc, b_max, b_sum = _attend_tile(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_keys,
            p_values,
            o_t,
            o_t,
            o_t,
            o_t,
            scale,
            False,
            False,
            D,
            BD,
        )
    if whole < stop:
        o_t = (whole + o_tile).to(tl.int64) * D
        m_t = whole + o_tile < stop
        b_acc, b_max, b_sum = _attend_tile(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_keys,
            p_values,
            o_t,
            o_t,
            m_t,
            m_t[None, :],
            scale,
            True,
            True,
            D,
            BD,
        )
    has_new = (first_key <= length) & (length < stop_key)
    if NEW > 1:
        p_k = p_k + (i_h * k_h + i_first * k_r) * ALIGN
        p_v = p_v + (i_h * v_h + i_first * v_r) * ALIGN
        for i_t in range(0, tl.where(has_new, count, 0), BT):
            o_t = i_t + o_tile
            m_t = o_t < count
            m_seen = (o_t[None, :] <= o_s[:, None]) & (o_t < count)[None, :]
            o_k = o_t.to(tl.int64) * k_r * ALIGN
            o_v = o_t.to(tl.int64) * v_r * ALIGN
            o_new = (length + o_t).to(tl.int64)[:, None] * D + o_d[None, :]
            m_new = (o_t < tl.where(i_tile == 0, count, 0))[:, None] & m_d[None, :]
            tl.store(p_keys + o_new, _load_tile(p_k, o_k, m_t, True, D, BD), mask=m_new)
            tl.store(p_values + o_new, _load_tile(p_v, o_v, m_t, True, D, BD), mask=m_new)
            b_acc, b_max, b_sum = _attend_tile(
                b_acc, b_max, b_sum, b_q, p_k, p_v, o_k, o_v, m_t, m_seen, scale, True, True, D, BD
            )
    elif has_new:
        # [BD]
        b_k = tl.load(p_k + (i_h * k_h + i_r * k_r) * ALIGN + o_d, mask=m_d, other=0.0)
        b_v = tl.load(p_v + (i_h * v_h + i_r * v_r) * ALIGN + o_d, mask=m_d, other=0.0)
        o_new = length.to(tl.int64) * D + o_d
        tl.store(p_keys + o_new, b_k, mask=m_d)
        tl.store(p_values + o_new, b_v, mask=m_d)
        b_s = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32)[None, :], axis=1)
        b_new_max = tl.maximum(b_max, b_s)
        b_p = tl.exp2((b_s - b_new_max) * scale)
        b_decay = tl.exp2((b_max - b_new_max) * scale)
        b_acc = b_acc * b_decay[:, None] + b_p[:, None] * b_v.to(tl.float32)[None, :]
        b_sum = b_sum * b_decay + b_p
        b_max = b_new_max

    o_out = (i_split * out_n + o_head * out_h + o_row * out_r) * ALIGN
    o_lse = (i_split * tl.num_programs(1) * GROUP + o_head) * num_rows + o_row
    _store_rows(p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)
