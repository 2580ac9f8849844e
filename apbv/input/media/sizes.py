"""Sizes of images and of a video's frames, within limits that a request sets."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import PromptError

# The tokens that an image or a frame may have where a request enlarges it, as in qwen-vl-utils.
_MOST_TOKENS = 16384
# Every frame may have its least pixels times this, however few total_pixels leaves it, as in
# qwen-vl-utils.
_ABOVE_LEAST = 1.05
_NAMES = "min_pixels, max_pixels, total_pixels, resized_height and resized_width"


@dataclass(frozen=True)
class PixelLimits:
    """Limits on the pixels of an image or of a video's frame, besides the model's own.

    Attributes:
        least, most: the limits; None: the model's.
        total: of a video, the most pixels of all frames together, where those of a temporal patch
            count once.
        exact: height and width instead, up to rounding to whole visual tokens.
    """

    least: int | None = None
    most: int | None = None
    total: int | None = None
    exact: tuple[int, int] | None = None

    def size_of_frames(
        self, video_processor, frames: Tensor, metadata: Any
    ) -> tuple[int, int] | None:
        """Return the height and width to which frames are resized; None: the processor's own.

        As in qwen-vl-utils, they keep about their aspect ratio and are a whole number of visual
        tokens.

        Args:
            video_processor: of the model.
            frames: all frames of the video, which need no storage.
            metadata: transformers' metadata of the video.

        Raises:
            PromptError: the model's frames all have one size, or none lies within the limits.
        """
        if self == PixelLimits():
            return None
        # VideoLLaMA 3's tokens are compared in frames of its own size (repeats.py).
        has_sizes = hasattr(video_processor, "merge_size") and not hasattr(
            video_processor, "use_token_compression"
        )
        if not has_sizes:
            raise PromptError(f"{_NAMES} of a video do not apply to this model")
        factor = video_processor.patch_size * video_processor.merge_size
        self._require_reasonable(factor, "a video's frames")
        if self.exact is not None:
            return _rounded(self.exact, factor)
        batch = video_processor(
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
        grid = batch["video_grid_thw"]
        height, width = (grid[0, 1:] * video_processor.patch_size).tolist()
        most = self._most_of_a_frame(len(frames), video_processor.temporal_patch_size, factor)
        least = self.least or min(factor**2, height * width)
        most = most or max(least, height * width)
        if least <= height * width <= most:
            return None
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        frame_height, frame_width = frames.shape[-2:]
        try:
            # An int is declared, but any number of pixels will do.
            size = smart_resize(frame_height, frame_width, factor, least, most)  # type: ignore[arg-type]
        except ValueError as error:
            raise PromptError(f"a video's frames cannot be resized: {error}") from error
        if self.total is not None:
            least = 1  # as in qwen-vl-utils, total_pixels goes before min_pixels
        self._require_within(size, least, most, factor, "a video's frames")
        return size

    def size_of_image(self, image_processor, image: Tensor, counted: int) -> tuple[int, int] | None:
        """Return the height and width to which an image is resized; None: the processor's own.

        The processor computes this size when it is called with these limits.

        Args:
            image_processor: of the model.
            image: ``[3, H, W]``, which needs no storage.
            counted: how many times the processor counts a pixel.

        Raises:
            PromptError: the model's images have no such limits, or no size lies within them.
        """
        if self == PixelLimits():
            return None
        limits_of_model = getattr(image_processor, "size", None) or {}
        least_of_model = limits_of_model.get("shortest_edge")
        most_of_model = limits_of_model.get("longest_edge")
        has_sizes = hasattr(image_processor, "merge_size")
        if not has_sizes or least_of_model is None or most_of_model is None:
            raise PromptError(f"{_NAMES} of an image do not apply to this model")
        factor = image_processor.patch_size * image_processor.merge_size
        self._require_reasonable(factor, "an image")
        if self.exact is not None:
            return _rounded(self.exact, factor)
        least = self.least or least_of_model // counted
        most = self.most or most_of_model // counted
        # One that is given moves the model's other one.
        if not self.least:
            least = min(least, most)
        if not self.most:
            most = max(most, least)
        limits = {"shortest_edge": least * counted, "longest_edge": most * counted}
        try:
            batch = image_processor(images=[image], size=limits, return_tensors="pt")
        except ValueError as error:
            raise PromptError(f"an image cannot be resized: {error}") from error
        grid = batch["image_grid_thw"]
        height, width = (grid[0, 1:] * image_processor.patch_size).tolist()
        size = (height, width)
        self._require_within(size, self.least or 1, self.most or height * width, factor, "an image")
        return size

    def _most_of_a_frame(self, num_frames: int, num_merged: int, factor: int) -> float | None:
        """Return the most pixels of a frame, by qwen-vl-utils' rule; None: the model's."""
        if self.total is None:
            return self.most
        least = self.least or factor**2
        shared = max(self.total / num_frames * num_merged, int(least * _ABOVE_LEAST))
        return shared if self.most is None else min(self.most, shared)

    def _require_reasonable(self, factor: int, what: str) -> None:
        """Reject to enlarge something beyond any use."""
        height, width = self.exact or (1, self.least or 1)
        if height * width > _MOST_TOKENS * factor**2:
            raise PromptError(
                f"{what} may be enlarged to {_MOST_TOKENS * factor**2} pixels, not {height * width}"
            )

    def _require_within(
        self, size: tuple[int, int], least: float, most: float, factor: int, what: str
    ) -> None:
        height, width = size
        if not least <= height * width <= most:
            raise PromptError(
                f"{what} cannot have {least:.0f} to {most:.0f} pixels: the sides are multiples of "
                f"{factor}, and the nearest size is {height}x{width}"
            )


def resized(image_processor, image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize an image ``[3, H, W]`` to a height and width, as the model's processor resizes it."""
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.image_utils import SizeDict

    height, width = size
    target = SizeDict(height=height, width=width)
    return TorchvisionBackend.resize(
        image_processor, image, target, resample=image_processor.resample
    )


def _rounded(size: tuple[int, int], factor: int) -> tuple[int, int]:
    height, width = (max(1, round(side / factor)) * factor for side in size)
    return height, width
