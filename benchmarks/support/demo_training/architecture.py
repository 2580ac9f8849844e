"""Builds the demo's two models, untrained, and saves them as checkpoints."""

import json
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)

from .. import clips

PATCH_SIZE = clips.TOKEN_SIZE // 2  # pixels; the merger joins 2 x 2 patches to one token

# Settings of (language model, vision tower) by name.
SIZES = {
    "target": (
        {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6},
        {"hidden_size": 128, "intermediate_size": 256, "depth": 2, "num_heads": 4},
    ),
    "draft": (
        {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"hidden_size": 80, "intermediate_size": 160, "depth": 2, "num_heads": 4},
    ),
}


def build_model(size: str, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Build an untrained model; `size` is a key of `SIZES`."""
    text, vision = SIZES[size]
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 2,
            "max_position_embeddings": 65536,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            **vision,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": clips.FRAMES_PER_SHOT,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": list(range(vision["depth"])),
            "tokens_per_second": clips.FPS,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=512,  # a description of 128 shots
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save_checkpoint(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, folder: Path
) -> None:
    """Write model, tokenizer and processor as an ordinary Hugging Face checkpoint.

    The weights are stored in bfloat16, to be small; the configuration says float32, in which they are loaded.
    """
    low = Qwen2_5_VLForConditionalGeneration(model.config)
    low.load_state_dict(model.state_dict())
    low.generation_config = model.generation_config
    low.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "dtype": "float32"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    processor.save_pretrained(folder)
