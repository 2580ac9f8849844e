"""Ranks a context block's KV pairs, of which the best l_p are passed on.

Every function takes q_query ``[B, Hq, n_q, D]`` (the query block), q_block ``[B, Hq, l_b, D]`` and k_block
``[B, Hkv, l_b, D]`` (one context block) and the score scale, and returns ``[B, Hkv, l_b]`` in fp32 (fp64 for fp64
input): higher is more important. The options are those of :func:`apbv.kernels.kv_importance`: ``lse``
``[B, Hq, n_q]`` of the query block's scores over exactly this block, where it is known, and ``backend``. The
paper (Section 3.3) says only that query-to-context attention scores are used.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import kv_importance
from ...kernels.torch_importance import chunked_scores, group_rows

Importance = Callable[..., Tensor]

_NUM_RECEIVED_QUERIES = 64
_DOT_POOL = 5


def peak(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float, **options) -> Tensor:
    """Score keys by their highest attention probability over query tokens and the heads of a group.

    So a key that a single word of the question attends to is passed on; in the mean of :func:`softmax` the other
    words can outweigh it.
    """
    return kv_importance(q_query, k_block, scale, "peak", **options)


def softmax(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float, **options) -> Tensor:
    """Score keys by their mean attention probability over query tokens and the heads of a group."""
    return kv_importance(q_query, k_block, scale, "softmax", **options)


def dot(q_query: Tensor, q_block: Tensor, k_block: Tensor, scale: float, **options) -> Tensor:
    """Score keys by their mean raw score over query tokens and group, max-pooled over five neighbouring keys.

    The mean of products is the product with the mean query, so this costs one row of scores per KV head.
    """
    return kv_importance(q_query, k_block, scale, "dot", pool=_DOT_POOL, **options)


def received(
    q_query: Tensor,
    q_block: Tensor,
    k_block: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score keys by the causal attention that they receive from evenly subsampled queries of their own block."""
    length = k_block.shape[2]
    count = min(_NUM_RECEIVED_QUERIES, length)
    picked = torch.linspace(0, length - 1, count, device=k_block.device, dtype=torch.float64).round().long()
    rows = group_rows(q_block[:, :, picked], k_block)
    row_positions = picked.repeat(rows.shape[2] // count)[:, None]
    key_positions = torch.arange(length, device=k_block.device)
    total = 0.0
    for which, scores in chunked_scores(rows, k_block, scale):
        scores.masked_fill_(key_positions > row_positions[which], float("-inf"))
        total = total + scores.softmax(dim=-1).sum(dim=2)
    return total / rows.shape[2]


IMPORTANCE: dict[str, Importance] = {"peak": peak, "softmax": softmax, "dot": dot, "received": received}
# Those that need the log-sum-exp of the query's scores over the block.
RANKED_BY_PROBABILITY = ("peak", "softmax")
