"""Ranks a context block's KV pairs; the best l_p are passed on.

The paper (Section 3.3) says only that query-to-context attention scores are used. Its released code ranks by
``"dot"``; the other rankings are not its authors'.
"""

import torch
from torch import Tensor

from ...kernels import kv_importance
from ...kernels.torch_importance import chunked_scores, group_rows

_NUM_RECEIVED_QUERIES = 64
_DOT_POOL = 5

# Those that need the log-sum-exp of the query's scores over the block.
RANKED_BY_PROBABILITY = ("peak", "softmax")


def importance_of(
    name: str,
    q_query: Tensor,
    q_block: Tensor,
    k_block: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score the keys of a block: higher is more important.

    - ``"peak"``: the highest attention probability over query tokens and the heads of a group. So a key that a
      single word of the question attends to is passed on.
    - ``"softmax"``: the mean of these, in which the other words can outweigh it.
    - ``"dot"``: the mean raw score over query tokens and group, max-pooled over five neighbouring keys. The mean
      of products is the product with the mean query, so this costs one row of scores per KV head.
    - ``"received"``: the causal attention that a key receives from evenly subsampled queries of its own block.

    Args:
        name: one of these.
        q_query: ``[B, Hq, n_q, D]``, the query block.
        q_block, k_block: ``[B, Hq, l_b, D]`` and ``[B, Hkv, l_b, D]``, one context block.
        scale: the factor of q·k.
        lse, backend: as of :func:`apbv.kernels.kv_importance`.

    Returns:
        ``[B, Hkv, l_b]`` in fp32 (fp64 for fp64 input).
    """
    if name != "received":
        pool = _DOT_POOL if name == "dot" else 1
        return kv_importance(q_query, k_block, scale, name, pool=pool, lse=lse, backend=backend)
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
