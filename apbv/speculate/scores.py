"""How much each visual token matters to a draft: the score functions, on plain tensors.

Shapes: F frames of h x w visual tokens, d hidden size, Hq query and Hkv KV heads, D head dimension.
"""

import torch
from torch import Tensor
from torch.nn import functional

CROP = 5  # tokens per side of HIPPO's crops, for all its models


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


def temporal_change(frames: Tensor, before: Tensor | None = None, after: Tensor | None = None) -> Tensor:
    """HIPPO's s_temp (Eq. 4): 1 minus the mean cosine similarity with the same place in the adjacent frames.

    Args:
        frames: ``[F, h * w, d]``.
        before, after: ``[h * w, d]``, the neighbours of the first and the last one; None where the video ends.

    Returns:
        ``[F, h * w]``; 0 for a video of a single frame, which changes nowhere.
    """
    neighbours = [[] if frame is None else [frame[None]] for frame in (before, after)]
    units = functional.normalize(torch.cat([*neighbours[0], frames, *neighbours[1]]).float(), dim=-1)
    similar = (units[1:] * units[:-1]).sum(dim=-1)  # of each frame with the next
    ends = (int(before is None), int(after is None))  # where there is no neighbour
    similar = functional.pad(similar, (0, 0, *ends))
    known = functional.pad(similar.new_ones(len(similar) - sum(ends)), ends)
    count = (known[:-1] + known[1:])[:, None]
    return torch.where(count > 0, 1 - (similar[:-1] + similar[1:]) / count.clamp_min(1), 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int = CROP) -> Tensor:
    """HIPPO's s_spa (Eq. 6): the variance of a token's cosine similarities with all tokens of its crop.

    Args:
        frames: ``[F, h * w, d]``, row by row.
        crop: tokens per side; crops do not overlap, and those at the edges are as large as what is left.

    Returns:
        ``[F, h * w]``
    """
    units = functional.normalize(frames.float(), dim=-1).unflatten(1, (height, width))
    varieties = units.new_empty(units.shape[:3])
    for top in range(0, height, crop):
        for left in range(0, width, crop):
            place = (slice(None), slice(top, top + crop), slice(left, left + crop))
            tokens = units[place]
            flat = tokens.flatten(1, 2)
            similar = flat @ flat.transpose(1, 2)
            varieties[place] = similar.var(dim=-1, correction=0).view(tokens.shape[:3])
    return varieties.flatten(1, 2)


def standardised(scores: Tensor) -> Tensor:
    """Zero mean and unit deviation within each frame (the last dimension); all 0 where a frame's are equal."""
    spread = scores.std(dim=-1, correction=0, keepdim=True)
    return (scores - scores.mean(dim=-1, keepdim=True)) / (spread + 1e-6)
