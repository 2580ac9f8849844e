"""Block-sparse attention with torch: blocks that are not listed are not computed.

The blocks on the diagonal are small triangles, all of which one call computes. Before them, blocks
of queries with equally many listed blocks are computed together, from copies of the keys and values
that they list.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .library_attention import Attend, attend_with
from .listed_blocks import SKIPPING_ROWS, ListedBlocks
from .strides import with_contiguous_rows
from .torch_merging import merge_finite

# Numbers of K, and as many of V, that are copied at a time: with their scores they stay near the
# processor.
_MOST_COPIED = 2**20


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
    """Attend as :func:`apbv.kernels.block_sparse_attention` does."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    attend = attend_with("torch", q, k)
    diagonal_out, diagonal_lse = _attend_diagonal(q, k, v, blocks.query_block, scale, attend)
    listed = _attend_listed(q, k, v, blocks, scale, skip_below)
    if listed is None:
        return out.copy_(diagonal_out), diagonal_lse
    listed_out, listed_lse = listed
    return merge_finite([diagonal_out, listed_out], [diagonal_lse, listed_lse], out=out)


def _attend_diagonal(
    q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attend from every block of queries to its own keys, causally."""
    batch, _, tokens, _ = q.shape
    whole = tokens // rows * rows
    outs = []
    lses = []
    # Whole blocks, as a batch.
    if whole > 0:
        cut_q = _cut(q[:, :, :whole], rows)
        cut_k = _cut(k[:, :, :whole], rows)
        cut_v = _cut(v[:, :, :whole], rows)
        out, lse = attend(cut_q, cut_k, cut_v, scale, True)
        outs.append(_uncut(out, batch))
        lses.append(_uncut(lse, batch))
    # The shorter block at the end.
    if whole < tokens:
        is_causal = tokens - whole > 1
        out, lse = attend(q[:, :, whole:], k[:, :, whole:], v[:, :, whole:], scale, is_causal)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _cut(states: Tensor, rows: int) -> Tensor:
    """Turn ``[B, H, n * rows, D]`` into ``[B * n, H, rows, D]``; a view where B is 1."""
    return states.unflatten(2, (-1, rows)).transpose(1, 2).flatten(0, 1)


def _uncut(results: Tensor, batch: int) -> Tensor:
    """Turn ``[B * n, H, rows, ...]`` into ``[B, H, n * rows, ...]``."""
    return results.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _attend_listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: ListedBlocks,
    scale: float,
    skip_below: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Attend from every block of queries to the blocks that it lists; None if none lists any."""
    counts = blocks.counts.flatten().cpu()
    if not counts.any():
        return None
    attend = attend_with("torch", q[:, :1], k[:, :1])
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    query_block = blocks.query_block
    num_blocks = blocks.counts.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = None
    block_rows = torch.arange(query_block, device=q.device)
    block_keys = torch.arange(blocks.key_block, device=q.device)
    # Heads of all batches: [B * H, S, D], and of lists [B * Hq, nq, nk].
    flat_q = q.flatten(0, 1)
    flat_k = k.flatten(0, 1)
    flat_v = v.flatten(0, 1)
    flat_out = out.view(batch * heads, tokens, dim)
    indices = blocks.indices.view(-1, *blocks.indices.shape[2:])
    most_blocks = _MOST_COPIED // (blocks.key_block * dim)
    for which, count in _groups(counts.view(-1, num_blocks), tokens, query_block, most_blocks):
        # N blocks of queries, with ``count`` listed blocks each. [N]
        i_head, i_block = which.to(q.device).unbind(dim=1)
        i_kv_head = i_head // heads * kv_heads + i_head % heads // group
        num_rows = min(query_block, tokens - int(which[0, 1]) * query_block)
        # [N, num_rows]
        o_q = i_block[:, None] * query_block + block_rows[:num_rows]
        # [N, count * key_block]
        listed = indices[i_head, i_block, :count]
        o_k = (listed[..., None] * blocks.key_block + block_keys).flatten(1)
        # [N, 1, rows, D]
        queries = flat_q[i_head[:, None], o_q][:, None]
        keys = flat_k[i_kv_head[:, None], o_k][:, None]
        values = flat_v[i_kv_head[:, None], o_k][:, None]
        if skip_below is None:
            part, part_lse = attend(queries, keys, values, scale, False)
        else:
            part, part_lse = _attend_skipping(queries, keys, values, scale, count, skip_below)
        if lse is None:
            lse = part_lse.new_full((batch * heads, tokens), float("-inf"))
        flat_out[i_head[:, None], o_q] = part[:, 0].to(out.dtype)
        lse[i_head[:, None], o_q] = part_lse[:, 0]
    assert lse is not None, "there are blocks of queries"
    return out, lse.view(batch, heads, tokens)


def _attend_skipping(
    q: Tensor, k: Tensor, v: Tensor, scale: float, num_blocks: int, skip_below: float
) -> tuple[Tensor, Tensor]:
    """Attend to listed blocks, without the values of those that weigh little.

    Args:
        q: ``[N, 1, rows, D]``.
        k, v: ``[N, 1, T, D]``, of blocks of equally many keys, one after the other.
        num_blocks: how many blocks these are.
        skip_below: λ.

    Returns:
        out ``[N, 1, rows, D]`` and lse ``[N, 1, rows]``.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    # [N, 1, rows, T]
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale
    lse = scores.logsumexp(dim=-1)
    # [N, 1, rows, blocks]: how far a block's highest score is below the highest so far
    highest = scores.unflatten(-1, (num_blocks, -1)).amax(dim=-1)
    distances = highest - highest.cummax(dim=-1).values
    # [N, 1, tiles, blocks]: of the rows that decide together, the nearest; missing rows do not
    # count
    num_missing = -q.shape[2] % SKIPPING_ROWS
    padded = functional.pad(distances, (0, 0, 0, num_missing), value=float("-inf"))
    nearest = padded.unflatten(2, (-1, SKIPPING_ROWS)).amax(dim=3)
    is_skipped = (nearest < skip_below).repeat_interleave(SKIPPING_ROWS, dim=2)
    weights = (scores - lse[..., None]).exp().unflatten(-1, (num_blocks, -1))
    weights = weights.masked_fill(is_skipped[:, :, : q.shape[2], :, None], 0.0).flatten(-2)
    return weights @ v.to(dtype), lse


def _groups(
    counts: Tensor, tokens: int, query_block: int, most_blocks: int
) -> Iterator[tuple[Tensor, int]]:
    """Group blocks of queries with equally many listed blocks and rows.

    Args:
        counts: ``[B * Hq, nq]``, on the CPU.
        tokens: how many there are.
        query_block: rows of a block of queries.
        most_blocks: how many blocks those of a group list together, if it has more than one.

    Yields:
        The blocks of a group, ``[N, 2]`` (head of all batches, block), and how many each lists.
    """
    is_short = torch.zeros_like(counts, dtype=torch.bool)
    if tokens % query_block:
        is_short[:, -1] = True
    # Fewest listed blocks first, and of equally many the whole blocks first.
    for count in counts[counts > 0].unique().tolist():
        for shortness in (False, True):
            is_of_group = (counts == count) & (is_short == shortness)
            for which in is_of_group.nonzero().split(max(1, most_blocks // count)):
                if len(which) > 0:
                    yield which, count
