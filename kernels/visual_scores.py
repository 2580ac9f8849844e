"""This module scores visual tokens by the cosine similarities of their embeddings, accumulated in fp32.

As in ``torch.nn.functional.normalize``, a vector is divided by its norm or 1e-12: zeros are similar to nothing.
"""

import torch
from torch import Tensor

from .backends import BackendError, choose, implementation, requested

LARGEST_TRITON_CROP = 11  # tokens per side: more similarities than 128 x 128 do not fit the registers


def temporal_change(
    frames: Tensor, before: Tensor | None = None, after: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Compute HIPPO's s_temp (Eq. 4): 1 minus the mean cosine similarity with the same place in adjacent frames.

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
    return implementation("temporal_change", chosen)(frames, before, after)


def spatial_variety(frames: Tensor, height: int, width: int, crop: int = 5, *, backend: str = "auto") -> Tensor:
    """Compute HIPPO's s_spa (Eq. 6): the variance of a token's cosine similarities with all tokens of its crop.

    Args:
        frames: ``[F, h * w, d]``, row by row.
        height, width: h and w in tokens.
        crop: tokens per side, 5 in the paper for all models; crops do not overlap, and those at the edges are as
            large as what is left.
        backend: see :mod:`apbv.kernels.backends`; Triton's crops have up to 11 tokens per side.

    Returns:
        ``[F, h * w]`` in fp32.

    Raises:
        ValueError: a frame does not have h * w tokens, or crop is not positive.
        BackendError: the back end cannot be used here.
    """
    if frames.shape[1] != height * width:
        raise ValueError(f"a frame of {height} x {width} tokens cannot have {frames.shape[1]} tokens")
    if crop < 1:
        raise ValueError(f"crop must be positive, not {crop}")
    chosen = choose(backend, frames)
    if not frames.numel():
        return frames.new_zeros(frames.shape[:2], dtype=torch.float32)
    if chosen == "triton" and crop > LARGEST_TRITON_CROP:
        if requested(backend) == "triton":
            limit = LARGEST_TRITON_CROP
            raise BackendError(f"the triton back end has crops of up to {limit} tokens per side, not {crop}")
        chosen = "torch"
    return implementation("spatial_variety", chosen)(frames, height, width, crop)


def similarity_to(rows: Tensor, direction: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiply each row's unit vector by one vector; a sum of unit vectors gives the sum of cosine similarities.

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
    return implementation("similarity_to", chosen)(rows, direction)
