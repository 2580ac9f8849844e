"""The Triton kernels of :mod:`apbv.kernels.triton_attention`.

Names: S query tokens, a *row* is one token and one head of a group. Strides are in units of ALIGN
elements, in the order (batch, head, row).
"""

import triton
import triton.language as tl

from .triton_attention_tiles import (
    attend_tile,
    begin_softmax,
    head_offset,
    load_queries,
    recompute_rows,
    row_offset,
    split_scale,
    store_rows,
)
from .triton_specialization import reveal

# What hides the last keys of verify_kernel: MASK.
NO_MASK = tl.constexpr(0)  # there are no masked keys
CAUSAL = tl.constexpr(1)  # a query sees the masked keys up to its own
GIVEN_MASK = tl.constexpr(2)  # a query sees what a mask says


@triton.jit
def _pick(values, index):
    """Return values[index] of a tuple for an index that is known only at run time."""
    picked = values[0]
    for i in tl.static_range(1, len(values)):
        picked = tl.where(index == i, values[i], picked)
    return picked


@triton.jit
def _piece_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump):
    """Return how far rows ``o_t`` of a segment's K and V are from its first row.

    Magic and shift are :func:`apbv.kernels.strides.magic_divisor` of the piece's length.
    """
    i_piece = (((o_t.to(tl.uint64) * magic) >> 32).to(tl.int32) >> shift).to(tl.int64)
    o_k = o_t.to(tl.int64) * k_row + i_piece * k_jump
    o_v = o_t.to(tl.int64) * v_row + i_piece * v_jump
    return o_k, o_v


