"""Implements scores of visual tokens with torch, some frames at a time."""

import torch
from torch import Tensor
from torch.nn import functional

_MOST_NUMBERS = 2**24  # of embeddings, that are widened at a time


def temporal_change(frames: Tensor, before: Tensor | None, after: Tensor | None) -> Tensor:
    """Score tokens as :func:`apbv.kernels.temporal_change` does."""
    ends = int(before is None), int(after is None)  # where there is no neighbour
    neighbours = ([] if frame is None else [frame[None]] for frame in (before, after))
    video = torch.cat([*next(neighbours), frames, *next(neighbours)])
    pairs = zip(_parts(video[:-1]), _parts(video[1:]), strict=True)
    similar = [functional.cosine_similarity(a.float(), b.float(), dim=-1, eps=1e-12) for a, b in pairs]
    similar = functional.pad(torch.cat(similar), (0, 0, *ends))  # of each frame with the next
    known = functional.pad(similar.new_ones(len(similar) - sum(ends)), ends)
    count = (known[:-1] + known[1:])[:, None]
    return torch.where(count > 0, 1 - (similar[:-1] + similar[1:]) / count.clamp_min(1), 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int) -> Tensor:
    """Score tokens as :func:`apbv.kernels.spatial_variety` does."""
    varieties = []
    for part in _parts(frames):
        units = functional.normalize(part.float(), dim=-1).unflatten(1, (height, width))
        varieties.append(units.new_empty(units.shape[:3]))
        for top in range(0, height, crop):
            for left in range(0, width, crop):
                place = (slice(None), slice(top, top + crop), slice(left, left + crop))
                tokens = units[place].flatten(1, 2)
                similar = tokens @ tokens.transpose(1, 2)
                varieties[-1][place] = similar.var(dim=-1, correction=0).view(units[place].shape[:3])
    return torch.cat(varieties).flatten(1, 2)


def similarity_to(rows: Tensor, direction: Tensor) -> Tensor:
    """Score rows as :func:`apbv.kernels.similarity_to` does."""
    return torch.cat([functional.normalize(part.float(), dim=-1) @ direction.float() for part in _parts(rows)])


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    return states.split(max(1, _MOST_NUMBERS // max(1, states.shape[1:].numel())))
