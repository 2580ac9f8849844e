"""Scores visual tokens by their embeddings, with torch, some frames at a time.

Cosine similarities are accumulated in fp32; as in ``torch.nn.functional.normalize``, a vector is
divided by its norm or 1e-12: zeros are similar to nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .operators import require_dtype, require_shapes

_MOST_NUMBERS = 2**24  # of embeddings, that are widened at a time


def temporal_change(
    frames: Tensor, before: Tensor | None = None, after: Tensor | None = None
) -> Tensor:
    """Compute HIPPO's s_temp (Eq. 4): how much each place changes between adjacent frames.

    That is 1 minus the mean cosine similarity with the same place in the frames before and after.

    Args:
        frames: ``[F, h * w, d]``.
        before, after: ``[h * w, d]``, the neighbours of the first and the last one; None if the
            video ends.

    Returns:
        ``[F, h * w]`` in fp32; 0 for a video of a single frame, which changes nowhere.

    Raises:
        ValueError: a neighbour is of another shape or dtype than the frames.
    """
    require_shapes(frames=(frames, "F h*w d"), before=(before, "h*w d"), after=(after, "h*w d"))
    for frame in (before, after):
        require_dtype(frame, frames)
    if not frames.numel():
        return frames.new_zeros(frames.shape[:2], dtype=torch.float32)
    pieces = [frames]
    if before is not None:
        pieces.insert(0, before[None])
    if after is not None:
        pieces.append(after[None])
    video = torch.cat(pieces)

    # The similarity of each frame with the next: [F + 1, h * w], 0 where the video ends.
    similarities = []
    for part, next_part in zip(_parts(video[:-1]), _parts(video[1:]), strict=True):
        similarities.append(
            functional.cosine_similarity(part.float(), next_part.float(), dim=-1, eps=1e-12)
        )
    similarity = torch.cat(similarities)
    missing_before = 1 if before is None else 0
    missing_after = 1 if after is None else 0
    is_known = similarity.new_ones(len(similarity))
    is_known = functional.pad(is_known, (missing_before, missing_after))
    similarity = functional.pad(similarity, (0, 0, missing_before, missing_after))

    # The mean over the one or two neighbours of each frame.
    num_neighbours = (is_known[:-1] + is_known[1:])[:, None]
    mean = (similarity[:-1] + similarity[1:]) / num_neighbours.clamp_min(1)
    return torch.where(num_neighbours > 0, 1 - mean, 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int = 5) -> Tensor:
    """Compute HIPPO's s_spa (Eq. 6): the variance of a token's similarities within its crop.

    Args:
        frames: ``[F, h * w, d]``, row by row.
        height, width: h and w in tokens.
        crop: tokens per side, 5 in the paper for all models; crops do not overlap, and those at the
            edges are as large as what is left.

    Returns:
        ``[F, h * w]`` in fp32.

    Raises:
        ValueError: a frame does not have h * w tokens, or the crop is not positive.
    """
    require_shapes(frames=(frames, "F h*w d"), sizes={"h*w": height * width})
    varieties = []
    for part in _parts(frames):
        units = functional.normalize(part.float(), dim=-1).unflatten(1, (height, width))
        variety = units.new_empty(units.shape[:3])
        for top in range(0, height, crop):
            for left in range(0, width, crop):
                # [F, crop, crop, d], smaller at the edges
                cropped = units[:, top : top + crop, left : left + crop]
                tokens = cropped.flatten(1, 2)
                similarity = tokens @ tokens.transpose(1, 2)
                variance = similarity.var(dim=-1, correction=0)
                variety[:, top : top + crop, left : left + crop] = variance.view(cropped.shape[:3])
        varieties.append(variety)
    return torch.cat(varieties).flatten(1, 2)


def similarity_to(rows: Tensor, direction: Tensor) -> Tensor:
    """Multiply each row's unit vector by one vector.

    By a sum of unit vectors, that gives the sum of cosine similarities. ParallelVLM's UV-Prune
    (Eq. 3) is the difference of two of these, in a late layer and in the first.

    Args:
        rows: ``[m, d]``.
        direction: ``[d]``, of any length and float dtype.

    Returns:
        ``[m]`` in fp32.

    Raises:
        ValueError: the shapes do not fit together.
    """
    require_shapes(rows=(rows, "m d"), direction=(direction, "d"))
    similarities = []
    for part in _parts(rows):
        units = functional.normalize(part.float(), dim=-1)
        similarities.append(units @ direction.float())
    return torch.cat(similarities)


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor along its first dimension to parts that may be widened at a time."""
    numbers_of_row = states.shape[1:].numel()
    return states.split(max(1, _MOST_NUMBERS // max(1, numbers_of_row)))
