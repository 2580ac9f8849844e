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
    """Compute HIPPO's s_temp (Eq. 4): 1 minus the mean cosine similarity with the same place in
    adjacent frames.

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
    ends = int(before is None), int(after is None)  # where there is no neighbour
    neighbours = ([] if frame is None else [frame[None]] for frame in (before, after))
    video = torch.cat([*next(neighbours), frames, *next(neighbours)])
    pairs = zip(_parts(video[:-1]), _parts(video[1:]), strict=True)
    similar = [
        functional.cosine_similarity(a.float(), b.float(), dim=-1, eps=1e-12) for a, b in pairs
    ]
    similar = functional.pad(torch.cat(similar), (0, 0, *ends))  # of each frame with the next
    known = functional.pad(similar.new_ones(len(similar) - sum(ends)), ends)
    count = (known[:-1] + known[1:])[:, None]
    return torch.where(count > 0, 1 - (similar[:-1] + similar[1:]) / count.clamp_min(1), 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int = 5) -> Tensor:
    """Compute HIPPO's s_spa (Eq. 6): the variance of a token's cosine similarities with all tokens
    of its crop.

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
        varieties.append(units.new_empty(units.shape[:3]))
        for top in range(0, height, crop):
            for left in range(0, width, crop):
                place = (slice(None), slice(top, top + crop), slice(left, left + crop))
                tokens = units[place].flatten(1, 2)
                similar = tokens @ tokens.transpose(1, 2)
                varieties[-1][place] = similar.var(dim=-1, correction=0).view(
                    units[place].shape[:3]
                )
    return torch.cat(varieties).flatten(1, 2)


def similarity_to(rows: Tensor, direction: Tensor) -> Tensor:
    """Multiply each row's unit vector by one vector; a sum of unit vectors gives the sum of cosine
    similarities.

    ParallelVLM's UV-Prune (Eq. 3) is the difference of two of these, in a late layer and in the
    first.

    Args:
        rows: ``[m, d]``.
        direction: ``[d]``, of any length and float dtype.

    Returns:
        ``[m]`` in fp32.

    Raises:
        ValueError: the shapes do not fit together.
    """
    require_shapes(rows=(rows, "m d"), direction=(direction, "d"))
    return torch.cat(
        [functional.normalize(part.float(), dim=-1) @ direction.float() for part in _parts(rows)]
    )


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    return states.split(max(1, _MOST_NUMBERS // max(1, states.shape[1:].numel())))
