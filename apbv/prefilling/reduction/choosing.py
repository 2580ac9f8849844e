"""Selects visual tokens to keep, and records the result.

Of equal scores the earlier token comes first, so that all hosts choose alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ...device.copies import to_device


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores, ascending; ties go to the earlier index."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def keep_even(num_tokens: int, count: int) -> Tensor:
    """Return evenly spaced indices, including the first and the last."""
    return torch.arange(count) * (num_tokens - 1) // max(1, count - 1)


def means_of_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of each group's rows, ``[count, d]``; 0 for a group without rows.

    Args:
        rows: ``[m, d]``.
        groups: each row's group, ``[m]``.
    """
    groups = to_device(groups, rows.device)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(count, rows.shape[1], dtype=dtype, device=rows.device)
    sums.index_add_(0, groups, rows.to(dtype))
    num_rows = groups.bincount(minlength=count).clamp(min=1)
    return (sums / num_rows[:, None]).to(rows.dtype)


def count_of(share: float, num_tokens: int) -> int:
    """Return the number of tokens in a share, rounded, at least one."""
    return max(1, round(share * num_tokens))


def shares_of_videos(count: int, lengths: Sequence[int]) -> list[int]:
    """Share ``count`` tokens out over videos, about in proportion to their lengths."""
    total = max(1, sum(lengths))
    ends = [end * count // total for end in accumulate(lengths, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class Reduction:
    """Result of pruning a prompt's visual tokens.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_before: the number of the prompt's visual tokens.
        num_after: the number of visual tokens that are kept.
        kept: ``[num_after]``, ascending: which visual tokens are kept, in the last layers where
            they are pruned between layers.
        by_layer: how many of them each layer reads, where they are pruned between layers; else
            empty.
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
        figures: dict[str, Any] = {
            "method": self.method,
            "ratio": self.ratio,
            "num_video_tokens_before": self.num_before,
            "num_video_tokens_after": self.num_after,
        }
        if self.by_layer:
            figures["num_video_tokens_by_layer"] = list(self.by_layer)
        return figures

    def spread(self, scores: Tensor) -> Tensor:
        """Return scores of the kept tokens, ``[num_after]``, as scores of all, ``[num_before]``.

        The others get the lowest of these, or 0 if that is lower.
        """
        lowest = min(0.0, float(scores.min()))
        spread = torch.full((self.num_before,), lowest, dtype=scores.dtype)
        spread[self.kept] = scores
        return spread
