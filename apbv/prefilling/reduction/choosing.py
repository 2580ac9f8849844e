"""This module ranks visual tokens by their scores, and gathers scores over the hosts.

Of equal scores the earlier token comes first, so that all hosts choose alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...hosts import HostGroup
from ...layout import ContextLayout


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the highest scores, ascending; of equal scores the earlier place."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def keep_even(num_tokens: int, count: int) -> Tensor:
    """Return evenly spaced places, the first and the last among them."""
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


def lse_over_hosts(lse: Tensor, layout: ContextLayout, hosts: HostGroup) -> Tensor:
    """Merge a log-sum-exp over each host's keys into that over all hosts'; collective where a prompt is split."""
    return hosts.all_gather(lse).wait().logsumexp(dim=0) if layout.is_split else lse


def gather_scores(
    local: Tensor | None, owned: Sequence[Tensor], hosts: HostGroup, lead: Sequence[int] = ()
) -> Tensor:
    """Gather every host's share of lists of scores; collective.

    Args:
        local: this host's scores, ``[*lead, T]`` in fp32; None where it has none.
        owned: for every host, the places of its scores in the lists.
        lead: the shape of the lists.

    Returns:
        All scores, ``[*lead, all places]``, on the CPU of every host.
    """
    padded = torch.zeros(*lead, max(map(len, owned)), device=hosts.device)
    if local is not None:
        padded[..., : local.shape[-1]] = local
    gathered = hosts.all_gather(padded).wait().cpu()
    scores = torch.empty(*lead, sum(map(len, owned)))
    for places, values in zip(owned, gathered, strict=True):
        scores[..., places] = values[..., : len(places)]
    return scores
