"""Sizes of a video's frames, within limits that a request sets."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .visual import PromptError


@dataclass(frozen=True)
class PixelLimits:
    """Limits on the pixels of a video's frame, besides the model's own.

    Attributes:
        least, most: the limits; None: the model's.
    """

    least: int | None = None
    most: int | None = None

    def size(self, video_processor, frames: Tensor, metadata: Any) -> tuple[int, int] | None:
        """Return the height and width to which frames are resized; None: as the model's processor does anyway.

        As in qwen-vl-utils, they keep about their aspect ratio and are a whole number of visual tokens.

        Args:
            video_processor: of the model.
            frames: all frames of the video, which need no storage.
            metadata: transformers' metadata of the video.

        Raises:
            PromptError: the model's frames all have one size, or none lies within the limits.
        """
        if self.least is None and self.most is None:
            return None
        # VideoLLaMA 3's tokens are compared in frames of its own size (repeats.py).
        has_sizes = hasattr(video_processor, "merge_size") and not hasattr(video_processor, "use_token_compression")
        if not has_sizes:
            raise PromptError("min_pixels and max_pixels of a video do not apply to this model")
        options = {"do_sample_frames": False, "return_tensors": "pt"}
        grid = video_processor(videos=[frames], video_metadata=[metadata], **options)["video_grid_thw"]
        height, width = (grid[0, 1:] * video_processor.patch_size).tolist()
        factor = video_processor.patch_size * video_processor.merge_size
        least = self.least or min(factor**2, height * width)
        most = self.most or max(least, height * width)
        if least <= height * width <= most:
            return None
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        try:
            found = smart_resize(*frames.shape[-2:], factor=factor, min_pixels=least, max_pixels=most)
        except ValueError as error:
            raise PromptError(f"a video's frames cannot be resized: {error}") from error
        if not least <= found[0] * found[1] <= most:
            raise PromptError(
                f"a video's frames cannot have {least} to {most} pixels: the sides are multiples of {factor}, and the "
                f"nearest size is {found[0]}x{found[1]}"
            )
        return found
