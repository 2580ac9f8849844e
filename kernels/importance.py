"""Which keys of a context block matter to the question (APB-V, Section 3.3), and the copy of the best to a buffer.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), n_q query tokens, T keys, D head
dimension. The paper says only that query-to-context attention scores choose the l_p KV pairs that are passed on.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .backends import choose

REDUCTIONS = ("peak", "softmax", "dot")

# So many scores are materialised per batch row at a time: long questions stay within memory, a CPU within caches.
_MAX_SCORES = 2**22


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
    """How much the question's tokens attend to each key, per KV head: higher is more important.

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
        return torch.empty(k.shape[:3], dtype=_wide(k), device=k.device)
    chosen = choose(backend, k)
    if chosen == "reference":
        return reference.kv_importance(q_query, k, scale, reduce, pool=pool)
    if chosen == "triton":
        from . import triton_importance

        importance = triton_importance.kv_importance(q_query, k, scale, reduce, lse)
    else:
        importance = _kv_importance(q_query, k, scale, reduce, lse)
    return importance if pool == 1 else functional.max_pool1d(importance, pool, stride=1, padding=pool // 2)


def select_topk(
    scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The best rows of each KV head, in the order in which they stand; of equal ones the earlier.

    Deterministic, and nothing waits for the device.

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
    chosen = choose(backend, k)
    if chosen == "reference":
        return reference.select_topk(scores, k, v, count, out)
    # topk takes NaN for the highest, and which of equal scores it takes is anybody's guess: only its values count.
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    best = scores.topk(count, dim=-1, sorted=False).values
    lowest = best.amin(dim=-1, keepdim=True)
    num_lowest = (best == lowest).sum(dim=-1, keepdim=True)
    if chosen == "triton":
        from . import triton_importance

        indices = triton_importance.kept_indices(scores, lowest, num_lowest, count)
        triton_importance.gather_rows(k, v, indices, out)
        return indices, out
    equal = scores == lowest
    kept = (scores > lowest) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= num_lowest))
    # The i-th kept row is where the number of rows kept so far becomes i.
    ordinals = torch.arange(1, count + 1, dtype=torch.int32, device=k.device).expand(*k.shape[:2], -1).contiguous()
    indices = torch.searchsorted(kept.cumsum(dim=-1, dtype=torch.int32), ordinals)
    places = indices[..., None].expand(-1, -1, -1, k.shape[3])
    for states, rows in zip((k, v), out[:, :, :, :count], strict=True):
        torch.gather(states, 2, places, out=rows)
    return indices, out


def group_rows(q: Tensor, k: Tensor) -> Tensor:
    """``[B, Hq, S, D]`` to ``[B, Hkv, G * S, D]``: the rows that score the keys of one KV head."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def chunked_scores(rows: Tensor, k: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Scores of rows ``[B, Hkv, R, D]``, a few rows at a time: which they are, and their ``[B, Hkv, R', T]``.

    In fp32, or fp64 for fp64 input; the caller may overwrite them.
    """
    step = max(1, _MAX_SCORES // (k.shape[1] * k.shape[2]))
    k = k.to(_wide(k))
    for start in range(0, rows.shape[2], step):
        which = slice(start, start + step)
        yield which, _scores(rows[:, :, which], k, scale)


def _scores(rows: Tensor, k: Tensor, scale: float) -> Tensor:
    return (rows.to(k.dtype) * scale) @ k.transpose(-1, -2)


def _kv_importance(q_query: Tensor, k: Tensor, scale: float, reduce: str, lse: Tensor | None) -> Tensor:
    """The importance before pooling."""
    rows = group_rows(q_query, k)
    if reduce == "dot":
        mean = rows.mean(dim=2, keepdim=True, dtype=_wide(k))
        return (mean * scale @ k.to(_wide(k)).transpose(-1, -2)).squeeze(2)
    if lse is not None:
        lse = lse.to(_wide(k)).reshape(*rows.shape[:3], 1)
    importance: Tensor | None = None
    for which, scores in chunked_scores(rows, k, scale):
        if lse is None:
            probabilities = scores.softmax(dim=-1)
            part = probabilities.amax(dim=2) if reduce == "peak" else probabilities.sum(dim=2)
        else:
            scores -= lse[:, :, which]
            # exp is monotonic: of the peak, only the highest needs one.
            part = scores.amax(dim=2).exp() if reduce == "peak" else scores.exp_().sum(dim=2)
        if importance is None:
            importance = part
        else:
            importance = torch.maximum(importance, part) if reduce == "peak" else importance + part
    return importance if reduce == "peak" else importance / rows.shape[2]


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


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
