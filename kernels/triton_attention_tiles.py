"""Steps that the Triton attention kernels share: FlashAttention's loop (Dao, 2023) over tiles.

A tile's addresses are products of its place with strides, without division; masks are applied only
at a tile's last keys and at the diagonal; scores are scaled by the same instruction that subtracts
their maximum.

Names: a *row* is one query token and one head. BR rows and BT keys are a tile, BD is D padded to a
power of 2. Offsets are in elements, and of batch, head and row in units of ALIGN elements.
"""

import triton
import triton.language as tl

from .triton_specialization import reveal

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_SMALLEST_SCALE = tl.constexpr(1e-30)  # a scale of 0 would turn masked scores into NaN


@triton.jit
def split_scale(scale):
    """Split a scale into a sign, for the queries, and a factor above 0, for the scores.

    The factor includes log2(e), as exp2 is the hardware's own exponential.
    """
    sign = tl.where(scale < 0, -1.0, 1.0)
    return sign, tl.maximum(tl.abs(scale) * LOG2_E, _SMALLEST_SCALE)


@triton.jit
def load_queries(
    p_q,
    o_q,
    sign,
    m_r,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Load rows of queries, times 1 or -1, with zeros where there is none."""
    o_d = tl.arange(0, BD)
    # [BR, BD]
    p_rows = p_q + o_q[:, None] + o_d[None, :]
    b_q = tl.load(p_rows, mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
    return (b_q * sign).to(b_q.dtype)


@triton.jit
def load_tile(
    p_states,
    o_rows,
    m_t,
    IS_MASKED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Load rows of K or V; where IS_MASKED, zeros in place of those outside ``m_t [BT]``."""
    o_d = tl.arange(0, BD)
    # [BT, BD]
    p_rows = p_states + o_rows[:, None] + o_d[None, :]
    if IS_MASKED:
        b_states = tl.load(p_rows, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    elif D != BD:
        b_states = tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_states = tl.load(p_rows)
    return b_states


@triton.jit
def begin_softmax(
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """Begin an online softmax of BR rows that have seen no key.

    Returns the weighted sums of values, the highest scores, not scaled yet, and the sums of
    weights.
    """
    # [BR, BD]
    b_acc = tl.zeros([BR, BD], tl.float32)
    # [BR]
    b_max = tl.full([BR], float("-inf"), tl.float32)
    # [BR]
    b_sum = tl.zeros([BR], tl.float32)
    return b_acc, b_max, b_sum


@triton.jit
def attend_tile(
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
    IS_MASKED: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Add the keys at ``o_k`` and the values at ``o_v`` to the online softmax.

    Where IS_MASKED, only rows in ``m_t [BT]`` are read, and only what ``m_seen [BR, BT]`` has is
    seen; elsewhere all rows see all keys, and both are ignored.
    """
    # [BT, BD]
    b_k = load_tile(p_k, o_k, m_t, IS_MASKED, D, BD)
    b_v = load_tile(p_v, o_v, m_t, IS_MASKED, D, BD)
    # [BR, BT]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    if IS_MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    # [BR]
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_shift = b_new_max * scale
    if IS_MASKED:
        # A row that has seen nothing yet has -inf here, and -inf - -inf would be NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_shift)
    # [BR, BT]
    b_p = tl.exp2(b_s * scale - b_shift[:, None])
    # [BR]
    b_decay = tl.exp2(b_max * scale - b_shift)
    # [BR, BD]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="tf32x3")
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_p, axis=1)


@triton.jit
def store_rows(
    p_out,
    p_lse,
    o_out,
    o_lse,
    b_acc,
    b_max,
    b_sum,
    m_r,
    scale,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Store rows' results; zeros and -inf where a row has seen nothing."""
    o_d = tl.arange(0, BD)
    # [BR]
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = (b_max * scale + tl.log2(b_sum)) * _LN_2
    # [BR, BD]
    b_out = b_acc / b_sum[:, None]
    tl.store(p_lse + o_lse, b_lse, mask=m_r)
    m_out = m_r[:, None] & (o_d < D)[None, :]
    p_rows = p_out + o_out[:, None] + o_d[None, :]
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def head_offset(i_b, i_h, batch_stride, head_stride):
    """Return how far a head of a batch is from the first one, by hidden strides."""
    return i_b.to(tl.int64) * reveal(batch_stride) + i_h.to(tl.int64) * reveal(head_stride)


@triton.jit
def row_offset(i_b, o_head, o_s, strides):
    """Return how far rows of queries or results are from the first one, by hidden strides."""
    o_first = head_offset(i_b, o_head, strides[0], strides[1])
    return o_first + o_s.to(tl.int64) * reveal(strides[2])


@triton.jit
def recompute_rows(first_row, num_queries, BR: tl.constexpr):
    """Return the rows of a tile once more, so that the compiler does not keep them during a loop.

    Kept, they take registers that the loop needs.
    """
    zero = (num_queries < 0).to(tl.int32)  # which the compiler cannot know
    return first_row + zero + tl.arange(0, BR)
