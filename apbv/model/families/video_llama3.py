"""VideoLLaMA 3: patches of any number, without M-RoPE; the processor may leave tokens out."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from .base import ModelFamily


class VideoLlama3(ModelFamily):
    """VideoLLaMA 3, which tells each frame's time: ",Time 1234.5s:".

    The processor says for each image and video how many patches make a token.
    """

    text_tokens_per_patch = 11

    def packed_vision_tower(self, model: Any) -> PreTrainedModel | None:
        return model.model.vision_model

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        num_patches, height, width = batch["video_grid_thw"][0].tolist()
        merge_size = int(batch["video_merge_sizes"])
        return num_patches, num_patches * height * width // merge_size**2