# One compiled kernel serves all lengths; ALIGN tells loads what they need to know of the strides.
@triton.jit(
    do_not_specialize=[
        "num_queries",
        "num_past",
        "num_last",
        "num_anchor_queries",
        "keys_per_split",
        "num_segments",
    ]
)
def segments_kernel(
    p_q,
    p_out,
    p_lse,
    p_ks,
    p_vs,
    p_last_k,
    p_last_v,
    segment_lens,
    magics,
    shifts,
    k_strides,
    v_strides,
    q_strides,
    out_strides,
    part_stride,
    last_k_strides,
    last_v_strides,
    scale,
    num_queries,
    num_past,
    num_last,
    num_anchor_queries,
    keys_per_split,
    num_segments,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_LAST: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """One program attends from a tile of rows to a range of one head's keys.

    The last segment's keys come after all others. A tile has either anchor rows, which see the last
    segment only, or other rows, so that keys need no mask for that. The strides of a segment have
    the jump between pieces after them. Strides, and integers in tuples, are hidden by ``hide``.
    """
    # Under a causal mask the last tiles have the most keys: they start first.
    i_r = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_split = tl.program_id(2)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS

    # Rows: the tiles of anchor rows come before the others.
    num_anchor_rows = num_anchor_queries * GROUP
    num_anchor_tiles = tl.cdiv(num_anchor_rows, BR)
    is_anchor = i_r < num_anchor_tiles
    first_row = tl.where(is_anchor, i_r * BR, num_anchor_rows + (i_r - num_anchor_tiles) * BR)
    end_row = first_row + BR
    end_row = tl.minimum(end_row, tl.where(is_anchor, num_anchor_queries, num_queries) * GROUP)
    # [BR]
    o_r = first_row + tl.arange(0, BR)
    m_r = o_r < end_row
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    # [BR, BD]
    sign, scale = split_scale(scale)
    o_q = row_offset(i_b, o_head, o_s, q_strides)
    b_q = load_queries(p_q, o_q * ALIGN, sign, m_r, D, BD)
    b_acc, b_max, b_sum = begin_softmax(BR, BD)

    # Keys: this program's range, of all segments together.
    o_tile = tl.arange(0, BT)
    first_key = i_split * keys_per_split
    stop_key = tl.minimum(first_key + keys_per_split, num_past + num_last)

    # Every segment but the last, which anchor rows do not see.
    segment_first = 0
    for i_segment in range(tl.where(is_anchor, 0, num_segments)):
        k_batch = _pick(k_strides[0], i_segment)
        k_head = _pick(k_strides[1], i_segment)
        o_k_head = head_offset(i_b, i_h, k_batch, k_head)
        v_batch = _pick(v_strides[0], i_segment)
        v_head = _pick(v_strides[1], i_segment)
        o_v_head = head_offset(i_b, i_h, v_batch, v_head)
        p_k = _pick(p_ks, i_segment) + o_k_head * ALIGN
        p_v = _pick(p_vs, i_segment) + o_v_head * ALIGN
        k_row = reveal(_pick(k_strides[2], i_segment))
        k_jump = reveal(_pick(k_strides[3], i_segment))
        v_row = reveal(_pick(v_strides[2], i_segment))
        v_jump = reveal(_pick(v_strides[3], i_segment))
        magic = reveal(_pick(magics, i_segment)).to(tl.uint32)
        shift = reveal(_pick(shifts, i_segment))
        segment_len = reveal(_pick(segment_lens, i_segment))
        start = tl.maximum(first_key - segment_first, 0)
        stop = tl.minimum(stop_key - segment_first, segment_len)
        whole_stop = start + tl.maximum(stop - start, 0) // BT * BT
        # Whole tiles.
        for i_t in range(start, whole_stop, BT):
            # [BT]
            o_t = i_t + o_tile
            o_k, o_v = _piece_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump)
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k,
                p_v=p_v,
                o_k=o_k * ALIGN,
                o_v=o_v * ALIGN,
                m_t=None,
                m_seen=None,
                scale=scale,
                IS_MASKED=False,
                D=D,
                BD=BD,
            )
        # What is left of a tile.
        if whole_stop < stop:
            # [BT]
            o_t = whole_stop + o_tile
            o_k, o_v = _piece_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump)
            m_t = o_t < stop
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k,
                p_v=p_v,
                o_k=o_k * ALIGN,
                o_v=o_v * ALIGN,
                m_t=m_t,
                m_seen=m_t[None, :],
                scale=scale,
                IS_MASKED=True,
                D=D,
                BD=BD,
            )
        segment_first += segment_len

    # The last segment, in one piece.
    if HAS_LAST:
        p_k = p_last_k + head_offset(i_b, i_h, last_k_strides[0], last_k_strides[1]) * ALIGN
        p_v = p_last_v + head_offset(i_b, i_h, last_v_strides[0], last_v_strides[1]) * ALIGN
        k_row = reveal(last_k_strides[2])
        v_row = reveal(last_v_strides[2])
        start = tl.maximum(first_key - num_past, 0)
        stop = tl.minimum(stop_key - num_past, num_last)
        # [BR]: a row sees the keys before its limit, and all rows those before open_stop
        b_limit = tl.zeros([BR], tl.int32) + stop
        open_stop = stop
        if IS_CAUSAL:
            # Query s sees the first num_last - num_queries + s + 1 keys.
            num_seen_by_first = num_last - num_queries + 1
            open_stop = tl.minimum(stop, num_seen_by_first + first_row // GROUP)
            stop = tl.minimum(stop, num_seen_by_first + (end_row - 1) // GROUP)
            b_limit = tl.minimum(o_s + num_seen_by_first, stop)
        whole_stop = start + tl.maximum(open_stop - start, 0) // BT * BT
        # Whole tiles that all rows see.
        # [BT]
        o_k = o_tile.to(tl.int64) * k_row * ALIGN
        o_v = o_tile.to(tl.int64) * v_row * ALIGN
        for i_t in range(start, whole_stop, BT):
            k_tile = i_t * k_row.to(tl.int64) * ALIGN
            v_tile = i_t * v_row.to(tl.int64) * ALIGN
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k + k_tile,
                p_v=p_v + v_tile,
                o_k=o_k,
                o_v=o_v,
                m_t=None,
                m_seen=None,
                scale=scale,
                IS_MASKED=False,
                D=D,
                BD=BD,
            )
        # The diagonal, and what is left of a tile.
        for i_t in range(whole_stop, stop, BT):
            # [BT]
            o_t = i_t + o_tile
            o_k = o_t.to(tl.int64) * k_row
            o_v = o_t.to(tl.int64) * v_row
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k,
                p_v=p_v,
                o_k=o_k * ALIGN,
                o_v=o_v * ALIGN,
                m_t=o_t < stop,
                m_seen=o_t[None, :] < b_limit[:, None],
                scale=scale,
                IS_MASKED=True,
                D=D,
                BD=BD,
            )

    # [BR]
    o_r = recompute_rows(first_row, num_queries, BR)
    m_r = o_r < end_row
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    o_out = row_offset(i_b, o_head, o_s, out_strides) + i_split.to(tl.int64) * reveal(part_stride)
    i_lse = (i_split * tl.num_programs(1) + i_bh) * GROUP + o_r % GROUP
    o_lse = i_lse.to(tl.int64) * num_queries + o_s
    store_rows(p_out, p_lse, o_out * ALIGN, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)


