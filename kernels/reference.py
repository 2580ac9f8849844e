"""Plain PyTorch definitions of the operators, in the widest precision. What every other back end must equal."""

import torch
from torch import Tensor

Segment = tuple[Tensor, Tensor]


def segmented_attention(
    q: Tensor, segments: list[Segment], scale: float, causal_last: bool
) -> tuple[Tensor, Tensor]:
    """Attention over the concatenation of several key/value segments, by its definition.

    Same signature and result as :func:`apbv.kernels.segmented_attention`, with every score materialised
    in fp64: O(S * T) memory.
    """
    if not segments:
        raise ValueError("segmented_attention needs at least one (k, v) segment")
    batch, heads, queries, dim = q.shape
    groups = heads // segments[0][0].shape[1]
    k = torch.cat([k for k, _ in segments], dim=2).double().repeat_interleave(groups, dim=1)
    v = torch.cat([v for _, v in segments], dim=2).double().repeat_interleave(groups, dim=1)
    scores = q.double() @ k.transpose(-1, -2) * scale
    if causal_last:
        last = segments[-1][0].shape[2]
        visible = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device)
        visible[:, k.shape[2] - last :] = torch.ones(queries, last, dtype=torch.bool, device=q.device).tril(
            last - queries
        )
        scores = scores.masked_fill(~visible, float("-inf"))
    if k.shape[2] == 0:
        return q.new_zeros(batch, heads, queries, dim), _empty_lse(q)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v).to(q.dtype), lse.to(_lse_dtype(q))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of tokens that form a tree, by definition, in fp64. See :func:`apbv.kernels.tree_attention`."""
    groups = q.shape[1] // k.shape[1]
    k, v = (states.double().repeat_interleave(groups, dim=1) for states in (k, v))
    past = visible.new_ones(len(visible), k.shape[2] - visible.shape[1])
    scores = q.double() @ k.transpose(-1, -2) * scale
    scores = scores.masked_fill(~torch.cat([past, visible], dim=1), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v).to(q.dtype), lse.to(_lse_dtype(q))


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint keys, in fp64. See :func:`apbv.kernels.merge_states`."""
    lses = lses.double().masked_fill(lses == float("inf"), float("-inf"))
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))
    outs = outs.double().masked_fill(weights[..., None] == 0, 0.0)
    return (weights[..., None] * outs).sum(dim=0), lse


def _empty_lse(q: Tensor) -> Tensor:
    return torch.full(q.shape[:3], float("-inf"), dtype=_lse_dtype(q), device=q.device)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
