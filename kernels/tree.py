"""Attention of tokens that form a tree, over a past that all of them see. Shapes as in :mod:`.attention`."""

import torch
from torch import Tensor

from .attention import merge_states, segmented_attention


def tree_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over T - N keys that every query sees, and N keys behind them of which each sees its own.

    Args:
        q: ``[B, Hq, S, D]``.
        k, v: ``[B, Hkv, T, D]``.
        visible: bool ``[S, N]``, 0 <= N <= T: which of the last N keys a query sees; in a tree itself and its
            ancestors.
        scale: factor of the scores.

    Returns:
        out ``[B, Hq, S, D]`` in q's dtype (zeros where nothing was visible) and
        lse ``[B, Hq, S]`` in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: Hq is not a multiple of Hkv.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    past = k.shape[2] - visible.shape[1]
    # All see the past alike: the query heads of a group are as many more queries of one head, and K and V, which
    # are long, need not be repeated for them.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    out, lse = segmented_attention(grouped, [(k[:, :, :past], v[:, :, :past])], scale, causal_last=False)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
    if not visible.shape[1]:
        return out, lse
    near_out, near_lse = _attend_masked(q, k[:, :, past:], v[:, :, past:], visible, scale)
    merged, lse = merge_states(torch.stack([out.to(lse.dtype), near_out]), torch.stack([lse, near_lse]))
    return merged.to(q.dtype), lse


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """By definition, in fp32 at least: S and N are tens, and no fused kernel takes a mask and returns the lse."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, S, D]
    k, v = (states.to(wide).unsqueeze(2) for states in (k, v))
    scores = (grouped @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(wide).min)[..., None])
    return (weights @ v).flatten(1, 2), lse.flatten(1, 2)
