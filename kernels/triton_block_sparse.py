"""Block-sparse attention in Triton: FlashAttention's loop over listed tiles.

Every query head has its own lists, so a tile of rows is of one head. Only the tiles on the diagonal
need a mask: listed blocks are before the queries, and complete.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import ListedBlocks, alignment, cdiv, in_rows, row_strides
from .tiles import Tile, tile_of
from .triton_attention_kernels import (
    _attend_tile,
    _factors,
    _head_offset,
    _load_queries,
    _nothing_seen,
    _row_offset,
    _rows_again,
    _store_rows,
)
from .triton_merging import plain, veiled


def tiles(q: Tensor, blocks: ListedBlocks) -> Tile:
    """Choose the tiles that a program computes at a time, each of them a block or a part of one."""
    block = tile_of("many", blocks.query_block, q.shape[3], q.element_size(), q.device)
    return replace(
        block, rows=min(block.rows, blocks.query_block), keys=min(block.keys, blocks.key_block)
    )


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: ListedBlocks, scale: float, *, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.block_sparse_attention` does, in one launch."""
    q = in_rows(q)
    k = in_rows(k)
    v = in_rows(v)
    batch, heads, tokens, dim = q.shape
    tile = tiles(q, blocks)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    strides = [row_strides(states) for states in (q, k, v, out)]
    align = alignment(q.element_size(), [stride for own in strides for stride in own])
    block_sparse_kernel[(cdiv(tokens, tile.rows), batch * heads)](
        q,
        k,
        v,
        out,
        lse,
        blocks.counts,
        blocks.indices,
        *(veiled(*(stride // align for stride in own)) for own in strides),
        scale,
        tokens,
        *blocks.indices.shape[2:],
        HEADS=heads,
        GROUP=heads // k.shape[1],
        D=dim,
        BR=tile.rows,
        BT=tile.keys,
        BD=tile.dim,
        ALIGN=align,
        QUERY_BLOCK=blocks.query_block,
        KEY_BLOCK=blocks.key_block,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


@triton.jit(do_not_specialize=["num_tokens", "num_query_blocks", "num_key_blocks"])
def block_sparse_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_counts,
    p_indices,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    scale,
    num_tokens,
    num_query_blocks,
    num_key_blocks,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    ALIGN: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """One program attends from a tile of one head's rows to the blocks listed for them, then to the
    diagonal.

    Later rows see more: they come first, so that no long program begins when the others end.
    """
    i_r = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // HEADS
    i_h = i_bh % HEADS
    first_row = i_r * BR
    i_block = first_row // QUERY_BLOCK
    o_s = first_row + tl.arange(0, BR)
    m_r = o_s < num_tokens
    sign, scale = _factors(scale)
    b_q = _load_queries(p_q, _row_offset(i_b, i_h, o_s, q_strides) * ALIGN, sign, m_r, D, BD)
    p_k += _head_offset(i_b, i_h // GROUP, k_strides[0], k_strides[1]) * ALIGN
    p_v += _head_offset(i_b, i_h // GROUP, v_strides[0], v_strides[1]) * ALIGN
    k_row = plain(k_strides[2])
    v_row = plain(v_strides[2])

    b_acc, b_max, b_sum = _nothing_seen(BR, BD)
    o_tile = tl.arange(0, BT)
    o_k = o_tile.to(tl.int64) * k_row * ALIGN
    o_v = o_tile.to(tl.int64) * v_row * ALIGN
    i_list = i_bh * num_query_blocks + i_block
    count = tl.load(p_counts + i_list)
    p_indices += i_list * num_key_blocks
    for i_t in range(0, count * (KEY_BLOCK // BT)):
        first = (
            tl.load(p_indices + i_t // (KEY_BLOCK // BT)) * KEY_BLOCK + i_t % (KEY_BLOCK // BT) * BT
        )
        k_tile = first * k_row.to(tl.int64) * ALIGN
        v_tile = first * v_row.to(tl.int64) * ALIGN
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
    stop = tl.minimum(first_row + BR, num_tokens)
    for i_t in range(i_block * QUERY_BLOCK, stop, BT):
        o_t = i_t + o_tile
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
            o_t < stop,
            o_t[None, :] <= o_s[:, None],
            scale,
            True,
            True,
            D,
            BD,
        )
    o_s = _rows_again(first_row, num_tokens, BR)
    m_r = o_s < num_tokens
    _store_rows(
        p_out,
        p_lse,
        _row_offset(i_b, i_h, o_s, out_strides) * ALIGN,
        i_bh * num_tokens + o_s,
        b_acc,
        b_max,
        b_sum,
        m_r,
        scale,
        D,
        BD,
    )
