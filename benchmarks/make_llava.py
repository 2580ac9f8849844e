"""Make a tiny pair of LLaVA models with random weights, a target and its draft, and prompts with
images.

    python benchmarks/make_llava.py --out DIR
    python benchmarks/speculative.py --model DIR/target --draft-model DIR/draft \
        --prompts DIR/prompts.jsonl --preset tabed1 --max-new-tokens 64

The draft is the target's vision tower, projector, first decoder layers and head. The target has
further layers, whose outputs are scaled down (--share), and in both attention is (--attention), so
that the next token depends on the latest one more than on the images. The acceptance rate thus lies
between that of a stranger (0) and of the target itself (1), also without images. Answers are no
language. What the pair shows is that the ways to draft run and change no token; what it cannot show
is how often a trained draft's tokens are accepted.
"""

import argparse
import copy
import json
import sys
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from apbv import demo

from support.arguments import parser_of, presets_of

SIZES = presets_of("make_llava")
PLACEHOLDER = "<|image_pad|>"
# A tile has 8 x 8 patches.
SIDE = 112
PATCH = 14
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
DRAFT_LAYERS = 2
TARGET_LAYERS = 8
FAMILIES = ("llava", "llava_next")
# Of each task, how many images a prompt shows; five are the paper's out-of-distribution case.
TASKS = {"one image": 1, "two images": 2, "five images": 5}
QUESTIONS = ("What is shown?", "Which colors are there?", "What is on the left?", "Describe it.")


def build_target(
    family: str, tokenizer: PreTrainedTokenizerBase, share: float, attention: float
) -> PreTrainedModel:
    """Build a LLaVA model with random weights.

    Args:
        share: by which the outputs of the layers that the draft lacks are scaled.
        attention: by which the outputs of attention are scaled in all layers.
    """
    text = LlamaConfig(
        **SIZES["text_config"],
        num_hidden_layers=TARGET_LAYERS,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(**SIZES["vision_config"], image_size=SIDE, patch_size=PATCH)
    image_token = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    settings = {"text_config": text, "vision_config": vision, "image_token_index": image_token}
    if family == "llava":
        config = LlavaConfig(**settings)
    else:
        config = LlavaNextConfig(**settings, image_grid_pinpoints=PINPOINTS)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        draw_weights(model, tokenizer)
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.mul_(attention)
        for layer in model.get_decoder().layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def draw_weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Draw weights that keep activations at unit scale, so that attention selects.

    Special tokens get small output weights: answers do not end early.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.5)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            module.weight.normal_(std=1.7 / module.weight[0].numel() ** 0.5)
    model.get_output_embeddings().weight[tokenizer.all_special_ids] *= 0.1


def draft_of(target: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without its later decoder layers."""
    draft = copy.deepcopy(target)
    decoder = draft.get_decoder()
    text = draft.config.text_config
    decoder.layers = decoder.layers[:DRAFT_LAYERS]
    text.num_hidden_layers = DRAFT_LAYERS
    return draft


def build_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build the family's processor, with the demo's chat template."""
    template = (demo.model_path() / "chat_template.jinja").read_text()
    template = template.replace("<|vision_start|>", "").replace("<|vision_end|>", "{{ '\\n' }}")
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    if family == "llava":
        processor_class = LlavaProcessor
        images = CLIPImageProcessor(**sizes)
    else:
        processor_class = LlavaNextProcessor
        images = LlavaNextImageProcessor(**sizes, image_grid_pinpoints=PINPOINTS)
    return processor_class(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=PLACEHOLDER,
        chat_template=template,
    )


def write_prompts(folder: Path, num_prompts: int) -> None:
    """Write images of random colors, and a file of prompts about them."""
    rng = np.random.default_rng(0)
    lines = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for task, num_images in TASKS.items():
        for number in range(num_prompts):
            files = []
            for place in range(num_images):
                name = f"images/{task.replace(' ', '-')}-{number}-{place}.png"
                height, width = rng.integers(2, 7, size=2)  # patches of color
                colors = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                size = (int(width) * 40, int(height) * 40)
                Image.fromarray(colors).resize(size, Image.Resampling.BICUBIC).save(folder / name)
                files.append(name)
            question = QUESTIONS[number % len(QUESTIONS)]
            lines.append(json.dumps({"task": task, "prompt": question, "image": files}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("make_llava", __doc__, {"family": FAMILIES}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path(), trust_remote_code=False)
    target = build_target(options.family, tokenizer, options.share, options.attention)
    processor = build_processor(options.family, tokenizer)
    for name, model in (("target", target), ("draft", draft_of(target))):
        model.save_pretrained(options.out / name)
        processor.save_pretrained(options.out / name)
    write_prompts(options.out, options.prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
