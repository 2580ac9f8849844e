"""Make a hybrid text model (Qwen3.5's) of real widths with few layers and random weights, and its
draft.

    python benchmarks/make_hybrid.py --out DIR
    python benchmarks/speculative.py --model DIR/target --draft-model DIR/draft --dtype bfloat16 \
        --prompts benchmarks/support/prompts.jsonl --strategies vanilla --batch 1 8

Every fourth layer attends; the others have linear attention. The draft is the target's first two
layers, one of each kind, and its head. The outputs of the target's further layers are scaled down
(--share): so the draft's tokens are accepted more often than a stranger's, and less often than the
target's own. Answers are random text. The pair cannot show how often a trained draft's tokens are
accepted.
"""

import argparse
import copy
import sys

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from apbv import demo

from support.arguments import parser_of, presets_of

SIZES = presets_of("make_hybrid")
DRAFT_LAYERS = 2


def kinds_of(num_layers: int) -> list[str]:
    """Return the kinds of layers: the second attends, and every fourth after it."""
    return [
        "full_attention" if layer % 4 == 1 else "linear_attention" for layer in range(num_layers)
    ]


def build_target(
    size: str, num_layers: int, tokenizer: PreTrainedTokenizerBase, share: float
) -> PreTrainedModel:
    """Build a hybrid with random weights.

    Args:
        size: one of :data:`SIZES`.
        share: by which the outputs of the layers that the draft lacks are scaled.
    """
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **SIZES[size],
        num_hidden_layers=num_layers,
        layer_types=kinds_of(num_layers),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=0.5)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(std=1.0 / module.in_features**0.5)
        # Answers do not end early.
        model.get_output_embeddings().weight[tokenizer.all_special_ids] *= 0.1
        for layer in model.get_decoder().layers[DRAFT_LAYERS:]:
            mixer = layer.self_attn.o_proj if hasattr(layer, "self_attn") else None
            if mixer is None:
                mixer = layer.linear_attn.out_proj
            mixer.weight.mul_(share)
            layer.mlp.down_proj.weight.mul_(share)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def draft_of(target: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without its later decoder layers."""
    draft = copy.deepcopy(target)
    decoder = draft.get_decoder()
    decoder.layers = decoder.layers[:DRAFT_LAYERS]
    draft.config.num_hidden_layers = DRAFT_LAYERS
    draft.config.layer_types = kinds_of(DRAFT_LAYERS)
    return draft


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("make_hybrid", __doc__, {"size": SIZES}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path(), trust_remote_code=False)
    target = build_target(options.size, options.layers, tokenizer, options.share)
    for name, model in (("target", target), ("draft", draft_of(target))):
        model.bfloat16().save_pretrained(options.out / name)
        tokenizer.save_pretrained(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
