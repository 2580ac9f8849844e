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

_SCORES_AT_ONCE = 8192  # of _select_kernel, in registers
_NUMBERS_AT_ONCE = 4096  # of K, and as many of V, that a program of _gather_kernel copies
_NARROWEST_TILE = 16  # of tensor cores

# Scores are ordered by their bits: the lowest of these integers, and what masks off the sign.
_LOWEST = tl.constexpr(-0x80000000)
_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
_NUM_BITS = tl.constexpr(32)
# Two counts of one tile in an integer: a tile has fewer than 2 ** 16 scores.
_COUNT_BITS = tl.constexpr(16)
_COUNT_MASK = tl.constexpr(0xFFFF)


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
    p_rows = p_k + (o_t * k_strides[2])[:, None] + o_d[None, :]
    b_k = tl.load(p_rows, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    # [BT]
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
    """Load scores as integers in the same order.

    NaN counts as -inf; what is behind the last key is lower than all.
    """
    # [BT]
    b_score = tl.load(p_scores + o_t, mask=o_t < num_keys, other=0.0).to(tl.float32)
    b_score = tl.where(b_score == b_score, b_score, float("-inf"))
    b_score = tl.where(b_score == 0.0, 0.0, b_score)  # -0 equals 0
    b_bits = b_score.to(tl.int32, bitcast=True)
    # The bits of a negative number fall as it rises.
    b_bits = tl.where(b_bits < 0, b_bits ^ _ALL_BUT_SIGN, b_bits)
    return tl.where(o_t < num_keys, b_bits, _LOWEST)


@triton.jit(do_not_specialize=["num_keys", "count"])
def _select_kernel(
    p_scores,
    p_indices,
    num_keys,
    count,
    BT: tl.constexpr,
):
    """One program lists the places of one KV head's ``count`` highest scores, in order.

    Of equal scores it takes the first.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    p_scores += i_bh * num_keys
    p_indices += i_bh * count
    o_tile = tl.arange(0, BT)
    # [BT]: the first tile stays in registers
    b_first = _load_ordered(p_scores, o_tile, num_keys)

    # The lowest score to keep, bit by bit: the highest integer that ``count`` scores reach.
    lowest = tl.full((), _LOWEST, tl.int32)
    for i in range(0, _NUM_BITS):
        higher = lowest ^ (tl.full((), 1, tl.int32) << (_NUM_BITS - 1 - i))
        num_reaching = tl.sum((b_first >= higher).to(tl.int32))
        for i_t in range(BT, num_keys, BT):
            b_bits = _load_ordered(p_scores, i_t + o_tile, num_keys)
            num_reaching += tl.sum((b_bits >= higher).to(tl.int32))
        lowest = tl.where(num_reaching >= count, higher, lowest)

    # How many of the kept scores equal the lowest one.
    num_above = tl.sum((b_first > lowest).to(tl.int32))
    for i_t in range(BT, num_keys, BT):
        b_bits = _load_ordered(p_scores, i_t + o_tile, num_keys)
        num_above += tl.sum((b_bits > lowest).to(tl.int32))
    num_lowest = count - num_above

    # The places, tile by tile, behind those of earlier tiles.
    num_above = 0
    num_equal = 0
    for i_t in range(0, num_keys, BT):
        # [BT]
        o_t = i_t + o_tile
        b_bits = _load_ordered(p_scores, o_t, num_keys)
        m_above = b_bits > lowest
        m_equal = (b_bits == lowest) & (o_t < num_keys)
        # Both counts in one scan.
        b_both = m_above.to(tl.int32) + (m_equal.to(tl.int32) << _COUNT_BITS)
        b_counts = tl.cumsum(b_both, axis=0)
        b_above = num_above + (b_counts & _COUNT_MASK)
        b_equal = num_equal + (b_counts >> _COUNT_BITS)
        m_kept = m_above | (m_equal & (b_equal <= num_lowest))
        p_place = p_indices + b_above + tl.minimum(b_equal, num_lowest) - 1
        tl.store(p_place, o_t.to(tl.int64), mask=m_kept)
        num_above += tl.sum(m_above.to(tl.int32))
        num_equal += tl.sum(m_equal.to(tl.int32))


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
    q_query: Tensor,
    k: Tensor,
    scale: float,
    reduce: str,
    *,
    lse: Tensor | None = None,
) -> Tensor:
    """Score at least one key as :func:`apbv.kernels.kv_importance` does, without pooling."""
    if reduce == "dot":
        # One product of a matrix and a vector for each KV head, which torch computes as well.
        return torch_importance.kv_importance(q_query, k, scale, reduce)
    batch, kv_heads, keys, dim = k.shape
    group = q_query.shape[1] // kv_heads
    q_query = with_contiguous_rows(q_query)
    k = with_contiguous_rows(k)
    importance = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    rows = group * q_query.shape[2]
    # fp32 products run without tensor cores, on whole rows in registers, which spill unless tiles
    # are small.
    tile = tile_of("importance", rows, dim, k.element_size(), k.device)
    if lse is None:
        nothing_masked = q_query.new_empty(q_query.shape[2], 0, dtype=torch.bool)
        _, lse = verify_attention(q_query, k, k, scale, visible=nothing_masked)
    _importance_kernel[(cdiv(keys, tile.keys), batch * kv_heads)](
        p_q=q_query,
        p_k=k,
        p_lse=lse,
        p_out=importance,
        q_strides=q_query.stride()[:3],
        k_strides=k.stride()[:3],
        lse_strides=lse.stride(),
        scale=scale,
        num_rows=rows,
        num_keys=keys,
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
    if scores.dtype == torch.float64:  # whose order the kernel would lose
        return torch_importance.select_topk(scores, k, v, count, out)
    indices = kept_indices(scores, count)
    gather_rows(k, v, indices, out)
    return indices, out


def kept_indices(scores: Tensor, count: int) -> Tensor:
    """List the places of the ``count`` highest scores of each head, ascending.

    Args:
        scores: ``[B, Hkv, T]``.
        count: 1 <= count <= T.

    Returns:
        ``[B, Hkv, count]`` int64.
    """
    batch, kv_heads, keys = scores.shape
    indices = torch.empty(batch, kv_heads, count, dtype=torch.int64, device=scores.device)
    _select_kernel[(batch * kv_heads,)](
        p_scores=scores.contiguous(),
        p_indices=indices,
        num_keys=keys,
        count=count,
        BT=min(_SCORES_AT_ONCE, next_power_of_2(keys)),
        num_warps=16,
    )
    return indices


def gather_rows(k: Tensor, v: Tensor, indices: Tensor, out: Tensor) -> None:
    """Copy rows of k and v to the first places of ``out[0]`` and ``out[1]``.

    Args:
        k, v: ``[B, Hkv, T, D]``.
        indices: int64 ``[B, Hkv, count]``, which rows.
        out: ``[2, B, Hkv, N, D]``.
    """
    batch, kv_heads, count = indices.shape
    dim = k.shape[3]
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    padded_dim = max(_NARROWEST_TILE, next_power_of_2(dim))
    rows_at_once = _NUMBERS_AT_ONCE // padded_dim
    _gather_kernel[(cdiv(count, rows_at_once), batch * kv_heads)](
        p_k=k,
        p_v=v,
        p_indices=indices,
        p_out=out,
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        out_strides=out.stride()[:4],
        count=count,
        KV_HEADS=kv_heads,
        D=dim,
        BC=rows_at_once,
        BD=padded_dim,
    )
