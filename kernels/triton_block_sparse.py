"""Block-sparse attention in Triton: FlashAttention's loop over listed tiles.

Every query head has its own lists, so a tile of rows is of one head. Only the tiles on the diagonal
need a mask: listed blocks are before the queries, and complete.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .listed_blocks import SKIPPING_ROWS, ListedBlocks
from .strides import cdiv, common_alignment, in_units, row_strides, with_contiguous_rows
from .tiles import Tile, tile_of
from .triton_attention_tiles import (
    LOG2_E,
    attend_tile,
    begin_softmax,
    head_offset,
    load_queries,
    load_tile,
    recompute_rows,
    row_offset,
    split_scale,
    store_rows,
)
from .triton_specialization import hide, reveal


def choose_tile(q: Tensor, blocks: ListedBlocks, skips: bool = False) -> Tile:
    """Choose the tile that a program computes at a time, a block or a part of one.

    Args:
        skips: whether values of a block are left out by the scores of all of it.
    """
    tile = tile_of("many", blocks.query_block, q.shape[3], q.element_size(), q.device)
    return replace(
        tile,
        rows=min(tile.rows, blocks.query_block),
        keys=blocks.key_block if skips else min(tile.keys, blocks.key_block),
    )


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: ListedBlocks,
    scale: float,
    *,
    skip_below: float | None = None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.block_sparse_attention` does, in one launch."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    batch, heads, tokens, dim = q.shape
    num_query_blocks, num_key_blocks = blocks.indices.shape[2:]
    skips = skip_below is not None
    tile = choose_tile(q, blocks, skips)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    q_strides = row_strides(q)
    k_strides = row_strides(k)
    v_strides = row_strides(v)
    out_strides = row_strides(out)
    align = common_alignment(
        q.element_size(),
        [*q_strides, *k_strides, *v_strides, *out_strides],
    )
    block_sparse_kernel[(cdiv(tokens, tile.rows), batch * heads)](
        p_q=q,
        p_k=k,
        p_v=v,
        p_out=out,
        p_lse=lse,
        p_counts=blocks.counts,
        p_indices=blocks.indices,
        q_strides=hide(*in_units(q_strides, align)),
        k_strides=hide(*in_units(k_strides, align)),
        v_strides=hide(*in_units(v_strides, align)),
        out_strides=hide(*in_units(out_strides, align)),
        scale=scale,
        skip_below=0.0 if skip_below is None else skip_below,
        num_tokens=tokens,
        num_query_blocks=num_query_blocks,
        num_key_blocks=num_key_blocks,
        HEADS=heads,
        GROUP=heads // k.shape[1],
        D=dim,
        BR=tile.rows,
        BT=tile.keys,
        BD=tile.dim,
        ALIGN=align,
        QUERY_BLOCK=blocks.query_block,
        KEY_BLOCK=blocks.key_block,
        SKIPS=skips,
        SKIPPING_ROWS=SKIPPING_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


@triton.jit
def attend_or_skip(
    b_acc,
    b_max,
    b_sum,
    b_q,
    p_k,
    p_v,
    o_k,
    o_v,
    m_r,
    scale,
    skip_below,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    SKIPPING_ROWS: tl.constexpr,
):
    """Add a tile of keys that all rows see to the online softmax, without values that weigh little.

    Rows decide SKIPPING_ROWS at a time; values that none of the tile needs are not read. The
    arguments are those of ``attend_tile``, ``m_r [BR]`` for the rows that there are, and
    ``skip_below`` in units of log2.
    """
    # [BT, BD]
    b_k = load_tile(p_k, o_k, None, False, D, BD)
    # [BR, BT]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    # [BR]
    b_tile_max = tl.max(b_s, axis=1)
    b_new_max = tl.maximum(b_max, b_tile_max)
    # [BR, BT]
    b_p = tl.exp2(b_s * scale - (b_new_max * scale)[:, None])
    # [BR]
    b_decay = tl.exp2((b_max - b_new_max) * scale)
    # Rows behind the last token do not count.
    b_distance = tl.where(m_r, (b_tile_max - b_new_max) * scale, float("-inf"))
    b_distance = tl.reshape(b_distance, [BR // SKIPPING_ROWS, SKIPPING_ROWS])
    # [BR / SKIPPING_ROWS]
    m_needed = tl.max(b_distance, axis=1) >= skip_below
    b_acc = b_acc * b_decay[:, None]
    if tl.max(m_needed.to(tl.int32), axis=0) > 0:
        m_rows = tl.broadcast_to(m_needed[:, None], [BR // SKIPPING_ROWS, SKIPPING_ROWS])
        # [BR]
        m_rows = tl.reshape(m_rows, [BR])
        # [BT, BD]
        b_v = load_tile(p_v, o_v, None, False, D, BD)
        b_w = tl.where(m_rows[:, None], b_p, 0.0)
        b_acc = tl.dot(b_w.to(b_v.dtype), b_v, b_acc, input_precision="tf32x3")
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_p, axis=1)


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
    skip_below,
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
    SKIPS: tl.constexpr,
    SKIPPING_ROWS: tl.constexpr,
):
    """One program attends from a tile of one head's rows to their listed blocks and the diagonal.

    Later rows see more: they come first, so that no long program begins when the others end.
    Strides, in units of ALIGN elements, are hidden by ``hide``.
    """
    TILES_PER_BLOCK: tl.constexpr = KEY_BLOCK // BT
    i_r = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // HEADS
    i_h = i_bh % HEADS
    first_row = i_r * BR
    i_block = first_row // QUERY_BLOCK
    # [BR]
    o_s = first_row + tl.arange(0, BR)
    m_r = o_s < num_tokens
    # [BR, BD]
    sign, scale = split_scale(scale)
    b_q = load_queries(p_q, row_offset(i_b, i_h, o_s, q_strides) * ALIGN, sign, m_r, D, BD)
    p_k += head_offset(i_b, i_h // GROUP, k_strides[0], k_strides[1]) * ALIGN
    p_v += head_offset(i_b, i_h // GROUP, v_strides[0], v_strides[1]) * ALIGN
    k_row = reveal(k_strides[2])
    v_row = reveal(v_strides[2])
    b_acc, b_max, b_sum = begin_softmax(BR, BD)
    # [BT]
    o_tile = tl.arange(0, BT)
    o_k = o_tile.to(tl.int64) * k_row * ALIGN
    o_v = o_tile.to(tl.int64) * v_row * ALIGN

    # The tiles of listed blocks, which all rows see.
    i_list = i_bh * num_query_blocks + i_block
    count = tl.load(p_counts + i_list)
    p_indices += i_list * num_key_blocks
    for i_t in range(0, count * TILES_PER_BLOCK):
        i_key_block = tl.load(p_indices + i_t // TILES_PER_BLOCK)
        first_key = i_key_block * KEY_BLOCK + i_t % TILES_PER_BLOCK * BT
        k_tile = first_key * k_row.to(tl.int64) * ALIGN
        v_tile = first_key * v_row.to(tl.int64) * ALIGN
        if SKIPS:
            b_acc, b_max, b_sum = attend_or_skip(
                b_acc=b_acc,
                b_max=b_max,
                b_sum=b_sum,
                b_q=b_q,
                p_k=p_k + k_tile,
                p_v=p_v + v_tile,
                o_k=o_k,
                o_v=o_v,
                m_r=m_r,
                scale=scale,
                skip_below=skip_below * LOG2_E,
                D=D,
                BD=BD,
                BR=BR,
                SKIPPING_ROWS=SKIPPING_ROWS,
            )
        else:
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

    # The diagonal: the block's own keys up to these rows.
    stop = tl.minimum(first_row + BR, num_tokens)
    for i_t in range(i_block * QUERY_BLOCK, stop, BT):
        # [BT]
        o_t = i_t + o_tile
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
            m_t=o_t < stop,
            m_seen=o_t[None, :] <= o_s[:, None],
            scale=scale,
            IS_MASKED=True,
            D=D,
            BD=BD,
        )

    # [BR]
    o_s = recompute_rows(first_row, num_tokens, BR)
    m_r = o_s < num_tokens
    o_out = row_offset(i_b, i_h, o_s, out_strides) * ALIGN
    o_lse = i_bh * num_tokens + o_s
    store_rows(p_out, p_lse, o_out, o_lse, b_acc, b_max, b_sum, m_r, scale, D, BD)
