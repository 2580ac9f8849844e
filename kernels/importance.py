"""This module ranks a context block's keys by what the question asks for, and copies the best to a buffer.

The APB-V paper (Section 3.3) says only that query-to-context attention scores choose the l_p KV pairs that are
passed on. Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), n_q query tokens, T keys,
D head dimension.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .backends import choose, implementation

REDUCTIONS = ("peak", "softmax", "dot")


def kv_importance(
    q_query: Tensor,
    k: Tensor,
    scale: float,
    reduce: str = "peak",
    *,
    pool: int = 1,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score each key, per KV head, by how much the question's tokens attend to it: higher is more important.

    Args:
        q_query: ``[B, Hq, n_q, D]``, the query block; n_q > 0.
        k: ``[B, Hkv, T, D]``, the keys of one context block.
        scale: factor of the scores, usually ``D ** -0.5``.
        reduce: ``"peak"``: attention probability over these T keys, highest over query tokens and the heads of a
            group. ``"softmax"``: its mean. ``"dot"``: the mean of the scaled scores themselves, which is the score
            of the mean query.
        pool: width, odd, of a max-pooling over neighbouring keys; 1: none.
        lse: ``[B, Hq, n_q]``, natural-log sum of exponentials of the scaled scores over exactly these T keys, as
            attention over them returns it; saves a pass over the keys. None: computed here. Unused by ``"dot"``.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        ``[B, Hkv, T]`` in fp32; in fp64 for fp64 input, except from the reference.

    Raises:
        ValueError: ``reduce`` is unknown, ``pool`` is even, the question is empty, or shapes do not fit together.
        BackendError: the back end cannot be used here.
    """
    _require_importance(q_query, k, reduce, pool, lse)
    if k.shape[2] == 0:
        return torch.empty(k.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    importance = implementation("kv_importance", choose(backend, k))(q_query, k, scale, reduce, lse=lse)
    return importance if pool == 1 else functional.max_pool1d(importance, pool, stride=1, padding=pool // 2)


def select_topk(
    scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Copy the rows of each KV head with the highest scores, in the order in which they stand.

    Of equal scores the earlier row is taken. The result is deterministic, and no step waits for the device.

    Args:
        scores: ``[B, Hkv, T]``; NaN counts as -inf.
        k, v: ``[B, Hkv, T, D]``.
        count: rows per KV head, 0 <= count <= T.
        out: ``[2, B, Hkv, N, D]`` with N >= count, K's dtype and device: the rows of K and V are written straight
            to the first ``count`` places of each head, and the rest is left alone. None: allocated, N = count.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        indices ``[B, Hkv, count]`` int64, ascending, and ``out``.

    Raises:
        ValueError: ``count`` lies outside 0 .. T, or shapes, dtypes or devices do not fit together.
        BackendError: the back end cannot be used here.
    """
    _require_selection(scores, k, v, count, out)
    if out is None:
        out = k.new_empty(2, *k.shape[:2], count, k.shape[3])
    if count == 0:
        return torch.empty(*k.shape[:2], 0, dtype=torch.int64, device=k.device), out
    return implementation("select_topk", choose(backend, k))(scores, k, v, count, out)


def _require_importance(q_query: Tensor, k: Tensor, reduce: str, pool: int, lse: Tensor | None) -> None:
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool must be odd, so that a key stands in the middle of its neighbours, not {pool}")
    if q_query.shape[1] % k.shape[1]:
        raise ValueError(f"{q_query.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    if q_query.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"q_query {tuple(q_query.shape)} and k {tuple(k.shape)} differ in batch or head dimension"
        )
    if q_query.shape[2] == 0:
        raise ValueError("a question of no tokens attends to nothing")
    if lse is not None and lse.shape != q_query.shape[:3]:
        raise ValueError(f"lse must be {tuple(q_query.shape[:3])}, not {tuple(lse.shape)}")


def _require_selection(scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor | None) -> None:
    if k.shape != v.shape or scores.shape != k.shape[:3]:
        shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}, scores {tuple(scores.shape)}"
        raise ValueError(f"k and v must have one shape, and scores the same without the head dimension: {shapes}")
    if not 0 <= count <= k.shape[2]:
        raise ValueError(f"count must lie in 0 .. {k.shape[2]}, the number of keys, not be {count}")
    if out is None:
        return
    fits = out.dim() == 5 and out.shape[:3] == (2, *k.shape[:2]) and out.shape[4] == k.shape[3]
    if not fits or out.shape[3] < count:
        expected = f"[2, {k.shape[0]}, {k.shape[1]}, {count} or more, {k.shape[3]}]"
        raise ValueError(f"out must be {expected}, not {list(out.shape)}")
    if (out.dtype, out.device) != (k.dtype, k.device):
        raise ValueError(f"out is {out.dtype} on {out.device}, and k {k.dtype} on {k.device}")
