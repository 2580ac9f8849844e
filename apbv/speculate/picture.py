"""A picture of the visual tokens that a draft sees: sampled frames, with the kept tokens lit."""

import math

import numpy as np
from PIL import Image

_DIMMED = 0.25  # of the brightness, for tokens that were dropped
_GAP = 4  # pixels between frames


def draw_kept(frames: np.ndarray, kept: np.ndarray, columns: int | None = None) -> Image.Image:
    """Lay frames out in reading order; what the draft does not see of them is dark.

    Args:
        frames: uint8 ``[F, H, W, 3]``.
        kept: bool ``[F, h, w]``, the tokens of each frame.
        columns: frames per row; by default about as many as rows.
    """
    count, height, width, _ = frames.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, dtype=np.uint8)
    # Which token a pixel belongs to.
    down = np.arange(height) * kept.shape[1] // height
    across = np.arange(width) * kept.shape[2] // width
    for number, (frame, tokens) in enumerate(zip(frames, kept, strict=True)):
        light = np.where(tokens[down][:, across], 1.0, _DIMMED)[..., None]
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        canvas[top : top + height, left : left + width] = (frame * light).astype(np.uint8)
    return Image.fromarray(canvas)
