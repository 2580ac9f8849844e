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
from .torch_block_scores import mean_of_groups, sum_tiles

_ROWS_AT_ONCE = 32  # of block_means, whose sums are kept in registers
_NUM_STAGES = 3
_NARROWEST_TILE = 16  # of tensor cores
_SMALLEST_NORM = tl.constexpr(1e-12)  # which torch.nn.functional.normalize divides by at least


def antidiagonal_scores(q: Tensor, k: Tensor, scale: float, stride: int, block: int) -> Tensor:
    """Score blocks as :func:`apbv.kernels.antidiagonal_scores` does, in two launches."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    batch, heads, tokens, dim = q.shape
    group = heads // k.shape[1]
    num_groups = cdiv(tokens, stride)
    groups_per_block = block // stride

    # Tiles of groups; fp32 products take more registers.
    tile = 64
    num_warps = 8
    if q.dtype == torch.float32:
        tile = 32
        num_warps = 4
    padded_dim = max(_NARROWEST_TILE, next_power_of_2(dim))
    # A part is a tile's portion of a block: parts are summed up afterwards. Tiles are powers of
    # two, so a part is at most the highest power of two that divides a block.
    groups_per_part = min(groups_per_block & -groups_per_block, tile)
    num_parts = cdiv(num_groups, groups_per_part)

    grid = (cdiv(num_groups, tile), batch * heads)
    lse = torch.empty(batch * heads, num_groups, dtype=torch.float32, device=q.device)
    antidiagonal_lse_kernel[grid](
        p_q=q,
        p_k=k,
        p_lse=lse,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        scale=scale / stride,
        num_groups=num_groups,
        num_tokens=tokens,
        HEADS=heads,
        GROUP=group,
        STRIDE=stride,
        D=dim,
        BG=tile,
        BD=padded_dim,
        num_warps=num_warps,
        num_stages=_NUM_STAGES,
    )
    sums = torch.zeros(batch * heads, num_parts, num_parts, dtype=torch.float32, device=q.device)
    antidiagonal_sum_kernel[grid](
        p_q=q,
        p_k=k,
        p_lse=lse,
        p_out=sums,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        scale=scale / stride,
        num_groups=num_groups,
        num_tokens=tokens,
        num_parts=num_parts,
        HEADS=heads,
        GROUP=group,
        STRIDE=stride,
        D=dim,
        BG=tile,
        BD=padded_dim,
        PART=groups_per_part,
        num_warps=num_warps,
        num_stages=_NUM_STAGES,
    )

    # Parts to blocks.
    sums = sums.view(batch, heads, num_parts, num_parts)
    parts_per_block = groups_per_block // groups_per_part
    if parts_per_block > 1:
        sums = sum_tiles(sums, parts_per_block)
    return mean_of_groups(sums, num_groups, groups_per_block)


def block_means(
    states: Tensor,
    block: int,
    *,
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute means and similarities as :func:`apbv.kernels.block_means` does, in one pass."""
    states = with_contiguous_rows(states)
    batch, heads, tokens, dim = states.shape
    blocks = cdiv(tokens, block)
    means = torch.empty(batch, heads, blocks, dim, dtype=torch.float32, device=states.device)
    similarities = torch.empty(batch, heads, blocks, dtype=torch.float32, device=states.device)
    block_means_kernel[(blocks, batch * heads)](
        p_states=states,
        p_center=states if center is None else center.contiguous(),  # not read if there is none
        p_means=means,
        p_similarities=similarities,
        strides=states.stride()[:3],
        num_tokens=tokens,
        block=block,
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
    """Sum up q·k along the antidiagonals of BG x BG squares.

    The sum is -inf where the keys are after the queries, or behind the last group.
    """
    # [BG]
    o_i = i_i + tl.arange(0, BG)
    o_j = i_j + tl.arange(0, BG)
    # [BD]
    o_d = tl.arange(0, BD)
    # [BG, BG]
    b_s = tl.zeros([BG, BG], tl.float32)
    for i in range(STRIDE):
        o_q = o_i * STRIDE + (STRIDE - 1 - i)
        o_k = o_j * STRIDE + i
        m_q = (o_q < num_tokens)[:, None] & (o_d < D)[None, :]
        m_k = (o_k < num_tokens)[:, None] & (o_d < D)[None, :]
        # [BG, BD]
        b_q = tl.load(p_q + (o_q.to(tl.int64) * q_row)[:, None] + o_d[None, :], mask=m_q, other=0.0)
        b_k = tl.load(p_k + (o_k.to(tl.int64) * k_row)[:, None] + o_d[None, :], mask=m_k, other=0.0)
        # [BG, BG]
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="tf32x3")
    m_seen = (o_j[None, :] <= o_i[:, None]) & (o_j < num_groups)[None, :]
    return tl.where(m_seen, b_s, float("-inf"))


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
    # [BG]
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
        b_decay = tl.exp(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(tl.exp(b_s - b_new_max[:, None]), axis=1)
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
    """One program sums the shares of BG groups of one head's queries.

    It sums them over squares of PART x PART groups.
    """
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
        # [BG, BG]
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
        p_square = p_out + (o_part.to(tl.int64) * num_parts)[:, None] + o_key[None, :]
        tl.store(p_square, b_out, mask=m_out)


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
    """One program sums up a block's rows and their unit vectors.

    The squared length of the mean unit vector is the mean cosine.
    """
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
        p_rows = p_states + (o_r.to(tl.int64) * strides[2])[:, None] + o_d[None, :]
        b_rows = tl.load(p_rows, mask=m_rows, other=0.0).to(tl.float32)
        b_rows = tl.where(m_rows, b_rows - b_center[None, :], 0.0)
        b_norm = tl.sqrt(tl.sum(b_rows * b_rows, axis=1))
        b_mean += tl.sum(b_rows, axis=0)
        b_unit += tl.sum(b_rows / tl.maximum(b_norm, _SMALLEST_NORM)[:, None], axis=0)
    count = (stop - first).to(tl.float32)
    b_unit = b_unit / count
    i_out = i_bh * tl.num_programs(0) + i_n
    tl.store(p_means + i_out * D + o_d, b_mean / count, mask=o_d < D)
    tl.store(p_similarities + i_out, tl.sum(b_unit * b_unit))
