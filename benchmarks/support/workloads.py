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
)

PATCH, MERGE, FRAMES_PER_PATCH, CHANNELS = 14, 2, 2, 3  # of Qwen2.5-VL
_VIDEO_TOKEN, _IMAGE_TOKEN, _VISION_START, _VISION_END = 1000, 1001, 1002, 1003
PREFIX_LEN = 16  # tokens before the video, such as a system message


def _decoder(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> dict:
    """Return a decoder's sizes by the names that transformers' configs have for them."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2**21,
    }


def llama_config(
    layers: int = 4,
    hidden: int = 512,
    intermediate: int = 1536,
    heads: int = 8,
    kv_heads: int = 2,
    vocab: int = 32000,
) -> LlamaConfig:
    """Configure a Llama-class decoder, by default small enough for 128k tokens on two CPU cores."""
    return LlamaConfig(**_decoder(layers, hidden, intermediate, heads, kv_heads, vocab))


def qwen_vl_config(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    vision_depth: int,
    vision_hidden: int,
    vision_heads: int,
) -> Qwen2_5_VLConfig:
    """Configure a Qwen2.5-VL of other sizes.

    As in the original every eighth vision layer sees a whole frame, and an MLP is 2.67 times as wide as its layer.
    """
    rotary = hidden // heads // 2
    sections = [rotary - 2 * (rotary * 3 // 8), rotary * 3 // 8, rotary * 3 // 8]
    return Qwen2_5_VLConfig(
        text_config={
            **_decoder(layers, hidden, intermediate, heads, kv_heads, vocab),
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": vision_hidden,
            "intermediate_size": vision_hidden * 3420 // 1280,
            "num_heads": vision_heads,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": list(range(min(8, vision_depth) - 1, vision_depth, 8)),
        },
        video_token_id=_VIDEO_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        vision_start_token_id=_VISION_START,
        vision_end_token_id=_VISION_END,
    )


_VISION = {"vision_depth": 32, "vision_hidden": 1280, "vision_heads": 16}
CONFIGS = {
    "llama-small": llama_config(),
    "qwen2.5-vl-small": qwen_vl_config(
        layers=4,
        hidden=512,
        intermediate=1536,
        heads=8,
        kv_heads=2,
        vocab=32000,
        vision_depth=4,
        vision_hidden=256,
        vision_heads=4,
    ),
    # The published models' shapes.
    "qwen2.5-vl-3b": qwen_vl_config(
        layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, vocab=151936, **_VISION
    ),
    "qwen2.5-vl-7b": qwen_vl_config(
        layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocab=152064, **_VISION
    ),
    "llama-3.1-8b": llama_config(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256),
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


_KINDS = {
    LlamaConfig: LlamaForCausalLM,
    Qwen2_5_VLConfig: Qwen2_5_VLForConditionalGeneration,
}


def build_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Build a model with random weights."""
    kind = _KINDS[type(config)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # building 3B weights in fp32 first would take twice the memory and time
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@dataclass(frozen=True)
class Prompt:
    """A prompt as a processor or tokenizer returns it.

    Attributes:
        batch: the tensors.
        query_start: where the question of a text begins; None for a video.
    """

    batch: dict[str, Tensor]
    query_start: int | None = None


def text_prompt(num_tokens: int, query_len: int, seed: int = 0) -> Prompt:
    """Draw a text of random tokens, of which the last ``query_len`` are the question."""
    ids = torch.randint(0, 32000, (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    return Prompt({"input_ids": ids}, num_tokens - query_len)


def patch_grid(num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Return temporal patches, and patches down and across, of frames that are cut to whole tokens."""
    side = PATCH * MERGE
    return -(-num_frames // FRAMES_PER_PATCH), max(1, height // side) * MERGE, max(1, width // side) * MERGE


def video_prompt(num_frames: int, height: int, width: int, query_len: int, seed: int = 0) -> Prompt:
    """Draw random pixels and text for a model of :func:`qwen_vl_config`."""
    generator = torch.Generator().manual_seed(seed)
    grid = patch_grid(num_frames, height, width)
    num_patches = grid[0] * grid[1] * grid[2]
    num_visual = num_patches // MERGE**2
    prefix, question = (
        torch.randint(0, _VIDEO_TOKEN, (length,), generator=generator) for length in (PREFIX_LEN, query_len)
    )
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
