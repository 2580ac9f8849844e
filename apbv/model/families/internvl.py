"""InternVL: one placeholder and one name for images and video, whose frames are encoded alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import ModelFamily


class InternVL(ModelFamily):
    """InternVL, with any text model. Each frame is told: "Frame123:"."""

    text_tokens_per_patch = 9
    video_pixels = "pixel_values"
    image_pixels = None  # tiles of images count as frames

    @property
    def rows_per_tile(self) -> int | None:
        return self._config.image_seq_length

    def is_image(self, input_ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return torch.zeros_like(input_ids, dtype=torch.bool)

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        num_frames = batch["pixel_values_videos"].shape[1]
        return num_frames, num_frames * self._config.image_seq_length

    def encode_images(self, model: Any, pixels: Mapping[str, Any]) -> Any:
        frames = next(iter(pixels.values()))
        if frames.dim() == 5:  # of a batch of videos
            frames = frames.flatten(0, 1)
        return model.model.get_image_features(frames, return_dict=True)

    def encode_video(self, model: Any, pixels: Mapping[str, Any]) -> Any:
        return self.encode_images(model, pixels)
