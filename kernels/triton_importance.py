"""Key selection in Triton kernels that read K once and write once.

Strides are those of (batch, head, row); the D numbers of a row are neighbours. A *row* of queries
is one head of a group and one token: all of them meet a tile of keys while it is on chip.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import torch_importance
from .strides import cdiv, next_power_of_2, with_contiguous_rows
from .tiles import tile_of
from .triton_attention import verify_attention


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def _importance_kernel(
    p_q,
    p_k,
    p_lse,
    p_out,
    q_strides,
    k_strides,
    lse_strides,
    scale,
    num_rows,
    num_keys,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PEAK: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """One program scores BT keys of one KV head against every row of queries; log p = s - lse."""
    i_t = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < num_keys
    p_k += i_b * k_strides[0] + i_h * k_strides[1]
    # [BT, BD]
    b_k = tl.load(
        p_k + (o_t * k_strides[2])[:, None] + o_d[None, :],
        mask=m_t[:, None] & (o_d < D)[None, :],
        other=0.0,
    )
    b_out = tl.full([BT], float("-inf") if PEAK else 0.0, tl.float32)
    for i_r in range(0, num_rows, BR):
        o_r = (i_r + tl.arange(0, BR)).to(tl.int64)
        o_q = (
            i_b * q_strides[0]
            + (i_h * GROUP + o_r % GROUP) * q_strides[1]
            + (o_r // GROUP) * q_strides[2]
        )
        m_q = (o_r < num_rows)[None, :] & (o_d < D)[:, None]
        # [BD, BR]
        b_q = tl.load(p_q + o_q[None, :] + o_d[:, None], mask=m_q, other=0.0)
        o_lse = (
            i_b * lse_strides[0]
            + (i_h * GROUP + o_r % GROUP) * lse_strides[1]
            + o_r // GROUP * lse_strides[2]
        )
        # [BR]; a row that is not there has probability 0 of everything
        b_lse = tl.load(p_lse + o_lse, mask=o_r < num_rows, other=float("inf")).to(tl.float32)
        # [BT, BR]
        b_log = tl.dot(b_k, b_q, input_precision="ieee") * scale - b_lse[None, :]
        if PEAK:
            b_out = tl.maximum(b_out, tl.max(b_log, axis=1))
        else:
            b_out += tl.sum(tl.exp(b_log), axis=1)
    b_out = tl.exp(b_out) if PEAK else b_out / num_rows
    tl.store(p_out + i_bh * num_keys + o_t, b_out, mask=m_t)


@triton.jit
def _load_ordered(p_scores, o_t, num_keys):
    """Load scores as integers in the same order; NaN counts as -inf, and what is not there comes
    before all."""
    b_score = tl.load(p_scores + o_t, mask=o_t < num_keys, other=0.0).to(tl.float32)
    b_score = tl.where(b_score == b_score, b_score, float("-inf"))
    b_score = tl.where(b_score == 0.0, 0.0, b_score)  # -0 equals 0
    b_bits = b_score.to(tl.int32, bitcast=True)
    # The bits of a negative number fall as it rises.
    b_bits = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    return tl.where(o_t < num_keys, b_bits, -0x80000000)


@triton.jit(do_not_specialize=["num_keys", "count"])
def _select_kernel(p_scores, p_indices, num_keys, count, BT: tl.constexpr):
    """One program lists where one KV head's ``count`` highest scores are, in order; of equal ones
    the first."""
    i_bh = tl.program_id(0).to(tl.int64)
    p_scores += i_bh * num_keys
    p_indices += i_bh * count
    o_tile = tl.arange(0, BT)
    # [BT], which stays in registers
    b_first = _load_ordered(p_scores, o_tile, num_keys)
    # The lowest score to keep, bit by bit: the highest integer that as many scores as are wanted
    # reach.
    lowest = tl.full((), -0x80000000, tl.int32)
    for i in range(0, 32):
        higher = lowest ^ (tl.full((), 1, tl.int32) << (31 - i))
        reached = tl.sum((b_first >= higher).to(tl.int32))
        for i_t in range(BT, num_keys, BT):
            reached += tl.sum(
                (_load_ordered(p_scores, i_t + o_tile, num_keys) >= higher).to(tl.int32)
            )
        lowest = tl.where(reached >= count, higher, lowest)
    above = tl.sum((b_first > lowest).to(tl.int32))
    for i_t in range(BT, num_keys, BT):
        above += tl.sum((_load_ordered(p_scores, i_t + o_tile, num_keys) > lowest).to(tl.int32))
    num_lowest = count - above

    above, equal = 0, 0  # counts of earlier tiles
    for i_t in range(0, num_keys, BT):
        o_t = i_t + o_tile
        b_bits = _load_ordered(p_scores, o_t, num_keys)
        m_above = b_bits > lowest
        m_equal = (b_bits == lowest) & (o_t < num_keys)
        # Both counts in one scan: a tile has fewer than 2 ** 16 scores.
        b_counts = tl.cumsum(m_above.to(tl.int32) + (m_equal.to(tl.int32) << 16), axis=0)
        b_above = above + (b_counts & 0xFFFF)
        b_equal = equal + (b_counts >> 16)
        m_kept = m_above | (m_equal & (b_equal <= num_lowest))
        tl.store(
            p_indices + b_above + tl.minimum(b_equal, num_lowest) - 1, o_t.to(tl.int64), mask=m_kept
        )
        above += tl.sum(m_above.to(tl.int32))
        equal += tl.sum(m_equal.to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    p_k,
    p_v,
    p_indices,
    p_out,
    k_strides,
    v_strides,
    out_strides,
    count,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """One program copies BC chosen rows of K and of V of one KV head to their places in ``out``."""
    i_c = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // KV_HEADS
    i_h = i_bh % KV_HEADS
    o_c = i_c * BC + tl.arange(0, BC)
    o_d = tl.arange(0, BD)
    m_c = o_c < count
    m_rows = m_c[:, None] & (o_d < D)[None, :]
    # [BC]
    o_row = tl.load(p_indices + i_bh * count + o_c, mask=m_c, other=0)
    p_k += i_b * k_strides[0] + i_h * k_strides[1]
    p_v += i_b * v_strides[0] + i_h * v_strides[1]
    p_out += i_b * out_strides[1] + i_h * out_strides[2]
    # [BC, BD]
    b_k = tl.load(p_k + (o_row * k_strides[2])[:, None] + o_d[None, :], mask=m_rows, other=0.0)
    b_v = tl.load(p_v + (o_row * v_strides[2])[:, None] + o_d[None, :], mask=m_rows, other=0.0)
    p_out += (o_c * out_strides[3])[:, None] + o_d[None, :]
    tl.store(p_out, b_k, mask=m_rows)
    tl.store(p_out + out_strides[0], b_v, mask=m_rows)


def kv_importance(
    q_query: Tensor, k: Tensor, scale: float, reduce: str, *, lse: Tensor | None = None
) -> Tensor:
    """Score at least one key as :func:`apbv.kernels.kv_importance` does, without pooling."""
    if (
        reduce == "dot"
    ):  # one product of a matrix and a vector for each KV head, which torch computes as well
        return torch_importance.kv_importance(q_query, k, scale, reduce)
    (batch, kv_heads, keys, dim) = k.shape
    group = q_query.shape[1] // k.shape[1]
    q_query = with_contiguous_rows(q_query)
    k = with_contiguous_rows(k)
    importance = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    # fp32 products run without tensor cores, on whole rows in registers, which spill unless tiles
    # are small.
    rows = group * q_query.shape[2]
    tile = tile_of("importance", rows, dim, k.element_size(), k.device)
    if lse is None:
        nothing_masked = q_query.new_empty(q_query.shape[2], 0, dtype=torch.bool)
        _, lse = verify_attention(q_query, k, k, scale, visible=nothing_masked)
    _importance_kernel[cdiv(keys, tile.keys), batch * kv_heads](
        q_query,
        k,
        lse,
        importance,
        q_query.stride()[:3],
        k.stride()[:3],
        lse.stride(),
        scale,
        rows,
        keys,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        PEAK=reduce == "peak",
        BT=tile.keys,
        BR=tile.rows,
        BD=tile.dim,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return importance


def select_topk(
    scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy rows as :func:`apbv.kernels.select_topk` does, for a count of at least 1."""
    if scores.dtype == torch.float64:  # whose order its kernel would lose
        return torch_importance.select_topk(scores, k, v, count, out)
    indices = kept_indices(scores, count)
    gather_rows(k, v, indices, out)
    return indices, out


