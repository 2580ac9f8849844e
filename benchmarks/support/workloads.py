"""Makes what benchmarks run: models with random weights, which do not affect times, and prompts."""

from dataclasses import dataclass
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from apbv import Engine, HostGroup

from .arguments import read_toml

PATCH, MERGE, FRAMES_PER_PATCH, CHANNELS = 14, 2, 2, 3  # of Qwen2.5-VL
PREFIX_LEN = 16  # tokens before the video, such as a system message
_MODELS = read_toml(Path(__file__).with_name("models.toml"))


def config_like(
    name: str, text: dict | None = None, vision: dict | None = None
) -> PreTrainedConfig:
    """Build a configuration of models.toml, with other sizes of the decoder or of the vision
    tower."""
    fields = dict(_MODELS[name])
    if "vision_config" not in fields:
        return AutoConfig.for_model(**fields | (text or {}))
    # Random weights answer nothing, and end nowhere.
    fields["text_config"] = (
        {"bos_token_id": None, "eos_token_id": None} | fields["text_config"] | (text or {})
    )
    fields["vision_config"] = fields["vision_config"] | (vision or {})
    return AutoConfig.for_model(**fields)


CONFIGS = {name: config_like(name) for name in _MODELS}


def config_of(model: str) -> PreTrainedConfig:
    """Return a built-in configuration, or any checkpoint's.

    Raises:
        ValueError: there is no such model.
    """
    try:
        return CONFIGS.get(model) or AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"cannot load the configuration of {model}: {error}") from error


def build_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Build a model with random weights."""
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device(device):
        torch.manual_seed(0)
        return auto.from_config(config, dtype=dtype).eval()


def load_model(name: str, dtype: torch.dtype, hosts: HostGroup) -> PreTrainedModel:
    """Build one of :data:`CONFIGS` with random weights, or load the demo's model or a
    checkpoint."""
    if name in CONFIGS:
        return build_model(CONFIGS[name], dtype, hosts.device)
    return Engine.from_pretrained(name, hosts=hosts, dtype=dtype).model


@dataclass(frozen=True)
class Prompt:
    """A prompt as a processor or tokenizer returns it.

    Attributes:
        batch: the tensors.
        query_start: where the question of a text begins; None for a video.
    """

    batch: dict[str, Tensor]
    query_start: int | None = None


def plain_tokens(config: PreTrainedConfig, count: int, generator: torch.Generator) -> Tensor:
    """Draw tokens ``[count]`` that a model reads as text, and never as a placeholder, a start or an
    end."""
    text = config.get_text_config()
    fields = (field for each in (config, text) for field in each.to_dict().items())
    named = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    special = {
        token for value in named for token in (value if isinstance(value, list) else [value])
    }
    plain = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    return plain[torch.randint(len(plain), (count,), generator=generator)]


def text_prompt(config: PreTrainedConfig, num_tokens: int, query_len: int, seed: int = 0) -> Prompt:
    """Draw a text of random tokens, of which the last ``query_len`` are the question."""
    ids = plain_tokens(config, num_tokens, torch.Generator().manual_seed(seed))
    return Prompt({"input_ids": ids[None]}, num_tokens - query_len)


def patch_grid(num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return temporal patches, and patches down and across, of frames that are cut to whole
    tokens."""
    side = PATCH * MERGE
    return (
        -(-num_frames // FRAMES_PER_PATCH),
        max(1, height // side) * MERGE,
        max(1, width // side) * MERGE,
    )


def video_prompt(
    config: PreTrainedConfig,
    num_frames: int,
    height: int,
    width: int,
    query_len: int,
    seed: int = 0,
) -> Prompt:
    """Draw random pixels and text for a model of Qwen2.5-VL's layout."""
    generator = torch.Generator().manual_seed(seed)
    grid = patch_grid(num_frames, height, width)
    num_patches = grid[0] * grid[1] * grid[2]
    num_visual = num_patches // MERGE**2
    prefix, question = (
        plain_tokens(config, length, generator) for length in (PREFIX_LEN, query_len)
    )
    start, end = (
        torch.tensor([token])
        for token in (config.vision_start_token_id, config.vision_end_token_id)
    )
    ids = torch.cat(
        [prefix, start, torch.full((num_visual,), config.video_token_id), end, question]
    )[None]
    values = CHANNELS * FRAMES_PER_PATCH * PATCH**2
    return Prompt(
        {
            "input_ids": ids,
            "mm_token_type_ids": (ids == config.video_token_id).int() * 2,
            "pixel_values_videos": torch.randn(num_patches, values, generator=generator),
            "video_grid_thw": torch.tensor([grid]),
        }
    )
