"""This module scores visual tokens as HIPPO does: by change over time, variety in space, and attention.

Source: *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel Speculative
Decoding*, Section 5.1. There the scores choose what a draft sees. As a reduction before the language model, time
and space choose alone what the model itself sees: the question's attention is not known before it has run.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ...hosts import HostGroup
from ...input.model_inputs import ModelInputs
from ...kernels import spatial_variety, temporal_change
from ...model.parts import ModelParts
from .choosing import keep_best, standardised
from .frames import SharedVideo, shared_video, videos_of
from .kept import KeptRows


def keep_by_hippo(video: SharedVideo, count: int) -> KeptRows:
    """Keep the ``count`` tokens of the whole video with the highest s_temp + s_spa; collective."""
    best = keep_best(visual_semantics(video, ("time", "space")).flatten(), count)
    return KeptRows.chosen(video, best)


def visual_semantics(video: SharedVideo, terms: Collection[str]) -> Tensor:
    """Add HIPPO's s_temp (Eq. 4) and s_spa (Eq. 6), each z-scored within a frame; collective.

    Every host scores the frames that it has, for which it needs one frame of either neighbouring host.

    Args:
        terms: ``"time"`` for s_temp, ``"space"`` for s_spa.

    Returns:
        ``[T, h * w]``, the same on every host, in host memory.
    """
    frames = video.embeddings
    neighbours = [
        [frame for frame in (share.start - 1, share.stop) if share and 0 <= frame < video.num_frames]
        for share in video.shares
    ]
    beside = dict(zip(neighbours[video.hosts.rank], video.fetch(neighbours, frames), strict=True))
    scores = torch.zeros(frames.shape[:2], device=frames.device)
    if "time" in terms:
        before, after = beside.get(video.mine.start - 1), beside.get(video.mine.stop)
        scores = scores + standardised(temporal_change(frames, before, after), unit=1.0)
    if "space" in terms:
        scores = scores + standardised(spatial_variety(frames, video.height, video.width), unit=1.0)
    return video.gather(scores)


def local_semantics(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, terms: Collection[str]
) -> Tensor:
    """Score all visual tokens of a prompt as :func:`visual_semantics` does; collective.

    A row that belongs to no frame (a separator at a video's end) has an infinite score: it is never left out.

    Args:
        rows: ``[rows of this host's share, d]``, the vision tower's output.

    Returns:
        ``[visual tokens]`` on every host, in host memory.
    """
    scores = torch.full((inputs.num_visual_tokens,), float("inf"))
    for video in videos_of(parts, inputs):
        place = video.in_frames
        scores[place.start : place.stop] = visual_semantics(
            shared_video(parts, inputs, video, rows, hosts), terms
        ).flatten()
    return scores


def with_relevance(parts: ModelParts, inputs: ModelInputs, semantics: Tensor, attention: Tensor) -> Tensor:
    """Add HIPPO's s_attn, z-scored within a frame, to the terms of time and space (Eq. 7).

    Args:
        semantics: ``[visual tokens]``, as :func:`local_semantics` returns them.
        attention: ``[visual tokens]``, s_attn.
    """
    scores = semantics.clone()
    for video in videos_of(parts, inputs):
        place = slice(video.in_frames.start, video.in_frames.stop)
        scores[place] += standardised(attention[place].view(-1, video.height * video.width)).flatten()
    return scores
