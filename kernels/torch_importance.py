"""Key selection with torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Maximum scores in memory per batch row: bounds memory for long questions, and fits a CPU's caches.
MAX_SCORES = 2**22


def kv_importance(
    q_query: Tensor, k: Tensor, scale: float, reduce: str, *, lse: Tensor | None = None
) -> Tensor:
    """Score keys as :func:`apbv.kernels.kv_importance` does, without pooling."""
    rows = group_rows(q_query, k)
    if reduce == "dot":
        mean = rows.mean(dim=2, keepdim=True, dtype=_wide(k))
        return (mean * scale @ k.to(_wide(k)).transpose(-1, -2)).squeeze(2)
    if lse is not None:
        lse = lse.to(_wide(k)).reshape(*rows.shape[:3], 1)
    importance = rows.new_zeros(k.shape[:3], dtype=_wide(k))
    for which, scores in chunked_scores(rows, k, scale):
        # [B, Hkv, R', T]: logarithms of probabilities
        if lse is None:
            scores -= scores.logsumexp(dim=-1, keepdim=True)
        else:
            scores -= lse[:, :, which]
        if reduce == "peak":
            # exp is monotonic, so that the peak needs it for the highest score only.
            importance = torch.maximum(importance, scores.amax(dim=2).exp())
        else:
            importance = importance + scores.exp_().sum(dim=2)
    if reduce == "peak":
        return importance
    return importance / rows.shape[2]


def select_topk(
    scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy rows as :func:`apbv.kernels.select_topk` does, for a count of at least 1."""
    scores, lowest, num_lowest = find_threshold(scores, count)
    equal = scores == lowest
    is_early = equal.cumsum(dim=-1, dtype=torch.int32) <= num_lowest
    kept = (scores > lowest) | (equal & is_early)
    # The i-th kept row is where the number of rows kept so far becomes i.
    num_kept = kept.cumsum(dim=-1, dtype=torch.int32)
    ordinals = torch.arange(1, count + 1, dtype=torch.int32, device=k.device)
    ordinals = ordinals.expand(*k.shape[:2], -1).contiguous()
    # [B, Hkv, count]
    indices = torch.searchsorted(num_kept, ordinals)
    # [B, Hkv, count, D]
    places = indices[..., None].expand(-1, -1, -1, k.shape[3])
    torch.gather(k, 2, places, out=out[0, :, :, :count])
    torch.gather(v, 2, places, out=out[1, :, :, :count])
    return indices, out


def find_threshold(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the lowest score among the ``count`` highest, and how many rows of that score are kept.

    Args:
        scores: ``[B, Hkv, T]``; NaN counts as -inf.
        count: 1 <= count <= T.

    Returns:
        The scores without NaN; the lowest kept score and how many kept rows equal it, both
        ``[B, Hkv, 1]``.
    """
    # topk ranks NaN highest and leaves open which of equal scores it takes, so only its values are
    # used.
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    best = scores.topk(count, dim=-1, sorted=False).values
    lowest = best.amin(dim=-1, keepdim=True)
    return scores, lowest, (best == lowest).sum(dim=-1, keepdim=True)


def group_rows(q: Tensor, k: Tensor) -> Tensor:
    """Reshape queries to ``[B, Hkv, G * S, D]``, the rows that score the keys of one KV head.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, T, D]``.
    """
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def chunked_scores(rows: Tensor, k: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield the scaled scores of a few rows at a time, so that memory stays bounded.

    Args:
        rows: ``[B, Hkv, R, D]``.
        k: ``[B, Hkv, T, D]``.
        scale: factor of the scores.

    Yields:
        Which R' rows these are, and their scores ``[B, Hkv, R', T]`` in fp32 (fp64 for fp64 input),
        which the caller may overwrite.
    """
    step = max(1, MAX_SCORES // (k.shape[1] * k.shape[2]))
    k = k.to(_wide(k))
    for start in range(0, rows.shape[2], step):
        which = slice(start, start + step)
        scaled_rows = rows[:, :, which].to(k.dtype) * scale
        yield which, scaled_rows @ k.transpose(-1, -2)


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)
