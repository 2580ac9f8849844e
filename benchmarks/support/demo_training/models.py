"""Builds the demo's two models, untrained, with their tokenizer and processor, and saves them as checkpoints."""

import json
import string
import tomllib
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from apbv import demo

from .. import clips

RECIPE = tomllib.loads(Path(__file__).with_name("recipe.toml").read_text(encoding="utf-8"))
PATCH_SIZE = clips.TOKEN_SIZE // 2  # pixels; the merger joins 2 x 2 patches to one token
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def build_model(size: str, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Build an untrained model; `size` is "target" or "draft"."""
    text, vision = RECIPE[size]["text"], RECIPE[size]["vision"]
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the demo's tokenizer, deterministically; it has about 500 tokens.

    It is a byte-level BPE, so any text can be encoded and decoded; its merges come from the demo's own sentences,
    so that every word in them, with the space before it and the punctuation after it, is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n| ?[^\s]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: merging stops when every word of the sentences is one token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=65536,
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Build Qwen2.5-VL's own processor with the demo's tokenizer; it scales frames to 56^2 to 168^2 pixels."""
    smallest, largest = ((clips.TOKEN_SIZE * grid) ** 2 for grid in (min(clips.GRIDS), max(clips.GRIDS)))
    size = {"shortest_edge": smallest, "longest_edge": largest}
    vision = {"size": size, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        video_processor=Qwen2VLVideoProcessor(
            **vision,
            num_frames=2048,  # all frames of any clip, because questions are about every shot
            do_sample_frames=False,
            cap_pixels_per_frame=False,
        ),
        tokenizer=build_tokenizer(),
        chat_template=(demo.model_path() / "chat_template.jinja").read_text(),
    )


def _sentences() -> list[str]:
    """List everything that the demo's questions and answers are made of."""
    asked = [clips.RETRIEVAL_QUESTION.format(colour=colour) for colour in clips.COLOURS]
    asked += [clips.ORDERING_QUESTION, clips.COUNTING_QUESTION, clips.DESCRIBE_QUESTION]
    words = [*clips.COLOURS, *string.ascii_uppercase, *string.digits, *" ".join(clips.SCENES).split(), "end"]
    forms = [form for word in words for form in (word, f" {word}", f" {word},")]
    roles = ["system", "user", "assistant"]
    # The list is doubled because BPE merges only what it sees more than once.
    return 2 * [*asked, *(f" {sentence}" for sentence in asked), *forms, *roles]
