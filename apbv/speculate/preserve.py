"""This module chooses the visual tokens that a draft sees, by scores of the prefill.

Kept tokens stay at their positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..input.model_inputs import ModelInputs
from ..model.parts import ModelParts
from ..prefilling.reduction.choosing import keep_even
from ..prefilling.reduction.frames import frame_shape


def kept_by_frame(parts: ModelParts, inputs: ModelInputs, kept: Tensor | None) -> Tensor | None:
    """Return kept visual tokens as bool ``[frames, h, w]``; None where they are not known, or not of one video."""
    if kept is None or inputs.visual is None or [item.kind for item in inputs.visual.items] != ["video"]:
        return None
    height, width = frame_shape(parts, inputs)
    mask = torch.zeros(inputs.num_visual_tokens, dtype=torch.bool)
    mask[kept] = True
    return mask[: len(mask) // (height * width) * height * width].view(-1, height, width)


def keep_best_per_frame(scores: Tensor, frames: Sequence[range], count: int) -> Tensor:
    """Return the places of every frame's highest scores, the same share of each frame, up to a difference of one.

    With fewer places than frames, evenly spaced frames keep one each. Places of no frame are kept first; of equal
    scores the earlier place is kept.

    Args:
        scores: ``[visual tokens]``.
        frames: the places of each frame, ascending; images are frames, too.
    """
    frame_of = torch.full((len(scores),), len(frames))
    lengths = torch.tensor([len(frame) for frame in frames])
    places = torch.cat([torch.arange(frame.start, frame.stop) for frame in frames])
    frame_of[places] = torch.arange(len(frames)).repeat_interleave(lengths)
    outside = (frame_of == len(frames)).nonzero().flatten()[:count]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    quotas = (ends * (count - len(outside)) // ends[-1]).diff()
    best = places[scores[places].argsort(descending=True, stable=True)]
    best = best[frame_of[best].argsort(stable=True)]  # of the first frame, from its highest score, and so on
    rank = torch.arange(len(best)) - ends[:-1].repeat_interleave(lengths)
    return torch.cat([best[rank < quotas.repeat_interleave(lengths)], outside]).sort().values


def keep_specvlm(attention: Tensor, count: int, share: float = 0.4) -> Tensor:
    """Return SpecVLM's choice: the most attended tokens, and evenly spaced ones of the rest.

    The first stage keeps the fewest tokens that together hold ``share`` of the attention (of these at most
    ``count``, the best), the second fills up to ``count`` with tokens evenly spaced among the others. The most
    attended tokens lie in few frames; the spaced ones let the draft see something of all frames.

    Args:
        attention: ``[visual tokens]``, at least 0.
        share: 0.4 in the authors' code (github.com/zju-jiyicheng/SpecVLM).
    """
    order = attention.argsort(descending=True, stable=True)
    held = attention[order].double().cumsum(dim=0)
    num_attended = min(count, int((held < share * held[-1]).sum()) + 1)
    attended, others = order[:num_attended], order[num_attended:].sort().values
    spaced = others[keep_even(len(others), count - num_attended)]
    return torch.cat([attended, spaced]).sort().values


def keep_uniform_frames(frames: Sequence[range], count: int) -> Tensor:
    """Return the places of evenly spaced whole frames, as many as ``count`` allows, or of a part of one frame.

    Args:
        frames: the places of each frame, ascending; images are frames, too.
    """
    lengths = torch.tensor([len(frame) for frame in frames])
    chosen = min(len(frames), max(1, count // int(lengths.min())))
    picked = torch.linspace(0, len(frames) - 1, chosen).round().long()
    while chosen > 1 and lengths[picked].sum() > count:
        chosen -= 1
        picked = torch.linspace(0, len(frames) - 1, chosen).round().long()
    places = torch.cat([torch.arange(frames[frame].start, frames[frame].stop) for frame in picked.tolist()])
    return places[: max(count, 1)]


def keep_random(num_tokens: int, count: int, seed: int) -> Tensor:
    """Return random places, ascending."""
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values
