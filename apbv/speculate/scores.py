"""How much each visual token matters to a draft: the score functions, on plain tensors.

Shapes: Hq query and Hkv KV heads, D head dimension. Scores of embeddings are operators of :mod:`apbv.kernels`.
"""

import torch
from torch import Tensor


def scores_of_keys(q_query: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled scores ``[Hkv, G * S, T]`` in fp32 or wider; queries ``[1, Hq, S, D]``, keys ``[1, Hkv, T, D]``."""
    groups = q_query.reshape(k.shape[1], -1, q_query.shape[3])
    scores = (groups @ k[0].transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()


def mean_probability(scores: Tensor, lse: Tensor) -> Tensor:
    """HIPPO's s_attn of one layer (its Eq. 2): softmax over all visual keys, mean over heads and text queries.

    Args:
        scores: ``[Hkv, R, T]``, of the keys at hand.
        lse: ``[Hkv, R]``, log-sum-exp over the *visual keys of all hosts*.

    Returns:
        ``[T]``
    """
    return (scores - lse[..., None]).exp().mean(dim=(0, 1))


def standardised(scores: Tensor, unit: float | None = None) -> Tensor:
    """HIPPO's z-scores (before its Eq. 7) have zero mean and unit deviation within each frame, the last dimension.

    Equal scores give 0. Deviations of a millionth of ``unit`` are taken for rounding, and damped.

    Args:
        unit: 1 for scores that are made of cosines, whose rounding errors do not shrink with the scores. None: the
            frame's mean score, so that a multiple of the scores gives the same: attention shrinks with the number
            of tokens that share it.
    """
    mean = scores.mean(dim=-1, keepdim=True)
    rounding = 1e-6 * (mean.abs() if unit is None else torch.full_like(mean, unit))
    spread = scores.std(dim=-1, correction=0, keepdim=True)
    return (scores - mean) / (spread + rounding).clamp(min=torch.finfo(scores.dtype).tiny)
