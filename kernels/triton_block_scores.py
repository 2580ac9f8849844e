"""Block scores in Triton.

The scores of groups are never stored: one pass over the keys finds each query group's log-sum-exp,
a second one computes the scores again and sums up the shares of blocks. With a stride s each pass
costs 1/s of the products of queries and keys. Names: a *group* is ``STRIDE`` tokens; strides of
tensors are those of (batch, head, row).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .strides import cdiv, next_power_of_2, with_contiguous_rows
from .torch_block_scores import per_group

_ROWS_AT_ONCE = 32  # of block_means, whose sums are kept in registers


def antidiagonal_scores(q: Tensor, k: Tensor, scale: float, stride: int, block: int) -> Tensor:
    """Score blocks as :func:`apbv.kernels.antidiagonal_scores` does, in two launches."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    batch, heads, tokens, dim = q.shape
    groups = cdiv(tokens, stride)
    of_block = block // stride
    # fp32 products take more registers.
    tile, warps = (32, 4) if q.dtype == torch.float32 else (64, 8)
    # A part is a tile's portion of a block: parts are summed up afterwards. Tiles are powers of
    # two.
    part = min(of_block & -of_block, tile)
    lse = torch.empty(batch * heads, groups, dtype=torch.float32, device=q.device)
    parts = cdiv(groups, part)
    sums = torch.zeros(batch * heads, parts, parts, dtype=torch.float32, device=q.device)
    operands = (q.stride()[:3], k.stride()[:3], scale / stride, groups, tokens)
    constants = {
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "STRIDE": stride,
        "D": dim,
        "BG": tile,
        "BD": max(16, next_power_of_2(dim)),
        "num_warps": warps,
        "num_stages": 3,
    }
    grid = (cdiv(groups, tile), batch * heads)
    antidiagonal_lse_kernel[grid](q, k, lse, *operands, **constants)
    antidiagonal_sum_kernel[grid](q, k, lse, sums, *operands, parts, PART=part, **constants)
    sums = sums.view(batch, heads, parts, parts)
    if part < of_block:
        short = -parts % (of_block // part)
        sums = torch.nn.functional.pad(sums, (0, short, 0, short))
        sums = (
            sums.unflatten(3, (-1, of_block // part))
            .sum(dim=4)
            .unflatten(2, (-1, of_block // part))
            .sum(dim=3)
        )
    return per_group(sums, groups, of_block)


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute means and similarities as :func:`apbv.kernels.block_means` does, in one pass."""
    states = with_contiguous_rows(states)
    batch, heads, tokens, dim = states.shape
    blocks = cdiv(tokens, block)
    means = torch.empty(batch, heads, blocks, dim, dtype=torch.float32, device=states.device)
    similarities = torch.empty(batch, heads, blocks, dtype=torch.float32, device=states.device)
    block_means_kernel[(blocks, batch * heads)](
        states,
        states if center is None else center.contiguous(),
        means,
        similarities,
        states.stride()[:3],
        tokens,
        block,
        HEADS=heads,
        D=dim,
        HAS_CENTER=center is not None,
        BR=_ROWS_AT_ONCE,
        BD=next_power_of_2(dim),
        num_warps=4,
    )
    return means, similarities


@triton.jit
def _antidiagonals(
    p_q,
    p_k,
    i_i,
    i_j,
    q_row,
    k_row,
    num_groups,
    num_tokens,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
):
    """Sum up q·k along the antidiagonals of BG x BG squares; -inf where keys are after the queries,
    or none."""
    o_i = i_i + tl.arange(0, BG)
    o_j = i_j + tl.arange(0, BG)
    o_d = tl.arange(0, BD)
    b_s = tl.zeros([BG, BG], tl.float32)
    for i in range(STRIDE):
        o_q = o_i * STRIDE + (STRIDE - 1 - i)
        o_k = o_j * STRIDE + i
        m_q = (o_q < num_tokens)[:, None] & (o_d < D)[None, :]
        m_k = (o_k < num_tokens)[:, None] & (o_d < D)[None, :]
        # [BG, BD]
        b_q = tl.load(p_q + (o_q.to(tl.int64) * q_row)[:, None] + o_d[None, :], mask=m_q, other=0.0)
        b_k = tl.load(p_k + (o_k.to(tl.int64) * k_row)[:, None] + o_d[None, :], mask=m_k, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="tf32x3")
    return tl.where(
        (o_j[None, :] <= o_i[:, None]) & (o_j < num_groups)[None, :], b_s, float("-inf")
    )


@triton.jit(do_not_specialize=["num_groups", "num_tokens"])
def antidiagonal_lse_kernel(
    p_q,
    p_k,
    p_lse,
    q_strides,
    k_strides,
    scale,
    num_groups,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
):
    """One program sums the exponentials of the scores of BG groups of one head's queries."""
    i_i = tl.program_id(0) * BG
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // HEADS
    i_h = i_bh % HEADS
    p_q += i_b * q_strides[0] + i_h * q_strides[1]
    p_k += i_b * k_strides[0] + (i_h // GROUP) * k_strides[1]
    b_max = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    for i_j in range(0, tl.minimum(i_i + BG, num_groups), BG):
        # [BG, BG]; every group sees the first one, so that the maximum is never that of nothing
        b_s = scale * _antidiagonals(
            p_q,
            p_k,
            i_i,
            i_j,
            q_strides[2],
            k_strides[2],
            num_groups,
            num_tokens,
            STRIDE,
            D,
            BG,
            BD,
        )
        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_sum = b_sum * tl.exp(b_max - b_new_max) + tl.sum(tl.exp(b_s - b_new_max[:, None]), axis=1)
        b_max = b_new_max
    o_i = i_i + tl.arange(0, BG)
    tl.store(p_lse + i_bh * num_groups + o_i, b_max + tl.log(b_sum), mask=o_i < num_groups)


@triton.jit(do_not_specialize=["num_groups", "num_tokens", "num_parts"])
def antidiagonal_sum_kernel(
    p_q,
    p_k,
    p_lse,
    p_out,
    q_strides,
    k_strides,
    scale,
    num_groups,
    num_tokens,
    num_parts,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    PART: tl.constexpr,
):
    """One program sums the shares of BG groups of one head's queries over squares of PART x PART
    groups."""
    i_i = tl.program_id(0) * BG
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // HEADS
    i_h = i_bh % HEADS
    p_q += i_b * q_strides[0] + i_h * q_strides[1]
    p_k += i_b * k_strides[0] + (i_h // GROUP) * k_strides[1]
    o_i = i_i + tl.arange(0, BG)
    # [BG]; a group that is not there has no share of anything
    b_lse = tl.load(p_lse + i_bh * num_groups + o_i, mask=o_i < num_groups, other=float("inf"))
    o_part = i_i // PART + tl.arange(0, BG // PART)
    p_out += i_bh * num_parts * num_parts
    for i_j in range(0, tl.minimum(i_i + BG, num_groups), BG):
        b_s = scale * _antidiagonals(
            p_q,
            p_k,
            i_i,
            i_j,
            q_strides[2],
            k_strides[2],
            num_groups,
            num_tokens,
            STRIDE,
            D,
            BG,
            BD,
        )
        b_p = tl.exp(b_s - b_lse[:, None])
        # [BG // PART, BG // PART]
        b_out = tl.sum(tl.reshape(b_p, [BG, BG // PART, PART]), axis=2)
        b_out = tl.sum(tl.reshape(b_out, [BG // PART, PART, BG // PART]), axis=1)
        o_key = i_j // PART + tl.arange(0, BG // PART)
        m_out = (o_part < num_parts)[:, None] & (o_key < num_parts)[None, :]
        tl.store(
            p_out + (o_part.to(tl.int64) * num_parts)[:, None] + o_key[None, :], b_out, mask=m_out
        )


@triton.jit(do_not_specialize=["num_tokens", "block"])
def block_means_kernel(
    p_states,
    p_center,
    p_means,
    p_similarities,
    strides,
    num_tokens,
    block,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """One program sums up a block's rows, and their unit vectors, whose mean's square is the mean
    cosine."""
    i_n = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    p_states += (i_bh // HEADS) * strides[0] + (i_bh % HEADS) * strides[1]
    o_d = tl.arange(0, BD)
    b_center = tl.zeros([BD], tl.float32)
    if HAS_CENTER:
        b_center = tl.load(p_center + i_bh * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    first = i_n * block
    stop = tl.minimum(first + block, num_tokens)
    b_mean = tl.zeros([BD], tl.float32)
    b_unit = tl.zeros([BD], tl.float32)
    for i_r in range(first, stop, BR):
        o_r = i_r + tl.arange(0, BR)
        m_rows = (o_r < stop)[:, None] & (o_d < D)[None, :]
        # [BR, BD]
        b_rows = tl.load(
            p_states + (o_r.to(tl.int64) * strides[2])[:, None] + o_d[None, :],
            mask=m_rows,
            other=0.0,
        ).to(tl.float32)
        b_rows = tl.where(m_rows, b_rows - b_center[None, :], 0.0)
        b_norm = tl.sqrt(tl.sum(b_rows * b_rows, axis=1))
        b_mean += tl.sum(b_rows, axis=0)
        b_unit += tl.sum(b_rows / tl.maximum(b_norm, 1e-12)[:, None], axis=0)
    count = (stop - first).to(tl.float32)
    b_unit = b_unit / count
    i_out = i_bh * tl.num_programs(0) + i_n
    tl.store(p_means + i_out * D + o_d, b_mean / count, mask=o_d < D)
    tl.store(p_similarities + i_out, tl.sum(b_unit * b_unit))
