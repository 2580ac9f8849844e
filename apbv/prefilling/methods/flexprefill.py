"""Chooses blocks of keys as FlexPrefill does, by a pattern that is found for each query head anew.

The paper is Lai et al., *FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence
Inference* (ICLR 2025). Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S tokens, D
head dimension, n blocks of ``block`` tokens each, of which the last may be shorter; L last queries, as many as a
block has, or all of fewer.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...config import SparseConfig
from ...kernels import block_means, segmented_attention

# At most so many scores of the last queries exist at a time; on a CPU they stay near the processor.
_MOST_SCORES, _MOST_SCORES_ON_CPU = 2**24, 2**20


def flexprefill_blocks(q: Tensor, k: Tensor, scale: float, config: SparseConfig, backend: str) -> Tensor:
    """Choose blocks as FlexPrefill does: by what the last queries attend to, or by estimates for all queries.

    The last ``config.block_size`` queries stand for their head. Their attention to each block of keys is computed,
    and once more estimated from means of queries and keys. Where both are alike (the square root of their
    Jensen-Shannon divergence is below ``config.divergence``; Algorithm 2) the head is query-aware, and estimates
    are believed: of all pairs of blocks the highest are chosen until they hold ``config.share`` of what all
    estimates hold together (Algorithm 4). The other heads' pattern is vertical-slash: they take the fewest columns
    of blocks that hold ``config.share`` of the last queries' attention, and the fewest diagonals (Algorithm 3).
    The first column and the diagonal itself are chosen first and always; of both there are, in every head, at
    least ``config.min_blocks``. Of equal columns the earlier is taken, of equal diagonals the nearer one.

    The paper's columns and diagonals are lines of single tokens, here they are lines of whole blocks, as in the
    released code. That takes as many of the best lines of blocks as the chosen lines of tokens would fill if they
    were neighbours, and counts a diagonal of tokens to one of the two diagonals of blocks that it crosses. Here so
    many are taken that they hold the share, even where it is scattered.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, S, D]``, of the same tokens.
        scale: the factor of q·k.
        config: the settings that are named above.
        backend: what computes means, and attention; see :mod:`apbv.kernels.backends`.

    Returns:
        bool ``[B, Hq, n, n]``, for each block of queries the blocks of keys; what it says of those that are not
        before the queries is of no account.
    """
    of_columns, of_diagonals = _line_shares(q[:, :, -config.block_size :], k, scale, config.block_size, backend)
    queries, keys = (block_means(states, config.block_size, backend=backend)[0] for states in (q, k))
    last = q[:, :, -config.block_size :].mean(dim=2, keepdim=True, dtype=queries.dtype)
    estimated = _scores(last, keys, scale).softmax(dim=-1)[:, :, 0]
    is_aware = _divergence(estimated, of_columns).sqrt() < config.divergence

    columns, diagonals = (_fewest_lines(shares, is_aware, config) for shares in (of_columns, of_diagonals))
    places = torch.arange(keys.shape[2], device=q.device)
    behind = places[:, None] - places  # how far a block of keys is behind one of queries
    lines = columns[:, :, None] | diagonals[:, :, behind.clamp_min(0)]

    shares = _scores(queries, keys, scale).masked_fill(behind < 0, float("-inf")).softmax(dim=-1).flatten(2)
    held, order = shares.sort(dim=-1, descending=True, stable=True)
    wanted = config.share * held.sum(dim=-1, keepdim=True)
    highest = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, held.cumsum(dim=-1) - held < wanted)
    return lines | highest.view(lines.shape) & is_aware[..., None, None]


def _fewest_lines(shares: Tensor, is_aware: Tensor, config: SparseConfig) -> Tensor:
    """Choose lines of blocks, ``[B, Hq, n]``: the first, and the best others until they hold the share wanted.

    In query-aware heads they are as few as there may be.
    """
    ranked = shares.clone()
    ranked[..., 0] = float("inf")
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    held = shares.gather(2, order)
    wanted = config.share * held.sum(dim=-1, keepdim=True)
    chosen = (held.cumsum(dim=-1) - held < wanted) & ~is_aware[..., None]
    chosen[..., : config.min_blocks] = True
    return torch.zeros_like(chosen).scatter_(2, order, chosen)


def _line_shares(q: Tensor, k: Tensor, scale: float, block: int, backend: str) -> tuple[Tensor, Tensor]:
    """Compute which share of the last queries' attention falls into each column and each diagonal of blocks.

    A query that is d tokens behind a key lies on a line of tokens that crosses two diagonals of blocks: of the
    queries of any block, 1 - (d mod block) / block lie on diagonal ⌊d / block⌋, and the others on the next. The
    share of such a pair is divided between both accordingly. There is no diagonal behind the last: its share is
    that of the last, too.

    Args:
        q: ``[B, Hq, L, D]``, the last queries.
        k: ``[B, Hkv, S, D]``.
        scale: the factor of q·k.
        block: tokens of a block.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        columns ``[B, Hq, n]``, from the first key on, and diagonals ``[B, Hq, n]``, from the nearest on, both in
        fp32 (fp64 for fp64 input); each add up to 1.
    """
    rows, tokens = q.shape[2], k.shape[2]
    num_blocks, before = -(-tokens // block), tokens - rows
    lse = segmented_attention(q, [(k, k)], scale, causal_last=True, backend=backend)[1][..., None]
    q = q.to(lse.dtype)
    places = torch.arange(tokens, device=q.device)
    # Row i and the c-th key of block j are d = (first - j) * block + within[i, c] tokens apart. Their pair lies on
    # the diagonals first - j + step; the weights of the four steps that there can be add up to 1.
    first, steps = before // block, torch.arange(-1, 3, device=q.device)
    within = torch.arange(block, device=q.device)
    within = before % block + within[:rows, None] - within
    weights = (1 - (within[..., None].to(q.dtype) / block - steps).abs()).clamp_min(0)
    most = _MOST_SCORES_ON_CPU if q.device.type == "cpu" else _MOST_SCORES
    at_once = max(1, most // (q.shape[0] * q.shape[1] * rows * block)) * block
    parts = []
    for start in range(0, tokens, at_once):
        scores = _scores(q, k[:, :, start : start + at_once].to(q.dtype), scale).sub_(lse)
        columns = places[start : start + at_once]
        if start + len(columns) > before:  # some are behind some of the queries
            scores.masked_fill_(columns > places[before:, None], float("-inf"))
        scores = functional.pad(scores.exp_(), (0, -len(columns) % block)).unflatten(3, (-1, block))
        parts.append((scores @ weights).sum(dim=2))
    shares = torch.cat(parts, dim=2) / rows
    # Diagonal d collects the step s of the block of keys first + s - d, where there is one.
    sources = first + steps - torch.arange(num_blocks + 1, device=q.device)[:, None]
    is_there = (sources >= 0) & (sources < num_blocks)
    collected = shares[:, :, sources.clamp(0, num_blocks - 1), torch.arange(4, device=q.device)]
    diagonals = (collected * is_there).sum(dim=-1)
    diagonals[..., -2] += diagonals[..., -1]
    return shares.sum(dim=-1), diagonals[..., :-1]


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence, in nats, of distributions along the last dimension."""
    mean = (first + second) / 2
    sides = torch.special.entr(first) + torch.special.entr(second)
    return (torch.special.entr(mean) - sides / 2).sum(dim=-1).clamp_min(0)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Multiply queries ``[B, Hq, R, D]`` with keys ``[B, Hkv, C, D]`` of their heads: ``[B, Hq, R, C]``."""
    of_head = (q * scale).unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (of_head @ k.transpose(2, 3)).view(*q.shape[:3], k.shape[2])
