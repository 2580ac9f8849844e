"""Makes models with random weights, and prompts of random tokens and pixels for them.

Weights do not affect how long a model computes, how much memory it takes or what it exchanges. No
checkpoint is needed: models.toml has the sizes of real models, and of small ones for CPUs.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import InvalidRequestError

# Of Qwen2.5-VL: a patch's side in pixels, a token's side in patches, a patch's frames and colors.
PATCH = 14
MERGE = 2
FRAMES_PER_PATCH = 2
CHANNELS = 3
PREFIX_LEN = 16  # tokens before the video, such as a system message
_MODELS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
)


def config_like(
    name: str, text: dict | None = None, vision: dict | None = None
) -> PreTrainedConfig:
    """Build one of the configurations of models.toml, with some fields replaced.

    Args:
        name: the model, such as ``"qwen2.5-vl-7b"``; a key of :data:`CONFIGS`.
        text: fields of the decoder to replace, such as ``{"num_hidden_layers": 2}``.
        vision: fields of the vision tower to replace.
    """
    fields = dict(_MODELS[name])
    text = text or {}
    vision = vision or {}
    if "vision_config" not in fields:
        fields.update(text)
        return AutoConfig.for_model(**fields)
    # Random weights have no start or end of a text.
    ends = {"bos_token_id": None, "eos_token_id": None}
    fields["text_config"] = {**ends, **fields["text_config"], **text}
    fields["vision_config"] = {**fields["vision_config"], **vision}
    return AutoConfig.for_model(**fields)


CONFIGS = {name: config_like(name) for name in _MODELS}


def config_of(model: str) -> PreTrainedConfig:
    """Return a built-in configuration, or any checkpoint's.

    Raises:
        InvalidRequestError: there is no such model.
    """
    if model in CONFIGS:
        return CONFIGS[model]
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        raise InvalidRequestError(f"cannot load the configuration of {model}: {error}") from error


def build_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Build a model with random weights, which are the same in every call, in eval mode.

    Args:
        config: of a vision-language model, or of a text model.
        dtype: the weights' dtype.
        device: where the weights are; ``"meta"``: nowhere, for what needs only shapes.
    """
    with torch.device(device):
        torch.manual_seed(0)
        if hasattr(config, "vision_config"):
            model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval()


@dataclass(frozen=True)
class Prompt:
    """A prompt as a processor or tokenizer returns it.

    Attributes:
        batch: the tensors, as :meth:`apbv.ModelInputs.from_processor` takes them.
        query_start: where the question of a text begins; None for a video.
    """

    batch: dict[str, Tensor]
    query_start: int | None = None


def plain_tokens(config: PreTrainedConfig, count: int, generator: torch.Generator) -> Tensor:
    """Draw tokens ``[count]`` that a model reads as text.

    None is a placeholder, a start or an end.
    """
    text_config = config.get_text_config()
    special: set[int | None] = set()
    for fields in (config.to_dict(), text_config.to_dict()):
        for name, value in fields.items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    plain = torch.tensor([token for token in range(text_config.vocab_size) if token not in special])
    return plain[torch.randint(len(plain), (count,), generator=generator)]


def text_prompt(config: PreTrainedConfig, num_tokens: int, query_len: int, seed: int = 0) -> Prompt:
    """Draw a text of random tokens.

    Args:
        config: the model's, which says which tokens are plain text.
        num_tokens: length of the prompt.
        query_len: how many of the last tokens are the question.
        seed: of the draw.
    """
    ids = plain_tokens(config, num_tokens, torch.Generator().manual_seed(seed))
    return Prompt({"input_ids": ids[None]}, num_tokens - query_len)


def patch_grid(num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return temporal patches, and patches down and across, of frames cut to whole tokens.

    Args:
        height, width: of the frames, in pixels.
    """
    side = PATCH * MERGE
    temporal = -(-num_frames // FRAMES_PER_PATCH)
    down = max(1, height // side) * MERGE
    across = max(1, width // side) * MERGE
    return temporal, down, across


def video_prompt(
    config: PreTrainedConfig,
    num_frames: int,
    height: int,
    width: int,
    query_len: int,
    seed: int = 0,
) -> Prompt:
    """Draw random pixels and text for a model of Qwen2.5-VL's layout.

    Args:
        config: the model's, which has the placeholders' tokens.
        num_frames: frames of the video.
        height, width: of the frames, in pixels.
        query_len: tokens of the question, which is the end of the prompt.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)

    # The tokens: a prefix, the video's placeholders, and the question.
    grid = patch_grid(num_frames, height, width)
    num_patches = grid[0] * grid[1] * grid[2]
    num_visual = num_patches // MERGE**2
    prefix = plain_tokens(config, PREFIX_LEN, generator)
    question = plain_tokens(config, query_len, generator)
    start = torch.tensor([config.vision_start_token_id])
    placeholders = torch.full((num_visual,), config.video_token_id)
    end = torch.tensor([config.vision_end_token_id])
    ids = torch.cat([prefix, start, placeholders, end, question])[None]

    # The pixels, patch by patch.
    patch_values = CHANNELS * FRAMES_PER_PATCH * PATCH**2
    pixels = torch.randn(num_patches, patch_values, generator=generator)
    batch = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.video_token_id).int() * 2,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([grid]),
    }
    return Prompt(batch)
