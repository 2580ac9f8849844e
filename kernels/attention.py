"""This module offers attention over keys and values in several places, and of a few new tokens over long KV.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S queries, T keys, D head
dimension. lse is the natural-log sum of exponentials of the scaled scores, -inf where nothing was visible.
"""

import torch
from torch import Tensor

from .backends import choose, implementation
from .library_attention import choose_attention
from .runs import Segment
from .torch_attention import empty_output, result_without_keys


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    rows_alone: int = 0,
    out: Tensor | None = None,
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
        out: ``[B, Hq, S, D]`` in q's dtype, of any strides with neighbouring numbers along D: filled and returned
            in place of a new tensor.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: no segment was given, Hq is not a multiple of Hkv, or out does not fit q.
        BackendError: the back end cannot be used here.
    """
    if not segments:
        raise ValueError("segmented_attention needs at least one (k, v) segment")
    _require_groups(q, segments[0][0])
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        what = "of shape {} in {}".format
        wanted, given = (what(list(states.shape), states.dtype) for states in (q, out))
        raise ValueError(f"the result is {wanted}, and out is {given}")
    if q.shape[2] == 0 or not any(k.shape[2] for k, _ in segments):
        return result_without_keys(q, out)
    if len(segments) == 1:
        rows_alone = 0  # there is nothing else that the other rows could see
    chosen = choose_attention(backend, q, segments)
    options = {"rows_alone": rows_alone, "out": out}
    if chosen == "triton":
        # A layer hands its output on with the heads of a token side by side: no copy is needed then.
        options["out"] = empty_output(q) if out is None else out
    elif chosen != "reference":
        options["merging"] = choose(backend, q)
    return implementation("segmented_attention", chosen)(q, segments, scale, causal_last, **options)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    kept: Tensor | None = None,
    num_keys: Tensor | None = None,
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
        num_keys: int32 ``[1]`` on q's device: only so many first rows of k and v count, at least N; what lies
            behind them is not read. "The last" keys above are the last of those. So a CUDA graph, in which
            shapes are fixed, serves all lengths up to T. None: all T rows. Only Triton reads it on the GPU;
            ``torch`` waits for it.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: Hq is not a multiple of Hkv, the mask covers more keys than there are, or num_keys is not
            one int32.
        BackendError: the back end cannot be used here.
    """
    _require_groups(q, k)
    masked = q.shape[2] if visible is None else visible.shape[1]
    if masked > k.shape[2]:
        raise ValueError(f"the mask covers the last {masked} keys, but there are only {k.shape[2]}")
    if num_keys is not None and (num_keys.dtype != torch.int32 or num_keys.shape != (1,)):
        raise ValueError(f"num_keys must be one int32, not {num_keys.dtype} of shape {list(num_keys.shape)}")
    num_seen = masked + (k.shape[2] - masked if kept is None else kept.shape[2])
    if q.shape[2] == 0 or num_seen == 0:
        return result_without_keys(q)
    compute = implementation("verify_attention", choose(backend, q))
    return compute(q, k, v, scale, visible=visible, kept=kept, num_keys=num_keys)


def _require_groups(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
