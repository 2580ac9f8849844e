"""LLaVA-1.5, LLaVA-NeXT and LLaVA-NeXT-Video.

The last two cut an image into tiles, and end each row of patches with a newline.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import ModelFamily


class _SquareTower(ModelFamily):
    """A family whose vision tower sees squares, and whose processor gives no grids."""

    @property
    def _patches_per_side(self) -> int:
        """The patches along a side of what the vision tower sees."""
        vision = self._config.vision_config
        return vision.image_size // vision.patch_size


class TiledImages(_SquareTower, ABC):
    """A family that cuts an image into tiles."""

    @abstractmethod
    def _packed_image(self, model: Any, tiles: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        """Let the model put the tiles ``[t, patches, d]`` of an image together: ``[rows, d]``."""

    def _num_tiles(self, size: Tensor) -> int:
        """Count the tiles of an image, with the one that shows the whole of it."""
        # LLaVA-OneVision's file has the same function.
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        side = self._config.vision_config.image_size
        return image_size_to_num_patches(size, self._config.image_grid_pinpoints, side)

    def num_image_rows(self, model: Any, size: Tensor | None, is_tiled: bool) -> int:
        assert size is not None, "the processor gives the sizes of images in tiles"
        num_tiles = self._num_tiles(size) if is_tiled else 1
        tiles = torch.empty(num_tiles, self._patches_per_side**2, 1, device="meta")
        newline = torch.empty(1, device="meta")
        return len(self._packed_image(model, tiles, size, newline))


class _ProjectedPatches(_SquareTower):
    """A LLaVA family whose projector maps each patch by itself."""

    def projector(self, model: Any) -> nn.Module | None:
        return model.model.multi_modal_projector

    @property
    def _num_class_tokens(self) -> int:
        """The rows of the vision tower that stand for no patch."""
        return int(self._config.vision_config.model_type == "clip_vision_model")

    def prepare_processor(self, processor: Any) -> None:
        # It then counts an image's tokens as the model's vision tower makes them. Older
        # checkpoints' processors lack the size of a patch, how a tower's rows are selected, or that
        # CLIP's have a class token: transformers then fails, or counts one token too few.
        processor.patch_size = self._config.vision_config.patch_size
        processor.vision_feature_select_strategy = self._config.vision_feature_select_strategy
        processor.num_additional_image_tokens = self._num_class_tokens

    def _cells_of_tile(self) -> Tensor:
        """Number the 2 x 2 cells of a tile, by their first patch, for each of its patches."""
        side = self._patches_per_side
        cell_of_side = torch.arange(side) // 2
        return (cell_of_side[:, None] * side + cell_of_side).flatten()


class Llava(_ProjectedPatches):
    """LLaVA-1.5, which resizes all images to one size."""

    def num_image_rows(self, model: Any, size: Tensor | None, is_tiled: bool) -> int:
        num_rows = self._patches_per_side**2 + self._num_class_tokens
        if self._config.vision_feature_select_strategy == "default":
            num_rows -= 1  # the first is dropped
        return num_rows

    def image_cells(self, model: Any, size: Tensor | None) -> Tensor | None:
        cells = self._cells_of_tile()
        num_rows = self.num_image_rows(model, size, is_tiled=False)
        if num_rows == len(cells):
            return cells
        if num_rows == len(cells) + 1:
            return torch.cat([torch.tensor([-1]), cells])
        return None


class LlavaNext(_ProjectedPatches, TiledImages):
    """LLaVA-NeXT, which reads images only."""

    def _packed_image(self, model: Any, tiles: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        packed_images, _ = model.model.pack_image_features(
            [tiles],
            size[None],
            image_newline=newline,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
        )
        return packed_images[0]

    def image_cells(self, model: Any, size: Tensor | None) -> Tensor | None:
        assert size is not None, "the processor gives the sizes of images in tiles"
        cells = self._cells_of_tile()
        first_cells = torch.arange(self._num_tiles(size)) * len(cells)
        # The model's own packing moves and cuts off numbers as it does embeddings.
        tiles = (first_cells[:, None] + cells).double()[..., None]
        newline = torch.full([1], -1.0, dtype=torch.float64)
        return self._packed_image(model, tiles, size, newline)[:, 0].long()


class LlavaNextVideo(LlavaNext):
    """LLaVA-NeXT-Video."""

    def video_size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        pixels = batch["pixel_values_videos"]
        num_frames = pixels.shape[1]
        height, width = pixels.shape[-2:]
        # Four of the tower's patches of a frame make a token.
        patch_size = self._config.vision_config.patch_size
        num_vision_patches = (height // patch_size) * (width // patch_size)
        return num_frames, num_frames * (num_vision_patches // 4)
