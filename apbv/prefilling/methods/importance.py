"""Ranks a context block's KV pairs; the best l_p are passed on.

The paper (Section 3.3) says only that query-to-context attention scores are used. Its released code
ranks by ``"dot"``; the other rankings are not its authors'.
"""

from torch import Tensor

from ...kernels import kv_importance

_DOT_POOL = 5

# Rankings that need the log-sum-exp of the query's scores over the block.
RANKED_BY_PROBABILITY = ("peak", "softmax")


def importance_of(
    name: str,
    q_query: Tensor,
    k_block: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score the keys of a block: higher is more important.

    - ``"peak"``: the highest attention probability over query tokens and the heads of a group. So a
      key that a single word of the question attends to is passed on.
    - ``"softmax"``: the mean of these probabilities, in which other words can outweigh that one.
    - ``"dot"``: the mean raw score over query tokens and group, max-pooled over five neighbouring
      keys. The mean of products is the product with the mean query, so this costs one row of scores
      per KV head.

    Args:
        name: ``"peak"``, ``"softmax"`` or ``"dot"``.
        q_query: ``[B, Hq, n_q, D]``, the query block.
        k_block: ``[B, Hkv, l_b, D]``, one context block.
        scale: the factor of q·k.
        lse: ``[B, Hq, n_q]``, log-sum-exp of the query's scores over the block; None: computed here
            if the ranking needs it.
        backend: a name of :data:`apbv.kernels.backends.BACKENDS`, or ``"auto"``.

    Returns:
        ``[B, Hkv, l_b]`` in fp32 (fp64 for fp64 input).
    """
    pool = _DOT_POOL if name == "dot" else 1
    return kv_importance(q_query, k_block, scale, name, pool=pool, lse=lse, backend=backend)
