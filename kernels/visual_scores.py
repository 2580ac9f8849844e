"""Scores of visual tokens by their embeddings: cosine similarities, accumulated in fp32.

As in ``torch.nn.functional.normalize``, a vector is divided by its norm or 1e-12: zeros are similar to nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .backends import BackendError, choose, requested


def temporal_change(
    frames: Tensor, before: Tensor | None = None, after: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """HIPPO's s_temp (Eq. 4): 1 minus the mean cosine similarity with the same place in the adjacent frames.

    Args:
        frames: ``[F, h * w, d]``.
        before, after: ``[h * w, d]``, the neighbours of the first and the last one; None where the video ends.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        ``[F, h * w]`` in fp32; 0 for a video of a single frame, which changes nowhere.

    Raises:
        ValueError: a neighbour is of another shape or dtype than the frames.
        BackendError: the back end cannot be used here.
    """
    for name, frame in (("before", before), ("after", after)):
        if frame is not None and (frame.shape != frames.shape[1:] or frame.dtype != frames.dtype):
            raise ValueError(
                f"{name} is {frame.dtype} {list(frame.shape)}, frames {frames.dtype} {list(frames.shape)}"
            )
    chosen = choose(backend, frames)
    if not frames.numel():
        return frames.new_zeros(frames.shape[:2], dtype=torch.float32)
    if chosen == "reference":
        return reference.temporal_change(frames, before, after)
    if chosen == "triton":
        from . import triton_visual_scores

        return triton_visual_scores.temporal_change(frames, before, after)
    neighbours = [[] if frame is None else [frame[None]] for frame in (before, after)]
    units = functional.normalize(torch.cat([*neighbours[0], frames, *neighbours[1]]).float(), dim=-1)
    similar = (units[1:] * units[:-1]).sum(dim=-1)  # of each frame with the next
    ends = (int(before is None), int(after is None))  # where there is no neighbour
    similar = functional.pad(similar, (0, 0, *ends))
    known = functional.pad(similar.new_ones(len(similar) - sum(ends)), ends)
    count = (known[:-1] + known[1:])[:, None]
    return torch.where(count > 0, 1 - (similar[:-1] + similar[1:]) / count.clamp_min(1), 0.0)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int = 5, *, backend: str = "auto") -> Tensor:
    """HIPPO's s_spa (Eq. 6): the variance of a token's cosine similarities with all tokens of its crop.

    Args:
        frames: ``[F, h * w, d]``, row by row.
        crop: tokens per side, 5 in the paper for all models; crops do not overlap, and those at the edges are as
            large as what is left.
        backend: see :mod:`apbv.kernels.backends`; Triton's crops have up to 11 tokens per side.

    Returns:
        ``[F, h * w]`` in fp32.

    Raises:
        ValueError: a frame is not of h * w tokens, or crop is not positive.
        BackendError: the back end cannot be used here.
    """
    if frames.shape[1] != height * width:
        raise ValueError(f"a frame of {height} x {width} tokens has not {frames.shape[1]}")
    if crop < 1:
        raise ValueError(f"crop must be positive, not {crop}")
    chosen = choose(backend, frames)
    if not frames.numel():
        return frames.new_zeros(frames.shape[:2], dtype=torch.float32)
    if chosen == "reference":
        return reference.spatial_variety(frames, height, width, crop)
    if chosen == "triton":
        from . import triton_visual_scores

        largest = triton_visual_scores.LARGEST_CROP
        if crop <= largest:
            return triton_visual_scores.spatial_variety(frames, height, width, crop)
        if requested(backend) == "triton":
            raise BackendError(f"the triton back end has crops of up to {largest} tokens per side, not {crop}")
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


def similarity_to(rows: Tensor, direction: Tensor, *, backend: str = "auto") -> Tensor:
    """Each row's unit vector times one vector: with a sum of unit vectors, the sum of cosine similarities.

    ParallelVLM's UV-Prune (Eq. 3) is the difference of two of these, in a late layer and in the first.

    Args:
        rows: ``[m, d]``.
        direction: ``[d]``, of any length and float dtype.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        ``[m]`` in fp32.

    Raises:
        ValueError: the shapes do not fit together.
        BackendError: the back end cannot be used here.
    """
    if rows.dim() != 2 or direction.shape != rows.shape[1:]:
        raise ValueError(f"rows of shape {list(rows.shape)} have no direction of shape {list(direction.shape)}")
    chosen = choose(backend, rows)
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.float32)
    if chosen == "reference":
        return reference.similarity_to(rows, direction)
    if chosen == "triton":
        from . import triton_visual_scores

        return triton_visual_scores.similarity_to(rows, direction)
    return functional.normalize(rows.float(), dim=-1) @ direction.float()
