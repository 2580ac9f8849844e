"""Attention over keys and values that lie in several places, and attention of a few new tokens over long KV.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S queries, T keys, D head
dimension. lse is the natural-log sum of exponentials of the scaled scores, -inf where nothing was visible.
"""

import torch
from torch import Tensor

from . import reference, torch_attention
from .backends import choose
from .library_attention import attend_with, choose_attention
from .runs import Segment


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the concatenation of several key/value segments, which are read where they lie.

    Every segment is fully visible to every query, except the last one where ``causal_last`` is set: there
    query i of S sees the first T - S + i + 1 of its T keys (bottom-right causality, as in decoding).

    Args:
        q: ``[B, Hq, S, D]``.
        segments: (k, v) pairs, each ``[B, Hkv, T_i, D]``; a T_i may be 0.
        scale: factor of the scores, usually ``D ** -0.5``.
        causal_last: whether the last segment is causal.
        rows_alone: the first so many queries see nothing but the last segment: APB-V's anchor, which stands
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
        return _saw_nothing(q)
    if len(segments) == 1:
        rows_alone = 0  # there is nothing else that the other rows could see
    chosen = choose_attention(backend, q, segments)
    if chosen == "reference":
        return reference.segmented_attention(q, segments, scale, causal_last, rows_alone=rows_alone)
    if chosen == "triton":
        from . import triton_attention

        return triton_attention.segmented_attention(q, segments, scale, causal_last, rows_alone=rows_alone)
    return torch_attention.segmented_attention(
        q, segments, scale, causal_last, rows_alone=rows_alone, attend=attend_with(chosen, q, segments[0][0])
    )


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
    """Attention of a few new tokens over long KV: a past that they share, and N keys behind it that are masked.

    Args:
        q: ``[B, Hq, S, D]``; meant for S of 1 to 16, and right for any.
        k, v: ``[B, Hkv, T, D]``.
        scale: factor of the scores.
        visible: bool ``[S, N]``, 0 <= N <= T: which of the last N keys a query sees; in a tree itself and its
            ancestors. None: the last S keys are the queries' own, and each sees those before it and itself.
        kept: ``[B, Hkv, M]``, integers, none twice: which of the first T - N keys a KV head sees. None: all.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: Hq is not a multiple of Hkv, or there are fewer keys than ``visible`` or S speaks of.
        BackendError: the back end cannot be used here.
    """
    _require_groups(q, k)
    masked = q.shape[2] if visible is None else visible.shape[1]
    if masked > k.shape[2]:
        raise ValueError(f"the mask speaks of the last {masked} keys, and there are only {k.shape[2]}")
    num_seen = masked + (k.shape[2] - masked if kept is None else kept.shape[2])
    if q.shape[2] == 0 or num_seen == 0:
        return _saw_nothing(q)
    chosen = choose(backend, q)
    if chosen == "reference":
        return reference.verify_attention(q, k, v, scale, visible=visible, kept=kept)
    if chosen == "triton":
        from . import triton_attention

        return triton_attention.verify_attention(q, k, v, scale, visible=visible, kept=kept)
    attend = attend_with("torch", q, k)
    return torch_attention.verify_attention(q, k, v, scale, visible=visible, kept=kept, attend=attend)


def _require_groups(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")


def _saw_nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
