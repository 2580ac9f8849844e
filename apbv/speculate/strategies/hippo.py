"""Scores visual tokens as HIPPO does: by change over time, variety in space, and attention.

Source: *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel
Speculative Decoding*, Section 5.1.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ...config import HIPPO_TERMS
from ...hosts import HostGroup
from ...input.prompts.model_inputs import ModelInputs
from ...kernels import spatial_variety, temporal_change
from ...model.parts import ModelParts
from ...prefilling.encoding.vision import sharing_hosts
from ...prefilling.reduction.frames import shared_video, videos_of


def local_semantics(
    parts: ModelParts,
    inputs: ModelInputs,
    rows: Tensor,
    hosts: HostGroup,
    terms: Collection[str] = HIPPO_TERMS,
) -> Tensor:
    """Add HIPPO's s_temp (Eq. 4) and s_spa (Eq. 6), each z-scored within a frame; collective.

    Every host scores the frames that it has, for which it needs one frame of either neighbouring
    host, if it has not all of them itself. A row that belongs to no frame (a separator at a video's
    end) has an infinite score: it is never pruned.

    Args:
        rows: ``[rows of this host's share, d]``, the vision tower's output.
        terms: ``"time"`` for s_temp, ``"space"`` for s_spa; another one is added elsewhere.

    Returns:
        ``[visual tokens]`` on every host, in CPU memory.
    """
    visual = inputs.visual
    assert visual is not None, "the prompt has visual tokens"
    result = torch.full((inputs.num_visual_tokens,), float("inf"))
    for place in videos_of(parts, inputs):
        sharing = sharing_hosts(visual, hosts)
        video = shared_video(parts, inputs, place, rows, sharing)
        frames = video.embeddings
        num_frames = video.num_frames
        mine = video.mine

        # Fetch the frames before and after this host's own.
        neighbours = [_neighbours(share, num_frames) for share in video.shares]
        fetched = video.fetch(neighbours, frames)
        beside = dict(zip(neighbours[sharing.rank], fetched, strict=True))

        scores = torch.zeros(frames.shape[:2], device=frames.device)
        if "time" in terms:
            change = temporal_change(frames, beside.get(mine.start - 1), beside.get(mine.stop))
            scores = scores + standardised(change, unit=1.0)
        if "space" in terms:
            variety = spatial_variety(frames, video.height, video.width)
            scores = scores + standardised(variety, unit=1.0)
        result[place.in_frames.start : place.in_frames.stop] = video.gather(scores).flatten()
    return result


def _neighbours(share: range, num_frames: int) -> list[int]:
    """Return the frames before and after a share, where there are any."""
    if not share:
        return []
    return [frame for frame in (share.start - 1, share.stop) if 0 <= frame < num_frames]


def with_relevance(
    parts: ModelParts, inputs: ModelInputs, semantics: Tensor, attention: Tensor
) -> Tensor:
    """Add HIPPO's s_attn, z-scored within a frame, to the terms of time and space (Eq. 7).

    Args:
        semantics: ``[visual tokens]``, as :func:`local_semantics` returns them.
        attention: ``[visual tokens]``, s_attn.
    """
    scores = semantics.clone()
    for video in videos_of(parts, inputs):
        place = slice(video.in_frames.start, video.in_frames.stop)
        by_frame = attention[place].view(-1, video.height * video.width)
        scores[place] += standardised(by_frame).flatten()
    return scores


def standardised(scores: Tensor, unit: float | None = None) -> Tensor:
    """Return z-scores (HIPPO, before its Eq. 7): zero mean and unit deviation within a frame.

    A frame is the last dimension. Equal scores give 0. Deviations of a millionth of ``unit`` count
    as rounding errors, and are damped.

    Args:
        unit: 1 for scores that consist of cosines, whose rounding errors do not shrink with the
            scores. None: the frame's mean score, so that a multiple of the scores gives the same:
            attention shrinks with the number of tokens that share it.
    """
    mean = scores.mean(dim=-1, keepdim=True)
    magnitude = mean.abs() if unit is None else torch.full_like(mean, unit)
    rounding = 1e-6 * magnitude
    # Not torch.std, which warns of no frames at all, as a host may have.
    spread = (scores - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return (scores - mean) / (spread + rounding).clamp(min=torch.finfo(scores.dtype).tiny)
