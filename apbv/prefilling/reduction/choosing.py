"""Selects visual tokens to keep, and records the result.

Of equal scores the earlier token comes first, so that all hosts choose alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...transfer import to_device

MOST_DISTANCES = 2**26  # that are in memory at a time


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores, ascending; ties go to the earlier index."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def keep_even(num_tokens: int, count: int) -> Tensor:
    """Return evenly spaced indices, including the first and the last."""
    return torch.arange(count) * (num_tokens - 1) // max(1, count - 1)


def standardised(scores: Tensor, unit: float | None = None) -> Tensor:
    """Return z-scores (HIPPO, before its Eq. 7): zero mean and unit deviation within a frame, the last dimension.

    Equal scores give 0. Deviations of a millionth of ``unit`` count as rounding errors, and are damped.

    Args:
        unit: 1 for scores that consist of cosines, whose rounding errors do not shrink with the scores. None: the
            frame's mean score, so that a multiple of the scores gives the same: attention shrinks with the number
            of tokens that share it.
    """
    mean = scores.mean(dim=-1, keepdim=True)
    rounding = 1e-6 * (mean.abs() if unit is None else torch.full_like(mean, unit))
    # Not torch.std, which warns of no frames at all, as a host may have.
    spread = (scores - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return (scores - mean) / (spread + rounding).clamp(min=torch.finfo(scores.dtype).tiny)


def density_peaks(states: Tensor, num_nearest: int, exact: bool = False) -> Tensor:
    """Score rows ``[m, d]`` as centres of clusters: density times the distance to the nearest denser row.

    Distances are divided by √d. A row's density is exp(−mean of the squared distances to its nearest rows, itself
    among them). The densest row's distance is the largest of all. Of equally dense rows the earlier one is denser.

    Args:
        num_nearest: how many rows the density is of; at most m.
        exact: compute distances without matrix products, by which those of equal rows are not quite 0.

    Returns:
        ``[m]``, in fp32 at least.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    mode = "donot_use_mm_for_euclid_dist" if exact else "use_mm_for_euclid_dist_if_necessary"
    chunks = states.split(max(1, MOST_DISTANCES // max(1, len(states))))

    def distances() -> Iterator[Tensor]:
        return (torch.cdist(rows, states, compute_mode=mode) / states.shape[1] ** 0.5 for rows in chunks)

    nearest, longest = [], []
    for rows in distances():
        nearest.append(rows.topk(min(num_nearest, len(states)), largest=False).values.square().mean(dim=1))
        longest.append(rows.max())
    density = torch.cat(nearest).neg().exp()
    rank = torch.empty(len(states), dtype=torch.long, device=states.device)
    rank[density.argsort(descending=True, stable=True)] = torch.arange(len(states), device=states.device)
    to_denser = [
        rows.masked_fill(rank[None] >= of_rows[:, None], float("inf")).min(dim=1).values
        for rows, of_rows in zip(distances(), rank.split(len(chunks[0])), strict=True)
    ]
    return torch.cat(to_denser).clamp(max=torch.stack(longest).max()) * density


def means_of_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of the rows ``[m, d]`` of each group, ``[count, d]``; 0 for a group without rows.

    Args:
        groups: each row's group, ``[m]``.
    """
    groups = to_device(groups, rows.device)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(count, rows.shape[1], dtype=dtype, device=rows.device).index_add_(0, groups, rows.to(dtype))
    return (sums / groups.bincount(minlength=count).clamp(min=1)[:, None]).to(rows.dtype)


def count_of(share: float, num_tokens: int) -> int:
    """Return how many tokens a share of some is: rounded, and at least one."""
    return max(1, round(share * num_tokens))


def shares_of_videos(count: int, lengths: Sequence[int]) -> list[int]:
    """Share ``count`` tokens out over videos, in proportion to their lengths as far as that comes out even."""
    total = max(1, sum(lengths))
    ends = [end * count // total for end in accumulate(lengths, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class Reduction:
    """Result of pruning a prompt's visual tokens.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_before, num_after: the visual tokens of the prompt, and of them those that are kept, in the language
            model's last layers where tokens are pruned between layers.
        kept: ``[num_after]``, ascending, which ones.
        by_layer: how many there are in every layer, where tokens are pruned between layers; else empty.
    """

    method: str
    ratio: float
    num_before: int
    num_after: int
    kept: Tensor = field(repr=False)
    by_layer: tuple[int, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """The request metrics about it."""
        return {
            "method": self.method,
            "ratio": self.ratio,
            "num_video_tokens_before": self.num_before,
            "num_video_tokens_after": self.num_after,
            "num_video_tokens_by_layer": list(self.by_layer) or None,
        }

    def spread(self, scores: Tensor) -> Tensor:
        """Return scores of the tokens that are kept, ``[num_after]``, as scores of all, ``[num_before]``.

        The others get the lowest of these, or 0 if that is lower.
        """
        missing = min(0.0, float(scores.min()))
        spread = torch.full((self.num_before,), missing, dtype=scores.dtype)
        spread[self.kept] = scores
        return spread