@triton.jit(
    do_not_specialize=[
        "q_b",
        "q_h",
        "q_s",
        "k_b",
        "k_h",
        "k_t",
        "v_b",
        "v_h",
        "v_t",
        "out_n",
        "out_b",
        "out_h",
        "out_s",
        "visible_s",
        "num_queries",
        "num_keys",
        "num_masked",
        "keys_per_split",
    ]
)
def verify_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_visible,
    p_num_keys,
    scale,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    out_n,
    out_b,
    out_h,
    out_s,
    visible_s,
    num_queries,
    num_keys,
    num_masked,
    keys_per_split,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    MASK: tl.constexpr,
    HAS_NUM_KEYS: tl.constexpr,
):
    """One program attends from a tile of rows to a range of one head's keys.

    The past keys come first, then the masked ones. A program whose range is empty writes an lse of
    -inf. A stride is named after what it leads through: ``q_b`` from batch to batch, ``h`` heads,
    ``s`` queries, ``t`` keys, ``n`` partial results.
    """
    i_r = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS

    # Rows.
    # [BR]
    o_r = i_r * BR + tl.arange(0, BR)
    m_r = o_r < num_queries * GROUP
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    # [BR, BD]
    sign, scale = split_scale(scale)
    o_q = i_b * q_b + o_head * q_h + o_s.to(tl.int64) * q_s
    b_q = load_queries(p_q, o_q * ALIGN, sign, m_r, D, BD)

    # Keys: this program's range.
    if HAS_NUM_KEYS:
        num_keys = tl.minimum(tl.load(p_num_keys), num_keys)
    num_past = tl.maximum(num_keys - num_masked, 0)
    if HAS_NUM_KEYS:
        # The grid is that of a full buffer; the programs share the keys that there are.
        keys_per_split = tl.cdiv(tl.cdiv(num_past + num_masked, tl.num_programs(2)), BT) * BT
    first_key = (i_split * keys_per_split).to(tl.int32)
    stop_key = tl.minimum(first_key + keys_per_split, num_past + num_masked)
    b_acc, b_max, b_sum = begin_softmax(BR, BD)
    o_tile = tl.arange(0, BT)
    p_k += (i_b * k_b + i_h * k_h) * ALIGN
    p_v += (i_b * v_b + i_h * v_h) * ALIGN

    # Past keys: whole tiles, and what is left of one.
    stop = tl.minimum(stop_key, num_past)
    whole_stop = first_key + tl.maximum(stop - first_key, 0) // BT * BT
    for i_t in range(first_key, whole_stop, BT):
        # [BT]
        o_t = (i_t + o_tile).to(tl.int64)
        b_acc, b_max, b_sum = attend_tile(
            b_acc=b_acc,
            b_max=b_max,
            b_sum=b_sum,
            b_q=b_q,
            p_k=p_k,
            p_v=p_v,
            o_k=o_t * k_t * ALIGN,
            o_v=o_t * v_t * ALIGN,
            m_t=None,
            m_seen=None,
            scale=scale,
            IS_MASKED=False,
            D=D,
            BD=BD,
        )
    if whole_stop < stop:
        # [BT]
        o_t = (whole_stop + o_tile).to(tl.int64)
        m_t = o_t < stop
        b_acc, b_max, b_sum = attend_tile(
            b_acc=b_acc,
            b_max=b_max,
            b_sum=b_sum,
            b_q=b_q,
            p_k=p_k,
            p_v=p_v,
            o_k=o_t * k_t * ALIGN,
            o_v=o_t * v_t * ALIGN,
            m_t=m_t,
            m_seen=m_t[None, :],
            scale=scale,
            IS_MASKED=True,
            D=D,
            BD=BD,
        )

    # Masked keys.
    if MASK != NO_MASK:
        stop = tl.minimum(stop_key - num_past, num_masked)
        for i_t in range(tl.maximum(first_key - num_past, 0), stop, BT):
            # [BT]
            o_t = i_t + o_tile
            m_t = o_t < stop
            # [BR, BT]
            if MASK == CAUSAL:
                # Query s sees the first num_masked - num_queries + s + 1 of them.
                o_last_seen = num_masked - num_queries + o_s
                m_seen = (o_t[None, :] <= o_last_seen[:, None]) & m_t[None, :]
            else:
                o_visible = tl.minimum(o_s, num_queries - 1).to(tl.int64)
                p_seen = p_visible + o_visible[:, None] * visible_s + o_t[None, :]
                m_seen = tl.load(p_seen, mask=m_t[None, :], other=0) != 0
            # [BT]
            o_key = (num_past + o_t).to(tl.int64)
            b_acc, b_max, b_sum = attend_tile(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k,
                p_v=p_v,
                o_k=o_key * k_t * ALIGN,
                o_v=o_key * v_t * ALIGN,
                m_t=m_t,
                m_seen=m_seen,
                scale=scale,
                IS_MASKED=True,
                D=D,
                BD=BD,
            )

    # [BR]
    o_out = (i_split * out_n + i_b * out_b + o_head * out_h + o_s.to(tl.int64) * out_s) * ALIGN
    o_lse = ((i_split * tl.num_programs(1) + i_bh) * GROUP + o_r % GROUP) * num_queries + o_s
    store_rows(p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)
