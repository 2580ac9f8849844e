"""LLaVA-OneVision: tiles of an image, halved sides of a frame, and a newline after a video."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .llava import TiledImages


class LlavaOnevision(TiledImages):
    """LLaVA-OneVision, with any text model.

    An image is cut into tiles where it is the only one of its sample, and may then be resized after
    the projector.
    """

    num_rows_ending_video = 1

    def images_argument(self, images: list[Any]) -> list[Any]:
        # As in transformers' own chats: all images of a prompt are one sample, not one each.
        return [images]

    def leaves_images_whole(self, num_images: int) -> bool:
        return num_images > 1

    def _packed_image(self, model: Any, tiles: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        packed_images, _ = model.model.pack_image_features(
            [tiles],
            size[None],
            image_newline=newline,
            vision_aspect_ratio=getattr(self._config, "vision_aspect_ratio", None),
        )
        return packed_images[0]

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        pixels = batch["pixel_values_videos"]
        num_frames = pixels.shape[1]
        # A frame's sides are halved, and one token ends the video.
        side = ceil(pixels.shape[-1] // self._config.vision_config.patch_size / 2)
        return num_frames, num_frames * side**2 + self.num_rows_ending_video

    def end_video(self, model: Any, rows: Tensor, num_rows: int, num_ending: int) -> Tensor:
        # transformers adds the learned newline to every piece, or (before 5.19) to none: only whole
        # videos end with it.
        rows = rows[: num_rows - num_ending]
        if not num_ending:
            return rows
        newline = model.model.image_newline[None].to(rows)
        return torch.cat([rows, newline])
