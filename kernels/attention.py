"""This module offers attention over keys and values in several places, and of a few new tokens over long KV.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S queries, T keys, D head
dimension. lse is the natural-log sum of exponentials of the scaled scores, -inf where nothing was visible.
"""

from torch import Tensor

from .backends import choose, implementation
from .library_attention import choose_attention
from .runs import Segment
from .torch_attention import result_without_keys


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend over the concatenation of several key/value segments without concatenating them.

    Every segment is fully visible to every query, except the last one where ``causal_last`` is set: there
    query i of S sees the first T - S + i + 1 of its T keys (bottom-right causality, as in decoding).

    Args:
        q: ``[B, Hq, S, D]``.
        segments: (k, v) pairs, each ``[B, Hkv, T_i, D]``; a T_i may be 0.
        scale: factor of the scores, usually ``D ** -0.5``.
        causal_last: whether the last segment is causal.
        rows_alone: number of leading queries that see the last segment only: APB-V's anchor, which stands
            before its block and sees no passing blocks.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: no segment was given, or Hq is not a multiple of Hkv.
        BackendError: the back end cannot be used here.
    """
    if not segments:
        raise ValueError("segmented_attention needs at least one (k, v) segment")
    _require_groups(q, segments[0][0])
    if q.shape[2] == 0 or not any(k.shape[2] for k, _ in segments):
        return result_without_keys(q)
    if len(segments) == 1:
        rows_alone = 0  # there is nothing else that the other rows could see
    compute = implementation("segmented_attention", choose_attention(backend, q, segments))
    return compute(q, segments, scale, causal_last, rows_alone=rows_alone)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    kept: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from a few new tokens to a long past that they share and to N masked keys behind it.

    Args:
        q: ``[B, Hq, S, D]``; fast for S of 1 to 16, correct for any.
        k, v: ``[B, Hkv, T, D]``.
        scale: factor of the scores.
        visible: bool ``[S, N]``, 0 <= N <= T: which of the last N keys a query sees; in a tree itself and its
            ancestors. None: the last S keys are the queries' own, and each sees those before it and itself.
        kept: ``[B, Hkv, M]``, distinct integers: which of the first T - N keys a KV head sees. None: all.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: Hq is not a multiple of Hkv, or the mask covers more keys than there are.
        BackendError: the back end cannot be used here.
    """
    _require_groups(q, k)
    masked = q.shape[2] if visible is None else visible.shape[1]
    if masked > k.shape[2]:
        raise ValueError(f"the mask covers the last {masked} keys, but there are only {k.shape[2]}")
    num_seen = masked + (k.shape[2] - masked if kept is None else kept.shape[2])
    if q.shape[2] == 0 or num_seen == 0:
        return result_without_keys(q)
    compute = implementation("verify_attention", choose(backend, q))
    return compute(q, k, v, scale, visible=visible, kept=kept)


def _require_groups(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
