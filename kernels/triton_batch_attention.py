"""Batch decode attention in Triton, in one launch plus one for merging.

The kernel reads the addresses and lengths of the sequences' buffers from GPU memory, so that one
CUDA graph serves any sequences.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import num_processors
from .sequences import BufferTable, SequenceBuffers
from .strides import cdiv, common_alignment, next_power_of_2, with_contiguous_rows
from .tiles import tile_of
from .torch_attention import empty_output
from .triton_attention_tiles import (
    attend_tile,
    begin_softmax,
    load_queries,
    load_tile,
    split_scale,
    store_rows,
)
from .triton_merging import merge_states

_FEWEST_KEYS = 256  # fewer are not worth a program of their own
_MOST_SPLITS = 128
_PROGRAMS_PER_PROCESSOR = 2


def batch_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: SequenceBuffers | BufferTable,
    scale: float,
) -> Tensor:
    """Attend as :func:`apbv.kernels.batch_decode_attention` does."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    heads, rows, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if isinstance(buffers, SequenceBuffers):
        table = _table_of(buffers, q.device)
    else:
        table = buffers
    num_sequences = len(table.lengths)

    # The grid. The CPU does not know which sequences are long: each could occupy all SMs. The extra
    # programs of short ones exit at once.
    tile = tile_of("few", group * table.most_new, dim, q.element_size(), q.device)
    num_tiles = cdiv(group * table.most_new, tile.rows)
    programs_at_once = num_processors(q.device) * _PROGRAMS_PER_PROCESSOR
    splits = min(programs_at_once // kv_heads, cdiv(table.most_rows, _FEWEST_KEYS))
    splits = min(max(1, splits), _MOST_SPLITS)

    # Where keys are split, partial results are merged into out.
    out = empty_output(q)
    parts = out[None]
    if splits > 1:
        parts = q.new_empty(splits, *q.shape, dtype=torch.float32)
    lse = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)

    # Strides, in units of elements to which all rows are aligned.
    q_h, q_r = _head_and_row_strides(q)
    k_h, k_r = _head_and_row_strides(k)
    v_h, v_r = _head_and_row_strides(v)
    out_n, _, out_h, out_r, _ = parts.stride()
    align = common_alignment(
        q.element_size(),
        [q_h, q_r, k_h, k_r, v_h, v_r, out_n, out_h, out_r, dim],
    )
    # Arguments in the order of the signature: by keyword, each launch takes microseconds longer.
    batch_decode_kernel[(num_sequences * num_tiles, kv_heads, splits)](
        q,
        k,
        v,
        parts,
        lse,
        table.places,
        table.lengths,
        table.starts,
        scale,
        q_h // align,
        q_r // align,
        k_h // align,
        k_r // align,
        v_h // align,
        v_r // align,
        out_n // align,
        out_h // align,
        out_r // align,
        table.places.stride(0),
        rows,
        GROUP=group,
        NEW=table.most_new,
        TILES=num_tiles,
        D=dim,
        BR=tile.rows,
        BT=tile.keys,
        BD=tile.dim,
        ALIGN=align,
        FEWEST=_FEWEST_KEYS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits == 1:
        return out
    return merge_states(parts, lse, out=out)[0]


def _head_and_row_strides(states: Tensor) -> tuple[int, int]:
    """Return the strides of heads and rows; 0 where there is only one, whose stride may be any."""
    _, heads, rows, _ = states.shape
    head_stride = 0 if heads == 1 else states.stride(1)
    row_stride = 0 if rows == 1 else states.stride(2)
    return head_stride, row_stride


def _table_of(buffers: SequenceBuffers, device: torch.device) -> BufferTable:
    """Copy the addresses of buffers to a device."""
    rows = [*buffers.places, list(buffers.lengths)]
    numbers = torch.tensor(rows, dtype=torch.int64, device=device)
    starts = None
    most_new = 1
    if buffers.counts is not None:
        starts = torch.tensor([0, *accumulate(buffers.counts)], device=device)
        most_new = next_power_of_2(max(buffers.counts))
    return BufferTable(
        places=numbers[:3],
        lengths=numbers[3],
        most_rows=max(keys.shape[2] for keys in buffers.keys),
        starts=starts,
        most_new=most_new,
    )


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

    A stride is named after what it leads through: ``q_h`` from head to head, ``r`` rows, ``n``
    partial results or the rows of the table.
    """
    i_sequence = tl.program_id(0).to(tl.int64) // TILES
    i_tile = tl.program_id(0) % TILES
    i_h = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)

    # Rows: of each of the sequence's new tokens, the heads of a group.
    o_r = i_tile * BR + tl.arange(0, BR)
    i_first = i_sequence
    num_new = 1
    if NEW > 1:
        i_first = tl.load(p_starts + i_sequence)
        num_new = (tl.load(p_starts + i_sequence + 1) - i_first).to(tl.int32)
    # [BR]
    o_s = o_r // GROUP
    m_r = o_s < num_new
    o_row = i_first + o_s
    o_head = i_h * GROUP + o_r % GROUP
    # [BD]
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    # [BR, BD]
    sign, scale = split_scale(scale)
    b_q = load_queries(p_q, (o_head * q_h + o_row * q_r) * ALIGN, sign, m_r, D, BD)

    # The sequence's buffers: the table has addresses of K, of V, and capacities.
    length = tl.load(p_lengths + i_sequence).to(tl.int32)
    o_buffer = i_h * tl.load(p_places + 2 * places_n + i_sequence) * D
    p_keys = tl.load(p_places + i_sequence).to(tl.pointer_type(p_k.dtype.element_ty))
    p_values = tl.load(p_places + places_n + i_sequence).to(tl.pointer_type(p_v.dtype.element_ty))
    p_keys = tl.multiple_of(p_keys, 16) + o_buffer
    p_values = tl.multiple_of(p_values, 16) + o_buffer

    # Keys: this program's range.
    keys_per_split = tl.cdiv(tl.cdiv(length + num_new, tl.num_programs(2)), BT) * BT
    keys_per_split = tl.maximum(keys_per_split, FEWEST)
    first_key = (i_split * keys_per_split).to(tl.int32)
    stop_key = first_key + keys_per_split
    b_acc, b_max, b_sum = begin_softmax(BR, BD)
    o_tile = tl.arange(0, BT)

    # Keys in the buffers: whole tiles, and what is left of one.
    stop = tl.minimum(stop_key, length)
    whole_stop = first_key + tl.maximum(stop - first_key, 0) // BT * BT
    for i_t in range(first_key, whole_stop, BT):
        # [BT]
        o_t = (i_t + o_tile).to(tl.int64) * D
        b_acc, b_max, b_sum = attend_tile(
            b_acc=b_acc,
            b_max=b_max,
            b_sum=b_sum,
            b_q=b_q,
            p_k=p_keys,
            p_v=p_values,
            o_k=o_t,
            o_v=o_t,
            m_t=None,
            m_seen=None,
            scale=scale,
            IS_MASKED=False,
            D=D,
            BD=BD,
        )
    if whole_stop < stop:
        # [BT]
        o_t = (whole_stop + o_tile).to(tl.int64) * D
        m_t = whole_stop + o_tile < stop
        b_acc, b_max, b_sum = attend_tile(
            b_acc=b_acc,
            b_max=b_max,
            b_sum=b_sum,
            b_q=b_q,
            p_k=p_keys,
            p_v=p_values,
            o_k=o_t,
            o_v=o_t,
            m_t=m_t,
            m_seen=m_t[None, :],
            scale=scale,
            IS_MASKED=True,
            D=D,
            BD=BD,
        )

    # New keys.
    has_new = (first_key <= length) & (length < stop_key)
    if NEW > 1:
        p_k = p_k + (i_h * k_h + i_first * k_r) * ALIGN
        p_v = p_v + (i_h * v_h + i_first * v_r) * ALIGN
        for i_t in range(0, tl.where(has_new, num_new, 0), BT):
            # [BT]
            o_t = i_t + o_tile
            m_t = o_t < num_new
            o_k = o_t.to(tl.int64) * k_r * ALIGN
            o_v = o_t.to(tl.int64) * v_r * ALIGN
            # [BT, BD]: the program of the first tile appends them
            o_new = (length + o_t).to(tl.int64)[:, None] * D + o_d[None, :]
            m_new = (o_t < tl.where(i_tile == 0, num_new, 0))[:, None] & m_d[None, :]
            tl.store(p_keys + o_new, load_tile(p_k, o_k, m_t, True, D, BD), mask=m_new)
            tl.store(p_values + o_new, load_tile(p_v, o_v, m_t, True, D, BD), mask=m_new)
            # [BR, BT]: a token sees the new ones up to itself
            m_seen = (o_t[None, :] <= o_s[:, None]) & (o_t < num_new)[None, :]
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k,
                p_v=p_v,
                o_k=o_k,
                o_v=o_v,
                m_t=m_t,
                m_seen=m_seen,
                scale=scale,
                IS_MASKED=True,
                D=D,
                BD=BD,
            )
    elif has_new:
        # [BD]
        b_k = tl.load(p_k + (i_h * k_h + i_sequence * k_r) * ALIGN + o_d, mask=m_d, other=0.0)
        b_v = tl.load(p_v + (i_h * v_h + i_sequence * v_r) * ALIGN + o_d, mask=m_d, other=0.0)
        o_new = length.to(tl.int64) * D + o_d
        tl.store(p_keys + o_new, b_k, mask=m_d)
        tl.store(p_values + o_new, b_v, mask=m_d)
        # [BR]
        b_s = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32)[None, :], axis=1)
        b_new_max = tl.maximum(b_max, b_s)
        b_p = tl.exp2((b_s - b_new_max) * scale)
        b_decay = tl.exp2((b_max - b_new_max) * scale)
        # [BR, BD]
        b_acc = b_acc * b_decay[:, None] + b_p[:, None] * b_v.to(tl.float32)[None, :]
        b_sum = b_sum * b_decay + b_p
        b_max = b_new_max

    # [BR]
    o_out = (i_split * out_n + o_head * out_h + o_row * out_r) * ALIGN
    o_lse = (i_split * tl.num_programs(1) * GROUP + o_head) * num_rows + o_row
    store_rows(p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)