def kept_indices(scores: Tensor, count: int) -> Tensor:
    """List the places of the ``count`` highest scores ``[B, Hkv, T]``, as ``[B, Hkv, count]``
    int64, ascending."""
    batch, kv_heads, keys = scores.shape
    indices = torch.empty(batch, kv_heads, count, dtype=torch.int64, device=scores.device)
    at_once = min(8192, next_power_of_2(keys))
    _select_kernel[(batch * kv_heads,)](
        scores.contiguous(), indices, keys, count, BT=at_once, num_warps=16
    )
    return indices


def gather_rows(k: Tensor, v: Tensor, indices: Tensor, out: Tensor) -> None:
    """Copy rows ``indices [B, Hkv, count]`` of k and v to the first places of ``out[0]`` and
    ``out[1]``."""
    batch, kv_heads, count = indices.shape
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    padded = _padded(k.shape[3])
    rows_at_once = 4096 // padded
    _gather_kernel[cdiv(count, rows_at_once), batch * kv_heads](
        k,
        v,
        indices,
        out,
        k.stride()[:3],
        v.stride()[:3],
        out.stride()[:4],
        count,
        KV_HEADS=kv_heads,
        D=k.shape[3],
        BC=rows_at_once,
        BD=padded,
    )


def _padded(dim: int) -> int:
    return max(16, next_power_of_2(dim))  # tensor cores take no less
