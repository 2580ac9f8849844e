"""The vision-language models of Qwen: a grid of patches for each image or video, and M-RoPE."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .base import ModelFamily


class QwenVL(ModelFamily):
    """Qwen2-VL and Qwen2.5-VL."""

    uses_mrope = True

    def packed_vision_tower(self, model: Any) -> PreTrainedModel | None:
        return model.model.visual

    @property
    def patches_per_row(self) -> int | None:
        return self._config.vision_config.spatial_merge_size**2

    def is_image(self, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        types = batch.get("mm_token_type_ids")
        if types is None:
            return super().is_image(input_ids, batch)
        # GLM has one placeholder, whose type tells which it is.
        return torch.as_tensor(types).cpu()[0] == 1

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        num_patches, height, width = batch["video_grid_thw"][0].tolist()
        return num_patches, num_patches * height * width // self.patches_per_row

    def rotary_positions(self, model: Any, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        grids = on_cpu(batch, "image_grid_thw", "video_grid_thw")
        seconds = on_cpu(batch, "second_per_grid_ts")
        types = torch.as_tensor(batch["mm_token_type_ids"]).cpu()
        rope_index = model.model.get_rope_index
        return rope_index(input_ids, mm_token_type_ids=types, **grids, **seconds)[0]


class Qwen3VL(QwenVL):
    """Qwen3-VL and Qwen3.5, which tell the time of each temporal patch: "<1234.5 seconds>"."""

    text_tokens_per_patch = 10

    def num_frames_told(self, num_frames: int, num_merged: int) -> int:
        # The processor rejects a video that is shorter than one patch.
        return max(num_frames, num_merged)


def on_cpu(batch: Mapping[str, Any], *names: str) -> dict[str, Tensor]:
    """Return a batch's entries of these names, as tensors in CPU memory."""
    tensors = {}
    for name in names:
        if batch.get(name) is not None:
            tensors[name] = torch.as_tensor(batch[name]).cpu()
    return tensors
