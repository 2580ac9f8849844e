"""Draws which visual tokens a draft sees: sampled frames, with the kept tokens bright."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_DIMMED = 0.25  # the brightness of tokens that were dropped
_GAP = 6  # pixels between frames
_CAPTION, _FONT_SIZE = 16, 12  # pixels: the strip above a frame, and the text in it
_CHARACTER = 7  # pixels: the average width of a character in the widest lines
_LEAST_WIDTH = 96  # pixels: smaller frames are enlarged, so that their numbers can be read


def draw_kept(
    frames: np.ndarray, kept: np.ndarray, numbers: Sequence[int], columns: int | None = None
) -> Image.Image:
    """Draw frames in reading order, each under its number, with the tokens dark that the draft does not see.

    Args:
        frames: uint8 ``[F, H, W, 3]``.
        kept: bool ``[F, h, w]``, the tokens of each frame.
        numbers: the frames' numbers in their video.
        columns: frames per row; by default about as many as rows.
    """
    count, height, width, _ = frames.shape
    scale = math.ceil(_LEAST_WIDTH / width)
    height, width = height * scale, width * scale
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    across, down = width + _GAP, _CAPTION + height + _GAP
    legend = (
        f"Bright: what the draft sees, {int(kept.sum())} of the {kept.size} visual tokens of these frames. "
        "Dark: what it does not see. The numbers are those of the frames in the video."
    )
    lines = textwrap.wrap(legend, max(1, (columns * across - _GAP) // _CHARACTER))
    canvas = Image.new("RGB", (columns * across - _GAP, rows * down + len(lines) * _CAPTION), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_FONT_SIZE)
    for place, (frame, tokens, number) in enumerate(zip(frames, kept, numbers, strict=True)):
        left, top = place % columns * across, place // columns * down
        draw.text((left, top), str(number), "black", font)
        canvas.paste(
            Image.fromarray(_lit(frame.repeat(scale, 0).repeat(scale, 1), tokens)), (left, top + _CAPTION)
        )
    for place, line in enumerate(lines):
        draw.text((0, rows * down + place * _CAPTION), line, "black", font)
    return canvas


def _lit(frame: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Darken a frame ``[H, W, 3]`` where its tokens ``[h, w]`` are false."""
    down = np.arange(frame.shape[0]) * tokens.shape[0] // frame.shape[0]
    across = np.arange(frame.shape[1]) * tokens.shape[1] // frame.shape[1]
    light = np.where(tokens[down][:, across], 1.0, _DIMMED)[..., None]
    return (frame * light).astype(np.uint8)
