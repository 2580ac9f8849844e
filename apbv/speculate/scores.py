"""This module scores on plain tensors how much each visual token matters to a draft.

Shapes: Hq query and Hkv KV heads, D head dimension. Scores of embeddings are operators of :mod:`apbv.kernels`.
"""

import torch
from torch import Tensor


def scores_of_keys(q_query: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled q·k ``[Hkv, G * S, T]``, in fp32 or wider, of q ``[1, Hq, S, D]`` and k ``[1, Hkv, T, D]``."""
    groups = q_query.reshape(k.shape[1], -1, q_query.shape[3])
    scores = (groups @ k[0].transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()


def mean_probability(scores: Tensor, lse: Tensor) -> Tensor:
    """Return one layer's s_attn (HIPPO, Eq. 2): softmax over visual keys, mean over heads and text queries.

    Args:
        scores: ``[Hkv, R, T]``, of this host's keys.
        lse: ``[Hkv, R]``, log-sum-exp over the *visual keys of all hosts*.

    Returns:
        ``[T]``
    """
    return (scores - lse[..., None]).exp().mean(dim=(0, 1))
