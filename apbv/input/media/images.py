"""Images of a prompt: size known at once, pixels loaded on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...errors import PromptError
from ...reporting import raised_as
from .files import FileIdentity, Source
from .sizes import PixelLimits

_ORIENTATION = 0x0112  # EXIF orientation tag; from 5 on height and width are swapped


@dataclass(frozen=True)
class Picture:
    """Image of a prompt.

    Attributes:
        image: a file, a PIL image, or a tensor ``[3, H, W]``, which may have a shape but no pixels.
        height, width: in pixels, as it is shown: upright.
        limits: on its size for the model.
        resized: the height and width to which it is resized for the model because of these; None:
            as the model's processor does, or not known yet.
    """

    image: Any
    height: int
    width: int
    limits: PixelLimits = field(default_factory=PixelLimits)
    resized: tuple[int, int] | None = None

    @classmethod
    def of(cls, image: Any, limits: PixelLimits | None = None) -> "Picture":
        """Probe an image, reading only a file's header.

        Raises:
            PromptError: the file is missing, or not an image; a tensor has another shape.
        """
        limits = limits or PixelLimits()
        if isinstance(image, Tensor):
            if image.dim() != 3 or image.shape[0] != 3:
                raise PromptError(f"an image's tensor must be [3, H, W], not {list(image.shape)}")
            height, width = image.shape[-2:]
            return cls(image, height, width, limits)
        if not isinstance(image, Image.Image | str | Path):
            kind = type(image).__name__
            raise PromptError(
                f"an image must be a file, a PIL image or a tensor [3, H, W], not of type {kind}"
            )
        with _opened(image) as opened:
            height = opened.height
            width = opened.width
            if _orientation(opened) in range(5, 9):
                height, width = width, height
        if isinstance(image, str):
            image = Path(image)
        return cls(image, height, width, limits)

    @property
    def source(self) -> Source | None:
        """Identity of the image's content; None if it was given as pixels."""
        if not isinstance(self.image, Path):
            return None
        return Source(FileIdentity.of(self.image), size=self.resized)

    def load(self) -> Image.Image | Tensor:
        """Return the image in RGB, upright, what is transparent on white.

        Raises:
            PromptError: the file cannot be decoded, or has changed.
        """
        if isinstance(self.image, Tensor):
            return self.image
        with _opened(self.image) as opened:
            upright = opened if _orientation(opened) == 1 else ImageOps.exif_transpose(opened)
            in_rgb = _in_rgb(upright)
        if (in_rgb.height, in_rgb.width) != (self.height, self.width):
            raise PromptError(f"the image {self.image} was changed after it was probed")
        return in_rgb

    def without_pixels(self) -> Tensor:
        """Return a tensor of the image's shape, on which alone the prompt's length depends."""
        height, width = self.resized or (self.height, self.width)
        return torch.empty(3, height, width, dtype=torch.uint8, device="meta")


def _orientation(image: Image.Image) -> int:
    """Return the orientation stored before an image's pixels, 1 for an upright one."""
    if image.format == "TIFF":  # which Pillow itself shows upright
        return 1
    # A PNG's own method would decode all of it, in case the tag comes after the pixels.
    return Image.Image.getexif(image).get(_ORIENTATION, 1)


def _in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, what is transparent on white, with values of any depth scaled.

    transformers ignores transparency, and Pillow cuts values off at 255.
    """
    transparent = image.info.get("transparency")
    if image.mode[0] == "I" and isinstance(transparent, int):  # of 16-bit gray, one value
        hidden = Image.fromarray(np.asarray(image) == transparent)
        image = image.copy()
        del image.info["transparency"]
        image = _in_rgb(image)
        image.paste("white", mask=hidden)
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode[0] in "IF":  # integers of more than 8 bits, and floats
        values = np.asarray(image, np.float64)
        low, high = _range_of(values, image.mode)
        scaled = (values - low) * (255 / max(high - low, 1e-9))
        scaled = np.nan_to_num(scaled, posinf=255, neginf=0)
        image = Image.fromarray(scaled.round().clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _range_of(values: np.ndarray, mode: str) -> tuple[float, float]:
    """Guess the values of black and of white in an image of integers or floats.

    Args:
        mode: Pillow's.
    """
    finite = values[np.isfinite(values)]
    low = finite.min(initial=0)
    high = finite.max(initial=0)
    # Signed: there is no convention.
    if low < 0:
        return low, high
    # 16 bits.
    is_16_bit = len(mode) > 1 or (mode == "I" and 255 < high < 65536)
    if is_16_bit:
        return low, 65535
    # More.
    if high > 255:
        return low, high
    # 8 bits.
    if mode == "I" or high >= 16:
        return low, 255
    # Floats from 0 to 1, or little more.
    return low, max(high, 1)


@contextmanager
def _opened(image: Any) -> Iterator[Image.Image]:
    """Open an image file; PromptError if it cannot be read, up to the end of the block."""
    if isinstance(image, Image.Image):
        yield image
        return
    # Of a damaged file, Pillow's decoders raise nearly anything.
    with (
        raised_as(PromptError, f"cannot read the image {image}", Exception),
        Image.open(image) as opened,
    ):
        yield opened
