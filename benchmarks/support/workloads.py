"""Makes what benchmarks run: models with random weights, which do not affect times, and prompts."""

from dataclasses import dataclass

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from apbv import Engine, HostGroup

PATCH, MERGE, FRAMES_PER_PATCH, CHANNELS = 14, 2, 2, 3  # of Qwen2.5-VL
_VIDEO_TOKEN, _IMAGE_TOKEN, _VISION_START, _VISION_END = 1000, 1001, 1002, 1003
PREFIX_LEN = 16  # tokens before the video, such as a system message


# Of decoders, by the names that transformers' configs have for them.
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def llama_config(*sizes: int, vocab: int) -> LlamaConfig:
    """Configure a Llama-class decoder; sizes as in ``_SIZES``."""
    return LlamaConfig(**dict(zip(_SIZES, sizes, strict=True)), vocab_size=vocab, max_position_embeddings=2**21)


def qwen_vl_config(*sizes: int, vocab: int, vision: tuple[int, int, int]) -> Qwen2_5_VLConfig:
    """Configure a Qwen2.5-VL of other sizes.

    As in the original every eighth vision layer sees a whole frame, and an MLP is 2.67 times as wide as its layer.

    Args:
        sizes: as in ``_SIZES``.
        vision: depth, width and heads of the vision tower.
    """
    text, (depth, width, vision_heads) = dict(zip(_SIZES, sizes, strict=True)), vision
    rotary = text["hidden_size"] // text["num_attention_heads"] // 2
    sections = [rotary - 2 * (rotary * 3 // 8), rotary * 3 // 8, rotary * 3 // 8]
    return Qwen2_5_VLConfig(
        text_config={
            **text,
            "vocab_size": vocab,
            "max_position_embeddings": 2**21,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        vision_config={
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": width * 3420 // 1280,
            "num_heads": vision_heads,
            "out_hidden_size": text["hidden_size"],
            "patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": list(range(min(8, depth) - 1, depth, 8)),
        },
        video_token_id=_VIDEO_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        vision_start_token_id=_VISION_START,
        vision_end_token_id=_VISION_END,
    )


def hybrid_config(*sizes: int, vocab: int, **others: int) -> Qwen3_5TextConfig:
    """Configure the decoder of a Qwen3.5: of four layers the last attends; sizes as in ``_SIZES``."""
    sizes = dict(zip(_SIZES, sizes, strict=True))
    return Qwen3_5TextConfig(**sizes, vocab_size=vocab, max_position_embeddings=2**21, **others)


CONFIGS = {
    # Small enough for 128k tokens on two CPU cores.
    "llama-small": llama_config(4, 512, 1536, 8, 2, vocab=32000),
    "qwen2.5-vl-small": qwen_vl_config(4, 512, 1536, 8, 2, vocab=32000, vision=(4, 256, 4)),
    "qwen3.5-small": hybrid_config(
        *(4, 512, 1536, 8, 2), vocab=32000, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8
    ),
    # The published models' shapes.
    "qwen2.5-vl-3b": qwen_vl_config(36, 2048, 11008, 16, 2, vocab=151936, vision=(32, 1280, 16)),
    "qwen2.5-vl-7b": qwen_vl_config(28, 3584, 18944, 28, 4, vocab=152064, vision=(32, 1280, 16)),
    "qwen3.5-9b": hybrid_config(32, 4096, 12288, 16, 4, vocab=248320),
}


def config_of(model: str) -> PreTrainedConfig:
    """Return a built-in configuration, or any checkpoint's.

    Raises:
        ValueError: there is no such model.
    """
    try:
        return CONFIGS.get(model) or AutoConfig.from_pretrained(model)
    except OSError as error:
        raise ValueError(f"cannot load the configuration of {model}: {error}") from error


def build_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Build a model with random weights."""
    kinds = {LlamaConfig: LlamaForCausalLM, Qwen3_5TextConfig: Qwen3_5ForCausalLM}
    kind = kinds.get(type(config), Qwen2_5_VLForConditionalGeneration)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # building 3B weights in fp32 first would take twice the memory and time
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def load_model(name: str, dtype: torch.dtype, hosts: HostGroup) -> PreTrainedModel:
    """Build one of :data:`CONFIGS` with random weights, or load the demo's model or a checkpoint."""
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
    """Draw tokens ``[count]`` that a model reads as text, and never as a placeholder, a start or an end."""
    text = config.get_text_config()
    fields = (field for each in (config, text) for field in each.to_dict().items())
    named = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    special = {token for value in named for token in (value if isinstance(value, list) else [value])}
    plain = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    return plain[torch.randint(len(plain), (count,), generator=generator)]


def text_prompt(config: PreTrainedConfig, num_tokens: int, query_len: int, seed: int = 0) -> Prompt:
    """Draw a text of random tokens, of which the last ``query_len`` are the question."""
    ids = plain_tokens(config, num_tokens, torch.Generator().manual_seed(seed))
    return Prompt({"input_ids": ids[None]}, num_tokens - query_len)


def patch_grid(num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return temporal patches, and patches down and across, of frames that are cut to whole tokens."""
    side = PATCH * MERGE
    return -(-num_frames // FRAMES_PER_PATCH), max(1, height // side) * MERGE, max(1, width // side) * MERGE


def video_prompt(
    config: PreTrainedConfig, num_frames: int, height: int, width: int, query_len: int, seed: int = 0
) -> Prompt:
    """Draw random pixels and text for a model of :func:`qwen_vl_config`."""
    generator = torch.Generator().manual_seed(seed)
    grid = patch_grid(num_frames, height, width)
    num_patches = grid[0] * grid[1] * grid[2]
    num_visual = num_patches // MERGE**2
    prefix, question = (plain_tokens(config, length, generator) for length in (PREFIX_LEN, query_len))
    start, end = torch.tensor([_VISION_START]), torch.tensor([_VISION_END])
    ids = torch.cat([prefix, start, torch.full((num_visual,), _VIDEO_TOKEN), end, question])[None]
    values = CHANNELS * FRAMES_PER_PATCH * PATCH**2
    return Prompt(
        {
            "input_ids": ids,
            "mm_token_type_ids": (ids == _VIDEO_TOKEN).int() * 2,
            "pixel_values_videos": torch.randn(num_patches, values, generator=generator),
            "video_grid_thw": torch.tensor([grid]),
        }
    )
