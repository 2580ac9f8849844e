"""This module implements :mod:`apbv.kernels.merging` with torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial results as :func:`apbv.kernels.merge_states` does."""
    lses = torch.where(lses == float("inf"), float("-inf"), lses)
    # A partial result that saw nothing may hold anything, NaN included: it must not be multiplied in.
    outs = outs.masked_fill((lses == float("-inf"))[..., None], 0.0)
    return merge_finite(outs.unbind(), lses)


def merge_finite(outs: Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial results that hold neither NaN nor +inf, accumulating in the lse's dtype."""
    highest = lses.amax(dim=0).clamp_min(torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - highest)
    total = weights.sum(dim=0)
    lse = highest + total.log()  # log(0) is the -inf of queries that saw nothing
    weights = (weights / total.clamp_min(torch.finfo(lses.dtype).tiny))[..., None]
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged.addcmul_(out.to(merged.dtype), weight)
    return merged, lse
