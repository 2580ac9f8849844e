"""Implements scores of visual tokens with torch."""

import torch
from torch import Tensor
from torch.nn import functional


def temporal_change(frames: Tensor, before: Tensor | None, after: Tensor | None) -> Tensor:
    """Score tokens as :func:`apbv.kernels.temporal_change` does."""
    neighbours = [[] if frame is None else [frame[None]] for frame in (before, after)]
    units = functional.normalize(torch.cat([*neighbours[0], frames, *neighbours[1]]).float(), dim=-1)
    similar = (units[1:] * units[:-1]).sum(dim=-1)  # of each frame with the next
    ends = (int(before is None), int(after is None))  # where there is no neighbour
    similar = functional.pad(similar, (0, 0, *ends))
    known = functional.pad(similar.new_ones(len(similar) - sum(ends)), ends)
    count = (known[:-1] + known[1:])[:, None]
    return torch.where(count > 0, 1 - (similar[:-1] + similar[1:]) / count.clamp_min(1), 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int) -> Tensor:
    """Score tokens as :func:`apbv.kernels.spatial_variety` does."""
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


def similarity_to(rows: Tensor, direction: Tensor) -> Tensor:
    """Score rows as :func:`apbv.kernels.similarity_to` does."""
    return functional.normalize(rows.float(), dim=-1) @ direction.float()
