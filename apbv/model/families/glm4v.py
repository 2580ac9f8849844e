"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR."""

from typing import Any

from transformers import PreTrainedModel

from .qwen_vl import QwenVL


class Glm4v(QwenVL):
    """GLM's models, which take images and video as Qwen's do.

    One placeholder stands for both. The seconds of each temporal patch are told.
    """

    text_tokens_per_patch = 5

    def num_frames_told(self, num_frames: int, num_merged: int) -> int:
        # The processor rejects a video that is shorter than one patch.
        return max(num_frames, num_merged)

    def num_times_counted(self, image_processor: Any) -> int:
        # It counts the pixels of a whole temporal patch.
        return image_processor.temporal_patch_size


class GlmOcr(Glm4v):
    """GLM-OCR, which is prompted as GLM-4.6V is."""

    def packed_vision_tower(self, model: Any) -> PreTrainedModel | None:
        # Its blocks take no arguments of an attention, so that it attends to each frame by itself.
        return None
