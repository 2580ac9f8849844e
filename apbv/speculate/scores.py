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


def standardised(scores: Tensor) -> Tensor:
    """Zero mean and unit deviation within each frame (the last dimension); all 0 where a frame's are equal."""
    spread = scores.std(dim=-1, correction=0, keepdim=True)
    return (scores - scores.mean(dim=-1, keepdim=True)) / (spread + 1e-6)
