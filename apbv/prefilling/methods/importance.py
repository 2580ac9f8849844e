"""Ranks a context block's KV pairs; the best l_p are passed on.

The paper (Section 3.3) says only that query-to-context attention scores are used. Its released code
ranks by ``"dot"``; the other rankings are not its authors'.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

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
    gather_group: Callable[[Tensor], Tensor] | None = None,
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
        gather_group: where this process has only some query heads of each group, as many as others:
            gathers ``[B, Hkv, l_b]`` of all that have the others, along a new first dimension.
        backend: a name of :data:`apbv.kernels.backends.BACKENDS`, or ``"auto"``.

    Returns:
        ``[B, Hkv, l_b]`` in fp32 (fp64 for fp64 input).
    """
    pool = _DOT_POOL if name == "dot" else 1
    if gather_group is None:
        return kv_importance(q_query, k_block, scale, name, pool=pool, lse=lse, backend=backend)
    of_parts = gather_group(kv_importance(q_query, k_block, scale, name, lse=lse, backend=backend))
    of_group = of_parts.amax(dim=0) if name == "peak" else of_parts.mean(dim=0)
    return functional.max_pool1d(of_group, pool, stride=1, padding=pool // 2)
