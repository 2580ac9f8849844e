"""This module chooses the visual tokens that a draft sees, by scores of the prefill or of the frames themselves.

Kept tokens stay at their positions.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kernels import spatial_variety, temporal_change
from ..model.parts import ModelParts
from .observers import gather_scores
from .scores import standardised


def frame_shape(parts: ModelParts, inputs: ModelInputs) -> tuple[int, int]:
    """Return the rows and columns of visual tokens in one frame of the prompt's video."""
    count = inputs.visual.rows_per_temporal_patch
    if not parts.uses_mrope:
        side = round(count**0.5)
        return side, count // side
    first = inputs.position_ids[:, 0, parts.is_visual(inputs.input_ids[0])][:, :count]
    height = len(first[1].unique())
    return height, count // height


def kept_by_frame(parts: ModelParts, inputs: ModelInputs, kept: Tensor | None) -> Tensor | None:
    """Return kept visual tokens as bool ``[frames, h, w]``; None where they are not known, or not of a video."""
    if kept is None or inputs.visual is None or inputs.visual.kind != "video":
        return None
    height, width = frame_shape(parts, inputs)
    mask = torch.zeros(inputs.num_visual_tokens, dtype=torch.bool)
    mask[kept] = True
    return mask[: len(mask) // (height * width) * height * width].view(-1, height, width)


def local_semantics(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, terms: Collection[str]
) -> Tensor:
    """Add HIPPO's s_temp and s_spa, each z-scored within a frame; ``[visual tokens]`` on every host. Collective.

    Every host scores the frames that it encoded, for which it needs one frame of either neighbouring host.

    Args:
        rows: ``[rows of this host's piece, d]``, the vision tower's output.
        terms: ``"time"`` for s_temp, ``"space"`` for s_spa.
    """
    height, width = frame_shape(parts, inputs)
    visual, size = inputs.visual, inputs.visual.rows_per_temporal_patch
    hidden = parts.language_model.config.hidden_size
    frames = rows[: len(rows) // size * size, :hidden].reshape(-1, size, hidden)
    ends = frames[[0, -1]] if len(frames) else frames.new_zeros(2, size, hidden)
    ends_of_hosts = hosts.all_gather(ends).wait()
    before = after = None
    if not visual.replicated and len(frames):
        with_frames = [host for host in range(hosts.size) if len(visual.pieces[host]) >= size]
        place = with_frames.index(hosts.rank)
        before = ends_of_hosts[with_frames[place - 1], 1] if place else None
        after = ends_of_hosts[with_frames[place + 1], 0] if place + 1 < len(with_frames) else None
    scores = torch.zeros(frames.shape[:2], device=frames.device)
    if "time" in terms:
        scores = scores + standardised(temporal_change(frames, before, after), unit=1.0)
    if "space" in terms:
        scores = scores + standardised(spatial_variety(frames, height, width), unit=1.0)
    # A row that belongs to no frame (a separator at the video's end) is never pruned.
    scores = torch.cat([scores.flatten(), scores.new_full((len(rows) - scores.numel(),), float("inf"))])
    pieces = [
        piece if host == 0 or not visual.replicated else range(0) for host, piece in enumerate(visual.pieces)
    ]
    owned = [torch.arange(piece.start, piece.stop) for piece in pieces]
    return gather_scores(scores[: len(pieces[hosts.rank])], owned, hosts)


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the highest scores, ascending; of equal scores the earlier place."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def keep_best_per_frame(scores: Tensor, per_frame: int, count: int) -> Tensor:
    """Return the places of every frame's highest scores, as many of each frame, up to a difference of one.

    With fewer places than frames, evenly spaced frames keep one each. Rows after the last frame are kept first.
    """
    num_frames = len(scores) // per_frame
    in_frames = num_frames * per_frame
    behind = torch.arange(in_frames, len(scores))[:count]
    ends = torch.arange(num_frames + 1) * (count - len(behind)) // num_frames
    order = scores[:in_frames].view(num_frames, per_frame).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(per_frame) < ends.diff()[:, None]
    places = order + torch.arange(num_frames)[:, None] * per_frame
    return torch.cat([places[chosen].sort().values, behind])


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


def keep_even(num_tokens: int, count: int) -> Tensor:
    """Return evenly spaced places, the first and the last among them."""
    return torch.arange(count) * (num_tokens - 1) // max(1, count - 1)


def keep_uniform_frames(num_tokens: int, per_frame: int, count: int) -> Tensor:
    """Return the places of evenly spaced whole frames, as many as ``count`` allows, or of a part of one frame."""
    num_frames = -(-num_tokens // per_frame)
    chosen = max(1, count // per_frame)
    frames = torch.linspace(0, num_frames - 1, chosen).round().long()
    places = (frames[:, None] * per_frame + torch.arange(per_frame)).flatten()
    return places[places < num_tokens].unique()[: max(count, 1)]


def keep_random(num_tokens: int, count: int, seed: int) -> Tensor:
    """Return random places, ascending."""
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values
