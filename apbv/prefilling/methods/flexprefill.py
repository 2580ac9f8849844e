"""Selects key blocks as FlexPrefill does, by a pattern determined for each query head.

The paper is Lai et al., *FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient
Long-Sequence Inference* (ICLR 2025). Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a
multiple of Hkv), S tokens, D head dimension, n blocks of ``block`` tokens each, of which the last
may be shorter; L last queries, as many as a block has, or all of fewer.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...config import SparseConfig
from ...kernels import block_means, segmented_attention

# Maximum number of scores of the last queries in memory at a time; on a CPU they stay in its
# caches.
_MOST_SCORES = 2**24
_MOST_SCORES_ON_CPU = 2**20


def flexprefill_blocks(
    q: Tensor, k: Tensor, scale: float, config: SparseConfig, backend: str
) -> Tensor:
    """Choose blocks as FlexPrefill does: by the last queries' attention, or by estimates.

    The last ``config.block_size`` queries stand for their head. Their attention to each block of
    keys is computed, and once more estimated from means of queries and keys. Where both are alike
    (the square root of their Jensen-Shannon divergence is below ``config.divergence``; Algorithm 2)
    the head is query-aware, and estimates are believed: of all pairs of blocks the highest are
    chosen, as long as together they hold no more than ``config.share`` of what all estimates hold
    (Algorithm 4). The other heads' pattern is vertical-slash (Algorithm 3): of the last queries'
    attention to columns of tokens, t columns hold no more than ``config.share``, and ⌊(t + 1) /
    block⌋ + 1 columns of blocks are chosen; so are diagonals. These have the highest sums. The
    first column and the diagonal itself come first; of both there are, in every head, at least
    ``config.min_blocks``. Of equal columns the earlier is taken, of equal diagonals the nearer one.

    All this is the rule of the released code, which counts a diagonal of tokens to one of the two
    diagonals of blocks that it crosses. Its columns are counted in 128 tokens, whatever the size of
    its blocks; here in blocks. Where a block gets no attention at all the divergence is NaN there,
    and the head vertical-slash; here nothing is added for that block.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, S, D]``, of the same tokens.
        scale: the factor of q·k.
        config: the settings that are named above.
        backend: what computes means, and attention; see :mod:`apbv.kernels.backends`.

    Returns:
        bool ``[B, Hq, n, n]``, for each block of queries the blocks of keys; what it says of those
        that are not before the queries is of no account.
    """
    block = config.block_size
    last = q[:, :, -block:]
    padding = -q.shape[2] % block
    columns, diagonals = _line_shares(last, k, scale, backend)
    in_columns = functional.pad(columns, (0, padding)).unflatten(2, (-1, block)).sum(dim=3)
    in_diagonals = functional.pad(diagonals, (0, padding)).unflatten(2, (-1, block)).sum(dim=3)
    queries = block_means(q, block, backend=backend)[0]
    keys = block_means(k, block, backend=backend)[0]
    last_mean = last.mean(dim=2, keepdim=True, dtype=queries.dtype)
    estimated = _scores(last_mean, keys, scale).softmax(dim=-1)[:, :, 0]
    is_aware = _divergence(estimated, in_columns).sqrt() < config.divergence

    columns = _best_lines(columns, in_columns, is_aware, config)
    # From here on the nearest first.
    diagonals = _best_lines(diagonals, in_diagonals.flip(2), is_aware, config)
    places = torch.arange(keys.shape[2], device=q.device)
    behind = places[:, None] - places  # distance of a block of keys before one of queries
    lines = columns[:, :, None] | diagonals[:, :, behind.clamp_min(0)]

    shares = (
        _scores(queries, keys, scale)
        .masked_fill(behind < 0, float("-inf"))
        .softmax(dim=-1)
        .flatten(2)
    )
    share, order = shares.sort(dim=-1, descending=True, stable=True)
    chosen = share.cumsum(dim=-1) <= config.share * len(places)
    highest = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, chosen)
    return lines | highest.view(lines.shape) & is_aware[..., None, None]


def _best_lines(
    of_tokens: Tensor, of_blocks: Tensor, is_aware: Tensor, config: SparseConfig
) -> Tensor:
    """Choose lines of blocks, bool ``[B, Hq, n]``: the first, and the others with the highest sums.

    Args:
        of_tokens: ``[B, Hq, S]``, the shares of lines of tokens, which say how many lines of
            blocks.
        of_blocks: ``[B, Hq, n]``.
        is_aware: ``[B, Hq]``, in which heads they are as few as there may be.
    """
    cumulative = of_tokens.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    num_tokens = (cumulative <= config.share).sum(dim=-1)
    number = (num_tokens + 1) // config.block_size + 1
    number = number.masked_fill(is_aware, 0).clamp_min(config.min_blocks)
    of_blocks = of_blocks.clone()
    of_blocks[..., 0] = float("inf")
    rank = of_blocks.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return rank < number[..., None]


def _line_shares(q: Tensor, k: Tensor, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """Compute the shares of the last queries' attention in columns and diagonals of tokens.

    Args:
        q: ``[B, Hq, L, D]``, the last queries.
        k: ``[B, Hkv, S, D]``.
        scale: the factor of q·k.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        columns ``[B, Hq, S]``, from the first key on, and diagonals ``[B, Hq, S]``, from the
        farthest to that of queries and their own keys, both in fp32 (fp64 for fp64 input); each add
        up to 1.
    """
    rows = q.shape[2]
    tokens = k.shape[2]
    _, lse = segmented_attention(q, [(k, k)], scale, causal_last=True, backend=backend)
    lse = lse[..., None].flip(2)
    # Row by row the diagonals begin one place further on.
    q = q.to(lse.dtype).flip(2)
    places = torch.arange(tokens, device=q.device)
    most = _MOST_SCORES_ON_CPU if q.device.type == "cpu" else _MOST_SCORES
    at_once = max(rows, most // (q.shape[0] * q.shape[1] * rows))
    columns = lse.new_zeros(*q.shape[:2], tokens)
    diagonals = lse.new_zeros(*q.shape[:2], tokens + rows)
    for start in range(0, tokens, at_once):
        here = places[start : start + at_once]
        scores = _scores(q, k[:, :, start : start + at_once].to(q.dtype), scale).sub_(lse)
        if start + len(here) > tokens - rows:  # some are behind some of the queries
            scores.masked_fill_(here > places[tokens - rows :].flip(0)[:, None], float("-inf"))
        scores.exp_()
        columns[..., start : start + len(here)] = scores.sum(dim=2)
        # Padded by their number and read in rows that are one shorter, every row is one place
        # further on.
        shifted = functional.pad(scores, (0, rows)).flatten(2)[..., :-rows].unflatten(2, (rows, -1))
        diagonals[..., start : start + shifted.shape[3]] += shifted.sum(dim=2)
    return columns / rows, diagonals[..., :tokens] / rows


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence, in nats, of distributions along the last dimension."""
    mean = (first + second) / 2
    sides = torch.special.entr(first) + torch.special.entr(second)
    return (torch.special.entr(mean) - sides / 2).sum(dim=-1).clamp_min(0)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Multiply queries ``[B, Hq, R, D]`` with their heads' keys ``[B, Hkv, C, D]``.

    Returns:
        ``[B, Hq, R, C]``.
    """
    of_head = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (of_head @ k.transpose(2, 3)).view(*q.shape[:3], k.shape[2])
