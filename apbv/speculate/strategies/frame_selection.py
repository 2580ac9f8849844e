"""Selects a draft's visual tokens from the frames alone: what HIPPO's Figure 7 compares with.

Source: *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel
Speculative Decoding*, Section 6.4, which takes them from works that prune a single model.

- ``frames``: whole frames at regular intervals (HIPPO-Frame).
- ``transitions``: whole frames, those that are least like the frame before (HIPPO-FastVID).
- ``dycoke``: whole frames, and of those between them what changed (HIPPO-DyCoke).

HIPPO's authors have published no code for these. What the paper leaves open is decided here:
frames are compared by the mean of their tokens, as in :mod:`..prefilling.reduction.fastvid`; the
first frame is always kept; where less than a frame may be kept, it is evenly spaced tokens of the
first one; and the draft sees the kept tokens' own embeddings, with nothing merged into them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...hosts import HostGroup
from ...input.prompts.model_inputs import ModelInputs
from ...model.parts import ModelParts
from ...prefilling.reduction.choosing import keep_best, keep_even
from ...prefilling.reduction.dycoke import keep_by_dycoke
from ...prefilling.reduction.frames import KeptRows, Reducer, SharedVideo, num_in_frames
from ...prefilling.reduction.pruning import choose_rows
from ...prefilling.reduction.slowfast import spaced_frames


def keep_spaced_frames(video: SharedVideo, count: int) -> KeptRows:
    """Keep whole frames at regular intervals, at most ``count`` tokens."""
    num_kept = count // video.frame_size
    if num_kept == 0:
        return video.kept(keep_even(video.frame_size, count))
    return _kept_frames(video, torch.tensor(sorted(spaced_frames(video.num_frames, num_kept))))


def keep_frames_at_transitions(video: SharedVideo, count: int) -> KeptRows:
    """Keep the first frame and those least like the one before, at most ``count`` tokens.

    Collective.
    """
    means = functional.normalize(video.gather(video.embeddings.float().mean(dim=1)), dim=-1)
    num_kept = count // video.frame_size
    if num_kept == 0:
        return video.kept(keep_even(video.frame_size, count))
    similarity_to_previous = (means[1:] * means[:-1]).sum(dim=-1)
    after_transition = keep_best(-similarity_to_previous, num_kept - 1) + 1
    return _kept_frames(video, torch.cat([torch.zeros(1, dtype=torch.long), after_transition]))


def _kept_frames(video: SharedVideo, frames: Tensor) -> KeptRows:
    """Keep all tokens of these frames, ascending."""
    tokens_of_frame = torch.arange(video.frame_size)
    return video.kept((frames[:, None] * video.frame_size + tokens_of_frame).flatten())


FRAME_SELECTIONS: dict[str, Reducer] = {
    "frames": keep_spaced_frames,
    "transitions": keep_frames_at_transitions,
    "dycoke": keep_by_dycoke,
}


def keep_from_frames(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, name: str, count: int
) -> Tensor:
    """Return the visual tokens that a selection keeps, ascending; collective.

    Tokens that belong to no frame of a video (images, separators) are all kept, and count.

    Args:
        rows: ``[rows of this host's share, d]``, the draft's embeddings.
        name: one of :data:`FRAME_SELECTIONS`.
        count: how many visual tokens may be kept; at least one of the videos' is.
    """
    num_outside = inputs.num_visual_tokens - num_in_frames(parts, inputs)
    count_in_frames = max(1, count - num_outside)
    reducer = FRAME_SELECTIONS[name]
    is_kept, _, _ = choose_rows(parts, inputs, rows, hosts, reducer, count_in_frames)
    return is_kept.nonzero().flatten()
