"""The Triton kernels of :mod:`apbv.kernels.triton_attention`.

Both are FlashAttention's loop (Dao, 2023) over tiles of keys, kept short. A tile's addresses are
products of its place with strides, without division; masks are applied only at a tile's last keys
and at the diagonal; scores are scaled by the same instruction that subtracts their maximum.

Names: S query tokens, a *row* is one token and one head of a group. Strides are in units of ALIGN
elements, in the order (batch, head, row).
"""

import triton
import triton.language as tl

from .triton_merging import plain

NO_MASK, CAUSAL, GIVEN_MASK = range(3)  # of verify_kernel


@triton.jit
def _pick(values, index):
    """Return values[index] of a tuple for an index that is known only at run time."""
    picked = values[0]
    for i in tl.static_range(1, len(values)):
        picked = tl.where(index == i, values[i], picked)
    return picked


@triton.jit
def _load_queries(p_q, o_q, sign, m_r, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of queries, times 1 or -1, with zeros where there is none."""
    o_d = tl.arange(0, BD)
    # [BR, BD]
    b_q = tl.load(
        p_q + o_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0
    )
    return (b_q * sign).to(b_q.dtype)


@triton.jit
def _load_tile(p_states, o_rows, m_t, BOUNDED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of K or V; where BOUNDED, zeros in place of those outside m_t."""
    o_d = tl.arange(0, BD)
    p_rows = p_states + o_rows[:, None] + o_d[None, :]
    # [BT, BD]
    if BOUNDED:
        b_states = tl.load(p_rows, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    elif D != BD:
        b_states = tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_states = tl.load(p_rows)
    return b_states


@triton.jit
def _attend_tile(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_k,
    p_v,
    o_k,
    o_v,
    m_t,
    m_seen,
    scale,
    BOUNDED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Add the keys at o_k and the values at o_v to the online softmax.

    Where BOUNDED, rows outside m_t ``[BT]`` are not read; where MASKED, only what m_seen
    ``[BR, BT]`` has is seen. b_max is of scores that are not scaled yet.
    """
    b_k = _load_tile(p_k, o_k, m_t, BOUNDED, D, BD)
    b_v = _load_tile(p_v, o_v, m_t, BOUNDED, D, BD)
    # [BR, BT]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_shift = b_new_max * scale
    if MASKED:
        # A row that has seen nothing yet has -inf here, and -inf - -inf would be NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_shift)
    b_p = tl.exp2(b_s * scale - b_shift[:, None])
    b_decay = tl.exp2(b_max * scale - b_shift)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="tf32x3")
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_p, axis=1)


@triton.jit
def _factors(scale):
    """Split a scale into the sign that goes into the queries, and a factor above 0 for the scores'
    logarithms."""
    # log2(e): exp2 is the hardware's own exponential. A scale of 0 would turn masked scores into
    # NaN.
    return tl.where(scale < 0, -1.0, 1.0), tl.maximum(tl.abs(scale) * 1.4426950408889634, 1e-30)


@triton.jit
def _nothing_seen(BR: tl.constexpr, BD: tl.constexpr):
    """Begin an online softmax of BR rows: their weighted values, highest scores, and sums of
    weights."""
    return (
        tl.zeros([BR, BD], tl.float32),
        tl.full([BR], float("-inf"), tl.float32),
        tl.zeros([BR], tl.float32),
    )


@triton.jit
def _store_rows(
    p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D: tl.constexpr, BD: tl.constexpr
):
    """Store rows' results; zeros and -inf where a row has seen nothing."""
    o_d = tl.arange(0, BD)
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = (b_max * scale + tl.log2(b_sum)) * 0.6931471805599453  # ln(2)
    b_out = b_acc / b_sum[:, None]
    tl.store(p_lse + o_lse, b_lse, mask=m_r)
    m_out = m_r[:, None] & (o_d < D)[None, :]
    tl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _head_offset(i_b, i_h, batch_stride, head_stride):
    """Return how far a head of a batch is from the first one, of hidden strides."""
    return i_b.to(tl.int64) * plain(batch_stride) + i_h.to(tl.int64) * plain(head_stride)


@triton.jit
def _row_offset(i_b, o_head, o_s, strides):
    """Return how far rows of queries or results are from the first one, of hidden strides."""
    return _head_offset(i_b, o_head, strides[0], strides[1]) + o_s.to(tl.int64) * plain(strides[2])


@triton.jit
def _rows_again(first_row, num_queries, BR: tl.constexpr):
    """Return the rows of a tile once more, in such a way that the compiler does not keep them
    during a loop.

    Kept, they take registers that the loop needs.
    """
    never = (num_queries < 0).to(tl.int32)  # 0, which the compiler cannot know
    return first_row + never + tl.arange(0, BR)


@triton.jit
def _run_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump):
    """Return how far rows o_t of a run's K and V are from the first; see
    :func:`apbv.kernels.runs.divisor`."""
    i_piece = (((o_t.to(tl.uint64) * magic) >> 32).to(tl.int32) >> shift).to(tl.int64)
    return o_t.to(tl.int64) * k_row + i_piece * k_jump, o_t.to(tl.int64) * v_row + i_piece * v_jump


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "num_past",
        "num_last",
        "rows_alone",
        "keys_per_split",
        "num_runs",
    ]
)  # one compiled kernel serves all lengths; ALIGN tells loads what they need to know of the strides
def segments_kernel(
    p_q,
    p_out,
    p_lse,
    p_ks,
    p_vs,
    p_last_k,
    p_last_v,
    run_lens,
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
    rows_alone,
    keys_per_split,
    num_runs,
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
    """One program attends from a tile of rows to a range of one head's keys, the last segment's
    after all others.

    A tile of rows is either of those that see the last segment only or of others, so that keys need
    no mask for that. Strides of a run have the jump between pieces after them. Integers in tuples
    are hidden by :func:`apbv.kernels.triton_merging.veiled`.
    """
    # Under a causal mask the last tiles have the most keys: they start first.
    i_r = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_split = tl.program_id(2)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS

    tiles_alone = tl.cdiv(rows_alone * GROUP, BR)
    is_alone = i_r < tiles_alone
    first_row = tl.where(is_alone, i_r * BR, rows_alone * GROUP + (i_r - tiles_alone) * BR)
    end_row = tl.minimum(first_row + BR, tl.where(is_alone, rows_alone, num_queries) * GROUP)
    o_r = first_row + tl.arange(0, BR)
    m_r = o_r < end_row
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    sign, scale = _factors(scale)
    o_q = _row_offset(i_b, o_head, o_s, q_strides)
    b_q = _load_queries(p_q, o_q * ALIGN, sign, m_r, D, BD)

    b_acc, b_max, b_sum = _nothing_seen(BR, BD)
    o_tile = tl.arange(0, BT)
    first_key = i_split * keys_per_split
    stop_key = tl.minimum(first_key + keys_per_split, num_past + num_last)

    run_first = 0
    for i_run in range(tl.where(is_alone, 0, num_runs)):
        k_head = _head_offset(i_b, i_h, _pick(k_strides[0], i_run), _pick(k_strides[1], i_run))
        v_head = _head_offset(i_b, i_h, _pick(v_strides[0], i_run), _pick(v_strides[1], i_run))
        p_k = _pick(p_ks, i_run) + k_head * ALIGN
        p_v = _pick(p_vs, i_run) + v_head * ALIGN
        k_row = plain(_pick(k_strides[2], i_run))
        k_jump = plain(_pick(k_strides[3], i_run))
        v_row = plain(_pick(v_strides[2], i_run))
        v_jump = plain(_pick(v_strides[3], i_run))
        magic = plain(_pick(magics, i_run)).to(tl.uint32)
        shift = plain(_pick(shifts, i_run))
        run_len = plain(_pick(run_lens, i_run))
        start = tl.maximum(first_key - run_first, 0)
        stop = tl.minimum(stop_key - run_first, run_len)
        whole = start + tl.maximum(stop - start, 0) // BT * BT
        for i_t in range(start, whole, BT):
            o_t = i_t + o_tile
            o_k, o_v = _run_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump)
            b_acc, b_max, b_sum = _attend_tile(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_k,
                p_v,
                o_k * ALIGN,
                o_v * ALIGN,
                o_t,
                o_t,
                scale,
                False,
                False,
                D,
                BD,
            )
        if whole < stop:
            o_t = whole + o_tile
            o_k, o_v = _run_offsets(o_t, magic, shift, k_row, k_jump, v_row, v_jump)
            m_t = o_t < stop
            b_acc, b_max, b_sum = _attend_tile(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_k,
                p_v,
                o_k * ALIGN,
                o_v * ALIGN,
                m_t,
                m_t[None, :],
                scale,
                True,
                True,
                D,
                BD,
            )
        run_first += run_len

    if HAS_LAST:
        p_k = p_last_k + _head_offset(i_b, i_h, last_k_strides[0], last_k_strides[1]) * ALIGN
        p_v = p_last_v + _head_offset(i_b, i_h, last_v_strides[0], last_v_strides[1]) * ALIGN
        k_row = plain(last_k_strides[2])
        v_row = plain(last_v_strides[2])
        start = tl.maximum(first_key - num_past, 0)
        stop = tl.minimum(stop_key - num_past, num_last)
        b_limit = tl.zeros([BR], tl.int32) + stop
        open_stop = stop
        if IS_CAUSAL:
            # Query s sees the first num_last - num_queries + s + 1 keys.
            hidden = num_last - num_queries + 1
            open_stop = tl.minimum(stop, hidden + first_row // GROUP)
            stop = tl.minimum(stop, hidden + (end_row - 1) // GROUP)
            b_limit = tl.minimum(o_s + hidden, stop)
        whole = start + tl.maximum(open_stop - start, 0) // BT * BT
        o_k = o_tile.to(tl.int64) * k_row * ALIGN
        o_v = o_tile.to(tl.int64) * v_row * ALIGN
        for i_t in range(start, whole, BT):
            k_tile = i_t * k_row.to(tl.int64) * ALIGN
            v_tile = i_t * v_row.to(tl.int64) * ALIGN
            b_acc, b_max, b_sum = _attend_tile(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_k + k_tile,
                p_v + v_tile,
                o_k,
                o_v,
                o_tile,
                o_tile,
                scale,
                False,
                False,
                D,
                BD,
            )
        for i_t in range(whole, stop, BT):
            o_t = i_t + o_tile
            o_k = o_t.to(tl.int64) * k_row
            o_v = o_t.to(tl.int64) * v_row
            b_acc, b_max, b_sum = _attend_tile(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_k,
                p_v,
                o_k * ALIGN,
                o_v * ALIGN,
                o_t < stop,
                o_t[None, :] < b_limit[:, None],
                scale,
                True,
                True,
                D,
                BD,
            )

    o_r = _rows_again(first_row, num_queries, BR)
    m_r = o_r < end_row
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    o_out = _row_offset(i_b, o_head, o_s, out_strides) + i_split.to(tl.int64) * plain(part_stride)
    o_lse = ((i_split * tl.num_programs(1) + i_bh) * GROUP + o_r % GROUP).to(
        tl.int64
    ) * num_queries + o_s
    _store_rows(p_out, p_lse, o_out * ALIGN, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)


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
    """One program attends from a tile of rows to a range of one head's keys: the past ones, then
    the masked ones.

    A program whose range is empty writes an lse of -inf.
    """
    i_r = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_split = tl.program_id(2).to(tl.int64)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS
    o_r = i_r * BR + tl.arange(0, BR)
    m_r = o_r < num_queries * GROUP
    o_s = o_r // GROUP
    o_head = i_h * GROUP + o_r % GROUP
    sign, scale = _factors(scale)
    b_q = _load_queries(
        p_q, (i_b * q_b + o_head * q_h + o_s.to(tl.int64) * q_s) * ALIGN, sign, m_r, D, BD
    )

    if HAS_NUM_KEYS:
        num_keys = tl.minimum(tl.load(p_num_keys), num_keys)
    num_past = tl.maximum(num_keys - num_masked, 0)
    if HAS_NUM_KEYS:
        # The grid is that of a full buffer; the programs share the keys that there are.
        keys_per_split = tl.cdiv(tl.cdiv(num_past + num_masked, tl.num_programs(2)), BT) * BT
    first_key = (i_split * keys_per_split).to(tl.int32)
    stop_key = tl.minimum(first_key + keys_per_split, num_past + num_masked)
    b_acc, b_max, b_sum = _nothing_seen(BR, BD)
    o_tile = tl.arange(0, BT)
    p_k += (i_b * k_b + i_h * k_h) * ALIGN
    p_v += (i_b * v_b + i_h * v_h) * ALIGN

    stop = tl.minimum(stop_key, num_past)
    whole = first_key + tl.maximum(stop - first_key, 0) // BT * BT
    for i_t in range(first_key, whole, BT):
        o_t = (i_t + o_tile).to(tl.int64)
        b_acc, b_max, b_sum = _attend_tile(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_k,
            p_v,
            o_t * k_t * ALIGN,
            o_t * v_t * ALIGN,
            o_t,
            o_t,
            scale,
            False,
            False,
            D,
            BD,
        )
    if whole < stop:
        o_t = (whole + o_tile).to(tl.int64)
        m_t = o_t < stop
        b_acc, b_max, b_sum = _attend_tile(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_k,
            p_v,
            o_t * k_t * ALIGN,
            o_t * v_t * ALIGN,
            m_t,
            m_t[None, :],
            scale,
            True,
            True,
            D,
            BD,
        )

    if MASK != 0:
        stop = tl.minimum(stop_key - num_past, num_masked)
        for i_t in range(tl.maximum(first_key - num_past, 0), stop, BT):
            o_t = i_t + o_tile
            m_t = o_t < stop
            if MASK == 1:
                # Query s sees the first num_masked - num_queries + s + 1 of them.
                m_seen = (o_t[None, :] <= (num_masked - num_queries + o_s)[:, None]) & m_t[None, :]
            else:
                p_seen = (
                    p_visible + tl.minimum(o_s, num_queries - 1).to(tl.int64)[:, None] * visible_s
                )
                m_seen = tl.load(p_seen + o_t[None, :], mask=m_t[None, :], other=0) != 0
            o_row = (num_past + o_t).to(tl.int64)
            b_acc, b_max, b_sum = _attend_tile(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_k,
                p_v,
                o_row * k_t * ALIGN,
                o_row * v_t * ALIGN,
                m_t,
                m_seen,
                scale,
                True,
                True,
                D,
                BD,
            )

    o_out = (i_split * out_n + i_b * out_b + o_head * out_h + o_s.to(tl.int64) * out_s) * ALIGN
    o_lse = ((i_split * tl.num_programs(1) + i_bh) * GROUP + o_r % GROUP) * num_queries + o_s
    _store_rows(p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)
