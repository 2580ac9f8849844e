"""The merge of partial attention results over disjoint keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .backends import choose


def merge_states(outs: Tensor, lses: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i): the online softmax by which APB-V
    merges the hosts' query attention (Eq. 5).

    Args:
        outs: ``[N, B, H, S, D]`` partial results.
        lses: ``[N, B, H, S]``; +inf, which some libraries report for no visible key, counts as -inf.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        out ``[B, H, S, D]`` and lse ``[B, H, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: there is not one lse for each row of outs.
        BackendError: the back end cannot be used here.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"partial results of shape {list(outs.shape)} do not have lses of shape {list(lses.shape)}"
        )
    chosen = choose(backend, lses)
    if chosen == "reference":
        out, lse = reference.merge_states(outs, lses)
        return out.to(lses.dtype), lse.to(lses.dtype)
    if chosen == "triton":
        from . import triton_merging

        return triton_merging.merge_states(outs, lses)
    lses = torch.where(lses == float("inf"), float("-inf"), lses)
    # A partial result that saw nothing may hold anything, NaN included: it must not be multiplied in.
    outs = outs.masked_fill((lses == float("-inf"))[..., None], 0.0)
    return merge_finite(outs.unbind(), lses)


def merge_finite(outs: Sequence[Tensor], lses: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`merge_states` of N results without NaN or +inf; accumulates in the lse's dtype."""
    highest = lses.amax(dim=0).clamp_min(torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - highest)
    total = weights.sum(dim=0)
    lse = highest + total.log()  # log(0) is the -inf of queries that saw nothing
    weights = (weights / total.clamp_min(torch.finfo(lses.dtype).tiny))[..., None]
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged.addcmul_(out.to(merged.dtype), weight)
    return merged, lse
