"""This module computes how many tokens a video takes, from its size alone."""

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any

import torch
from transformers import (
    InternVLVideoProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedConfig,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)

from .visual import num_frames_told

# Frame sizes as (height, width), by name.
RESOLUTIONS = {
    "144p": (144, 256),
    "240p": (240, 426),
    "360p": (360, 640),
    "480p": (480, 854),
    "720p": (720, 1280),
    "1080p": (1080, 1920),
    "1440p": (1440, 2560),
}
# Tokens before each temporal patch but the first: "<1234.5 seconds>", or "Frame123:", and what marks frames.
_TEXT_TOKENS = {"qwen3_vl": 10, "internvl": 9}
_NO_LIMIT = {"shortest_edge": 1, "longest_edge": 2**62}


def parse_resolution(text: str) -> tuple[int, int]:
    """Return (height, width) of "720p" or "720x1280".

    Raises:
        ValueError: it is neither.
    """
    if text in RESOLUTIONS:
        return RESOLUTIONS[text]
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(f"{text!r} is no resolution: write HxW, or one of {', '.join(RESOLUTIONS)}")
    return int(height), int(width)


@dataclass(frozen=True)
class VideoSize:
    """The size of a video as a model reads it.

    Attributes:
        num_temporal_patches: what the model makes of a frame, or of several that it merges.
        height, width: of each of these, in visual tokens.
        num_rows: all visual tokens.
        num_ending_rows: those of them that end the video, behind its last frame.
        num_text_tokens: the tokens between its frames.
        pixel_bytes: of the whole video, resized, in fp32.
    """

    num_temporal_patches: int
    height: int
    width: int
    num_rows: int
    num_ending_rows: int
    num_text_tokens: int
    pixel_bytes: int


def video_size(
    config: PreTrainedConfig, num_frames: int, height: int, width: int, video_processor: Any = None
) -> VideoSize:
    """Compute a video's size by the arithmetic of the model's own video processor, on tensors without storage.

    Args:
        config: the whole model's.
        num_frames: how many frames are sampled.
        height, width: of a frame, in pixels.
        video_processor: transformers' for this model; None: one that resizes frames to whole tokens and has no
            limit to their number, or to the tower's size where that is fixed.

    Raises:
        ValueError: the model reads no video, or not this one.
    """
    if not hasattr(config, "vision_config"):
        raise ValueError(f"{config.model_type} models read no video")
    processor = video_processor or _unlimited_processor(config)
    told = num_frames_told(config.model_type, num_frames, getattr(processor, "temporal_patch_size", 1))
    frames = torch.empty(told, 3, height, width, dtype=torch.uint8, device="meta")
    batch = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    pixels, grid = batch["pixel_values_videos"], batch.get("video_grid_thw")
    if grid is not None:
        num_patches, down, across = grid[0].tolist()
        tall, wide = (side // config.vision_config.spatial_merge_size for side in (down, across))
    else:
        num_patches = pixels.shape[1]
        if config.model_type == "llava_onevision":  # a frame's side is halved
            tall = wide = ceil(pixels.shape[-1] // config.vision_config.patch_size / 2)
        else:
            tall = wide = isqrt(config.image_seq_length)
    ending = int(config.model_type == "llava_onevision")
    num_text = (num_patches - 1) * _TEXT_TOKENS.get(config.model_type, 0)
    num_rows = num_patches * tall * wide + ending
    return VideoSize(num_patches, tall, wide, num_rows, ending, num_text, pixels.numel() * 4)


def _unlimited_processor(config: PreTrainedConfig):
    vision, family = config.vision_config, config.model_type
    if family in ("internvl", "llava_onevision"):
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        kind = InternVLVideoProcessor if family == "internvl" else LlavaOnevisionVideoProcessor
        return kind(size={"height": side, "width": side})
    kind = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    return kind(
        size=_NO_LIMIT,
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
