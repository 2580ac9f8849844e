"""Block-sparse attention with torch: blocks that are not listed are not computed.

The blocks on the diagonal are small triangles, all of which one call computes. Before them, blocks
of queries with equally many listed blocks are computed together, from copies of the keys and values
that they list.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .library_attention import Attend, attend_with
from .listed_blocks import ListedBlocks
from .strides import with_contiguous_rows
from .torch_merging import merge_finite

# Numbers of K, and as many of V, that are copied at a time: with their scores they stay near the
# processor.
_MOST_COPIED = 2**20


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: ListedBlocks, scale: float, *, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`apbv.kernels.block_sparse_attention` does."""
    q = with_contiguous_rows(q)
    k = with_contiguous_rows(k)
    v = with_contiguous_rows(v)
    attend = attend_with("torch", q, k)
    own = _attend_diagonal(q, k, v, blocks.query_block, scale, attend)
    earlier = _attend_listed(q, k, v, blocks, scale)
    if earlier is None:
        return out.copy_(own[0]), own[1]
    return merge_finite(*zip(own, earlier, strict=True), out=out)


def _attend_diagonal(
    q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Attend from every block of queries to its own keys, causally."""
    whole = q.shape[2] // rows * rows
    pieces = []
    if whole:
        cut = (_cut(states[:, :, :whole], rows) for states in (q, k, v))
        o, lse = attend(*cut, scale, True)
        pieces.append(
            tuple(x.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3) for x in (o, lse))
        )
    if whole < q.shape[2]:
        pieces.append(
            attend(*(states[:, :, whole:] for states in (q, k, v)), scale, q.shape[2] - whole > 1)
        )
    if len(pieces) == 1:
        return pieces[0]
    out, lse = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
    return out, lse


def _cut(states: Tensor, rows: int) -> Tensor:
    """Turn ``[B, H, n * rows, D]`` into ``[B * n, H, rows, D]``; a view where B is 1."""
    return states.unflatten(2, (-1, rows)).transpose(1, 2).flatten(0, 1)


def _attend_listed(
    q: Tensor, k: Tensor, v: Tensor, blocks: ListedBlocks, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Attend from every block of queries to the blocks that it lists; None if none lists any."""
    counts = blocks.counts.flatten().cpu()
    if not counts.any():
        return None
    attend = attend_with("torch", q[:, :1], k[:, :1])
    (batch, heads, tokens, dim) = q.shape
    size = blocks.query_block
    group = q.shape[1] // k.shape[1]
    num_blocks = blocks.counts.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = None
    # All blocks of queries, [B * Hq, nq]: where its rows begin, and whose keys it lists.
    rows = torch.arange(size, device=q.device)
    keys = torch.arange(blocks.key_block, device=q.device)
    flat = [states.flatten(0, 1) for states in (q, k, v)]
    targets = out.view(batch * heads, tokens, dim)
    most = _MOST_COPIED // (blocks.key_block * dim)
    for which, count in _groups(counts.view(-1, num_blocks), tokens, blocks.query_block, most):
        sequences, places = which.to(q.device).unbind(dim=1)
        length = min(size, tokens - int(which[0, 1]) * size)
        o_q = places[:, None] * size + rows[:length]
        listed = blocks.indices.view(-1, *blocks.indices.shape[2:])[sequences, places, :count]
        o_k = listed[..., None] * blocks.key_block + keys
        of_kv = (sequences // heads * (heads // group) + sequences % heads // group)[:, None]
        queries = flat[0][sequences[:, None], o_q]
        copied = [states[of_kv, o_k.flatten(1)] for states in flat[1:]]
        part, part_lse = attend(*(states[:, None] for states in (queries, *copied)), scale, False)
        if lse is None:
            lse = part_lse.new_full((batch * heads, tokens), float("-inf"))
        targets[sequences[:, None], o_q] = part[:, 0].to(out.dtype)
        lse[sequences[:, None], o_q] = part_lse[:, 0]
    return out, lse.view(batch, heads, tokens)


def _groups(
    counts: Tensor, tokens: int, query_block: int, most: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield blocks of queries with equally many listed blocks and rows, as ``[N, 2]`` (head of all,
    block).

    Args:
        counts: ``[B * Hq, nq]``, on the CPU.
        most: how many blocks those of a group list together, if it has more than one.
    """
    is_last = torch.zeros_like(counts)
    if tokens % query_block:
        is_last[:, -1] = 1  # of fewer rows than the others
    kinds = 2 * counts + is_last
    for kind in kinds[counts > 0].unique().tolist():
        count = kind // 2
        for which in (kinds == kind).nonzero().split(max(1, most // count)):
            yield which, count
