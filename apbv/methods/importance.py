"""How a context block's KV pairs are ranked before the best l_p of them are passed on.

Every function takes q_query ``[B, Hq, n_q, D]`` (the query block), q_block ``[B, Hq, l_b, D]`` and k_block
``[B, Hkv, l_b, D]`` (one context block) and the score scale, and returns ``[B, Hkv, l_b]`` in fp32: higher
is more important. The paper (Section 3.3) says only that query-to-context attention scores are used.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Importance = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# Scores are materialised for so many (query row, key) pairs at a time, to bound memory for long questions.
_MAX_SCORES = 2**24
_NUM_RECEIVED_QUERIES = 64
_DOT_POOL = 5


def peak(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float) -> Tensor:
    """Attention probability over the block's keys, highest over query tokens and the heads of a group.

    What a single word of the question asks for is passed on, however little the other words care; in the mean of
    :func:`softmax` it is one voice among many.
    """
    highest: Tensor | None = None
    for chunk in _row_chunks(_group_rows(q_query, k_block), k_block):
        rows = _scores(chunk, k_block, scale).softmax(dim=-1).amax(dim=2)
        highest = rows if highest is None else torch.maximum(highest, rows)
    return highest


def softmax(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float) -> Tensor:
    """Attention probability over the block's keys, averaged over query tokens and the heads of a group."""
    rows = _group_rows(q_query, k_block)
    total = 0.0
    for chunk in _row_chunks(rows, k_block):
        total = total + _scores(chunk, k_block, scale).softmax(dim=-1).sum(dim=2)
    return total / rows.shape[2]


def dot(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float) -> Tensor:
    """Mean raw score over query tokens and group, then max-pooling over five neighbouring keys.

    The mean of products is the product with the mean query, so this costs one row of scores per KV head.
    """
    mean = _group_rows(q_query, k_block).float().mean(dim=2, keepdim=True)
    scores = (mean @ k_block.float().transpose(-1, -2)).squeeze(2) * scale
    return torch.nn.functional.max_pool1d(scores, _DOT_POOL, stride=1, padding=_DOT_POOL // 2)


def received(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float) -> Tensor:
    """Attention that a key receives from (evenly subsampled) queries of its own block, causally."""
    length = k_block.shape[2]
    count = min(_NUM_RECEIVED_QUERIES, length)
    picked = torch.linspace(0, length - 1, count, device=k_block.device, dtype=torch.float64).round().long()
    rows = _group_rows(q_block[:, :, picked], k_block)
    row_positions = picked.repeat(rows.shape[2] // count)
    key_positions = torch.arange(length, device=k_block.device)
    total = 0.0
    for chunk, positions in zip(
        _row_chunks(rows, k_block), _row_chunks(row_positions[None, None, :, None], k_block), strict=True
    ):
        hidden = key_positions > positions
        scores = _scores(chunk, k_block, scale).masked_fill(hidden, float("-inf"))
        total = total + scores.softmax(dim=-1).sum(dim=2)
    return total / rows.shape[2]


IMPORTANCE: dict[str, Importance] = {"peak": peak, "softmax": softmax, "dot": dot, "received": received}


def _group_rows(q: Tensor, k: Tensor) -> Tensor:
    """``[B, Hq, S, D]`` to ``[B, Hkv, G * S, D]``: the rows that score the keys of one KV head."""
    batch, _, queries, dim = q.shape
    return q.reshape(batch, k.shape[1], -1, dim) if queries else q[:, : k.shape[1]]


def _row_chunks(rows: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, _MAX_SCORES // (k.shape[1] * k.shape[2])), dim=2)


def _scores(rows: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = (rows @ k.transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()
