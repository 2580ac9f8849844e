"""Selects key blocks as FlexPrefill does, by a pattern determined for each query head.

The paper is Lai et al., *FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient
Long-Sequence Inference* (ICLR 2025). Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a
multiple of Hkv), S tokens, D head dimension, n blocks of ``block`` tokens each, of which the last
may be shorter; L last queries, as many as a block has, or all of fewer.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...config import FlexPrefillConfig
from ...kernels import block_means, segmented_attention

# Maximum number of scores of the last queries in memory at a time; on a CPU they stay in its
# caches.
MOST_SCORES = 2**24
MOST_SCORES_ON_CPU = 2**20


def flexprefill_blocks(
    q: Tensor, k: Tensor, scale: float, config: FlexPrefillConfig, backend: str
) -> Tensor:
    """Choose blocks as FlexPrefill does, by the last queries' attention or by estimates.

    The last ``config.block_size`` queries stand for their head. Their attention to each block of
    keys is computed exactly, and estimated from means of queries and keys. A head is query-aware if
    both are alike: if the square root of their Jensen-Shannon divergence is below
    ``config.divergence`` (Algorithm 2).

    In a query-aware head estimates are believed: of all pairs of blocks the highest are chosen, as
    long as together they hold no more than ``config.share`` of the sum of all estimates (Algorithm
    4). The other heads' pattern is vertical-slash (Algorithm 3): if the t strongest columns of
    tokens hold no more than ``config.share`` of the last queries' attention, ⌊(t + 1) / block⌋ + 1
    columns of blocks are chosen, those with the highest sums. Diagonals follow the same rule.

    The first column and the main diagonal are always chosen. Every head has at least
    ``config.min_blocks`` columns and as many diagonals. Of equal columns the earlier is taken, of
    equal diagonals the nearer one.

    This is the rule of the released code, which counts a diagonal of tokens to one of the two
    diagonals of blocks that it crosses. Two things differ: that code counts columns in units of 128
    tokens, whatever the size of its blocks, and this one in blocks; and where a block gets no
    attention at all, the divergence there is NaN, and the head vertical-slash, while here such a
    block adds nothing to the divergence.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, S, D]``, of the same tokens.
        scale: the factor of q·k.
        config: the settings that are named above.
        backend: the backend of block means and attention (:mod:`apbv.kernels.backends`).

    Returns:
        bool ``[B, Hq, n, n]``, for each block of queries the blocks of keys; entries for blocks
        that are not before the queries are ignored.
    """
    # Compute the last queries' attention to columns and diagonals.
    block = config.block_size
    last = q[:, :, -block:]
    padding = -q.shape[2] % block
    columns, diagonals = _line_shares(last, k, scale, backend)
    in_columns = functional.pad(columns, (0, padding)).unflatten(2, (-1, block)).sum(dim=3)
    in_diagonals = functional.pad(diagonals, (0, padding)).unflatten(2, (-1, block)).sum(dim=3)

    # Find the query-aware heads.
    queries, _ = block_means(q, block, backend=backend)
    keys, _ = block_means(k, block, backend=backend)
    last_mean = last.mean(dim=2, keepdim=True, dtype=queries.dtype)
    estimated = _scores(last_mean, keys, scale).softmax(dim=-1)[:, :, 0]
    is_aware = _divergence(estimated, in_columns).sqrt() < config.divergence

    # Choose columns and diagonals. The diagonals are flipped: the main one becomes the first.
    best_columns = _best_lines(columns, in_columns, is_aware, config)
    best_diagonals = _best_lines(diagonals, in_diagonals.flip(2), is_aware, config)
    places = torch.arange(keys.shape[2], device=q.device)
    distance = places[:, None] - places  # of a block of keys before a block of queries
    lines = best_columns[:, :, None] | best_diagonals[:, :, distance.clamp_min(0)]

    # Choose pairs of blocks by their estimates, which add up to 1 in each row.
    estimates = _scores(queries, keys, scale)
    estimates = estimates.masked_fill(distance < 0, float("-inf"))
    estimates = estimates.softmax(dim=-1).flatten(2)
    sorted_estimates, order = estimates.sort(dim=-1, descending=True, stable=True)
    is_high = sorted_estimates.cumsum(dim=-1) <= config.share * len(places)
    is_high = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, is_high)
    return lines | (is_high.view(lines.shape) & is_aware[..., None, None])


def _best_lines(
    token_shares: Tensor, block_shares: Tensor, is_aware: Tensor, config: FlexPrefillConfig
) -> Tensor:
    """Choose lines of blocks: the first one, and of the others the ones with the highest sums.

    A line is a column or a diagonal.

    Args:
        token_shares: ``[B, Hq, S]``, the attention in each line of tokens; it decides how many
            lines of blocks are chosen.
        block_shares: ``[B, Hq, n]``, the attention in each line of blocks; it decides which.
        is_aware: ``[B, Hq]``; query-aware heads get no more than ``config.min_blocks`` lines.

    Returns:
        bool ``[B, Hq, n]``.
    """
    # How many.
    cumulative = token_shares.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    num_tokens = (cumulative <= config.share).sum(dim=-1)
    num_lines = (num_tokens + 1) // config.block_size + 1
    num_lines = num_lines.masked_fill(is_aware, 0).clamp_min(config.min_blocks)

    # Which.
    block_shares = block_shares.clone()
    block_shares[..., 0] = float("inf")
    order = block_shares.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)  # the inverse of this permutation
    return rank < num_lines[..., None]


def _line_shares(q: Tensor, k: Tensor, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """Compute the shares of the last queries' attention in columns and diagonals of tokens.

    Args:
        q: ``[B, Hq, L, D]``, the last queries.
        k: ``[B, Hkv, S, D]``.
        scale: the factor of q·k.
        backend: the backend of attention (:mod:`apbv.kernels.backends`).

    Returns:
        columns ``[B, Hq, S]``, from the first key on, and diagonals ``[B, Hq, S]``, from the
        farthest keys to the queries' own, both in fp32 (fp64 for fp64 input). Columns add up to 1,
        and so do diagonals.
    """
    num_queries = q.shape[2]
    num_tokens = k.shape[2]
    # An lse depends on queries and keys only: the values are arbitrary.
    _, lse = segmented_attention(q, [(k, k)], scale, causal_last=True, backend=backend)
    # The last query comes first. A diagonal that begins in its row at some key then continues in
    # the next row one key earlier.
    lse = lse[..., None].flip(2)
    q = q.to(lse.dtype).flip(2)
    places = torch.arange(num_tokens, device=q.device)
    query_places = places[num_tokens - num_queries :].flip(0)

    # Add up the scores of some keys at a time, to bound the memory.
    most_scores = MOST_SCORES_ON_CPU if q.device.type == "cpu" else MOST_SCORES
    num_heads = q.shape[0] * q.shape[1]
    keys_at_once = max(num_queries, most_scores // (num_heads * num_queries))
    columns = lse.new_zeros(*q.shape[:2], num_tokens)
    diagonals = lse.new_zeros(*q.shape[:2], num_tokens + num_queries)
    for start in range(0, num_tokens, keys_at_once):
        key_places = places[start : start + keys_at_once]
        stop = start + len(key_places)
        scores = _scores(q, k[:, :, start:stop].to(q.dtype), scale).sub_(lse)
        if stop > num_tokens - num_queries:  # some keys are behind some of the queries
            scores.masked_fill_(key_places > query_places[:, None], float("-inf"))
        scores.exp_()  # from here on probabilities
        columns[..., start:stop] = scores.sum(dim=2)

        # Shift row i by i places, so that each diagonal becomes a column: append as many zeros to
        # every row as there are rows, and read all numbers in rows that are one number shorter.
        padded = functional.pad(scores, (0, num_queries)).flatten(2)
        shifted = padded[..., :-num_queries].unflatten(2, (num_queries, -1))
        diagonals[..., start : start + shifted.shape[3]] += shifted.sum(dim=2)
    return columns / num_queries, diagonals[..., :num_tokens] / num_queries


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence, in nats, of distributions along the last dimension."""
    mean = (first + second) / 2
    sides = torch.special.entr(first) + torch.special.entr(second)
    return (torch.special.entr(mean) - sides / 2).sum(dim=-1).clamp_min(0)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the scaled scores of queries ``[B, Hq, R, D]`` and their heads' keys.

    Args:
        q: ``[B, Hq, R, D]``.
        k: ``[B, Hkv, C, D]``.
        scale: the factor of q·k.

    Returns:
        ``[B, Hq, R, C]``.
    """
    # All query heads of a group in one product with their KV head.
    of_kv_head = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (of_kv_head @ k.transpose(2, 3)).view(*q.shape[:3], k.shape[2])
