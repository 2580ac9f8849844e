"""Defaults for requests, which a checkpoint carries in transformers' own fields.

The library, the scripts and the server all ask the engine, so that the same question gets the same answer.
"""

from typing import Any

from transformers import PreTrainedModel

NUM_FRAMES = 64
MAX_NEW_TOKENS = 128


def default_num_frames(processor: Any) -> int:
    """Return how many frames of a video are sampled: the video processor's ``num_frames``, or 64."""
    video_processor = getattr(processor, "video_processor", None)
    return getattr(video_processor, "num_frames", None) or NUM_FRAMES


def default_max_new_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens an answer may have: the generation config's ``max_new_tokens``, or 128."""
    return model.generation_config.max_new_tokens or MAX_NEW_TOKENS
