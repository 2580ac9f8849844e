"""Builds the ways to decode that are compared: a target, scaled, with and without a draft."""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from torch import nn
from transformers import PreTrainedModel

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, SpeculativeConfig, demo
from apbv.input.rendering import RenderedPrompt
from apbv.input.video import probe
from apbv.speculate import STRATEGIES
from apbv.speculate.strategies import draft_tree

from . import clips

# What a draft is asked about images for a caption, and the longest answer.
_IMAGE_QUESTION = "Describe the image."
_CAPTION_TOKENS = 16


@dataclass
class Way:
    """One way to decode, and its answers.

    Attributes:
        label: its name in tables.
        config: its speculation; None for autoregressive decoding.
        engine: None on a host that takes no part.
        stats: the answers' figures, by task.
    """

    label: str
    config: SpeculativeConfig | None
    engine: Engine | None
    stats: dict[str, list[dict]] = field(default_factory=dict)


def scale_model(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """Build a slower model with `times` as many decoder layers that computes the same.

    Before every decoder layer come copies of it whose two output projections are zero. A copy reads
    and writes the KV cache and does the work of a layer, but adds nothing to the hidden states, so
    logits are bit-equal to the original's while the time per token grows with their number. Its
    input is that of the layer after it, and so are its attention probabilities: means over layers,
    by which visual tokens are ranked, are the original's, too.

    Args:
        model: a Qwen2.5-VL model, which is left as it is.
        times: layers for each layer, at least 1.

    Raises:
        ValueError: `times` is less than 1.
    """
    if times < 1:
        raise ValueError(f"a model can be scaled by 1 or more, not by {times}")
    scaled = copy.deepcopy(model)
    text = scaled.config.text_config
    decoder = scaled.model.language_model
    layers = nn.ModuleList()
    text.num_hidden_layers *= times
    text.layer_types = [kind for kind in text.layer_types for _ in range(times)]
    for layer in decoder.layers:
        # By its config, which all layers share, a prefill watches a layer or lets its attention see
        # other hosts' KV.
        silent = [copy.deepcopy(layer, {id(text): text}) for _ in range(times - 1)]
        for each in silent:
            nn.init.zeros_(each.self_attn.o_proj.weight)
            nn.init.zeros_(each.mlp.down_proj.weight)
        for each in (*silent, layer):
            each.self_attn.layer_idx = len(layers)
            layers.append(each)
    decoder.layers = layers
    return scaled


def build_ways(
    options: argparse.Namespace, configs: Mapping[str, SpeculativeConfig], hosts: HostGroup
) -> list[Way]:
    """Build the ways to decode, on one target and one draft; autoregressive decoding comes first.

    They share what ``--reuse`` caches of the target.
    """
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
    # A layer of the target lies --scale times as deep in the scaled one.
    wanted = {
        label: replace(each, uv_layer=options.scale * each.uv_layer)
        for label, each in configs.items()
    }
    if options.draft_host and options.preset is None:
        for label, config in list(wanted.items()):
            strategy = STRATEGIES[config.strategy]
            if (
                strategy.needs_draft_model
                and not strategy.needs_verdicts
                and draft_tree(config) is None
            ):
                wanted[f"{label}, draft host"] = replace(config, draft_host=True)
    needs_draft = options.draft_host or any(
        STRATEGIES[c.strategy].needs_draft_model for c in wanted.values()
    )
    last = hosts.size - 1
    if options.draft_host and not last:
        raise ValueError("a draft host needs at least two hosts: start them with torchrun")
    targets = hosts.subgroup(range(last)) if options.draft_host else hosts
    model = draft = None
    if targets is not None:
        loaded = Engine.from_pretrained(options.model, hosts=targets, dtype=options.dtype)
        model = scale_model(loaded.model, options.scale) if options.scale > 1 else loaded.model
    with hosts.local_stage("loading the draft"):
        if needs_draft:
            if options.draft_model is None and options.model != "demo":
                raise ValueError("these strategies need a --draft-model")
            path = options.draft_model or demo.draft_path()
            drafting = Engine.from_pretrained(
                path, hosts=HostGroup.single(hosts.device), dtype=options.dtype
            )
            draft = drafting.model
        processor = (drafting if targets is None else loaded).processor

    def caption(prompt: RenderedPrompt) -> str:
        """Let the draft answer a short question, because a captioner must be cheap."""
        if prompt.pictures:
            images = [picture.image for picture in prompt.pictures]
            return drafting.generate(
                _IMAGE_QUESTION, images=images, max_new_tokens=_CAPTION_TOKENS
            ).text
        (video,) = prompt.videos
        return drafting.generate(
            clips.ORDERING_QUESTION, video=video, num_frames=probe(video).num_frames
        ).text

    def way(label: str, config: SpeculativeConfig | None) -> Way:
        beside = config is not None and config.draft_host
        group = hosts if beside else targets
        if group is None:
            return Way(label, config, None)
        own = draft if not beside or hosts.rank == last else None
        engine = Engine(
            model, processor, group, prefill, options.model, config, own, caption, reuse
        )
        return Way(label, config, engine)

    ways = [way("autoregressive", None), *(way(label, config) for label, config in wanted.items())]
    cache = ways[0].engine and ways[0].engine._prefiller.reuse
    for each in ways[1:]:
        if each.engine is not None:
            each.engine._prefiller = replace(each.engine._prefiller, reuse=cache)
    return ways
