"""Builds the ways to decode that are compared: a target, scaled, with and without a draft."""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from torch import nn
from transformers import PreTrainedModel

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, SpeculativeConfig, demo
from apbv.config import (
    KEEP_FACTS,
    HippoConfig,
    SpeculativeAblationConfig,
    TabedConfig,
    UVPruneConfig,
)
from apbv.input.media.video import probe
from apbv.input.prompts.rendering import RenderedPrompt
from apbv.speculate import STRATEGIES
from apbv.speculate.strategies.table import draft_tree
from apbv.testing import clips

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


def speculative_config(settings: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the speculation that a preset describes (presets.toml)."""
    fields = dict(settings)
    if "hippo" in fields:
        fields["hippo"] = HippoConfig(terms=tuple(fields["hippo"]["terms"]))
    if "tabed" in fields:
        fields["tabed"] = TabedConfig(**fields["tabed"])
    if "ablation" in fields:
        fields["ablation"] = SpeculativeAblationConfig(**fields["ablation"])
    return SpeculativeConfig(**fields)


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
        InvalidRequestError: `times` is less than 1.
    """
    if times < 1:
        raise InvalidRequestError(f"a model can be scaled by 1 or more, not by {times}")
    scaled = copy.deepcopy(model)
    text = scaled.config.text_config
    decoder = scaled.model.language_model
    layers = nn.ModuleList()
    layer_types = []
    for kind, layer in zip(text.layer_types, decoder.layers, strict=True):
        for _ in range(times - 1):
            # The config stays shared by all layers: by it a prefill watches a layer, or lets its
            # attention see other hosts' KV.
            silent = copy.deepcopy(layer, {id(text): text})
            nn.init.zeros_(silent.self_attn.o_proj.weight)
            nn.init.zeros_(silent.mlp.down_proj.weight)
            layers.append(silent)
        layers.append(layer)
        layer_types += [kind] * times
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    text.num_hidden_layers *= times
    text.layer_types = layer_types
    decoder.layers = layers
    return scaled


def build_ways(
    options: argparse.Namespace, configs: Mapping[str, SpeculativeConfig], hosts: HostGroup
) -> list[Way]:
    """Build the ways to decode, on one target and one draft; autoregressive decoding comes first.

    They share what ``--reuse`` caches of the target.

    Args:
        options: the command line of the table [pair], ``dtype``, ``draft_host``, ``preset`` and
            ``reuse``.
        configs: the speculation of the other ways, by label.
        hosts: all hosts; with ``draft_host`` the last one has the draft, and the others the target.

    Raises:
        InvalidRequestError: there is no draft model, or no host for it.
    """
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    reuse = None if options.reuse == "off" else ReuseConfig(mode=options.reuse)
    configs = _configs_with_variants(options, configs)
    last = hosts.size - 1
    if options.draft_host and last == 0:
        raise InvalidRequestError("a draft host needs at least two hosts: start them with torchrun")

    # The target, scaled.
    targets = hosts
    if options.draft_host:
        targets = hosts.subgroup(range(last))
    target_engine = None
    target = None
    if targets is not None:
        target_engine = Engine.from_pretrained(options.model, hosts=targets, dtype=options.dtype)
        target = target_engine.model
        if options.scale > 1:
            target = scale_model(target, options.scale)

    # The draft.
    needs_draft = options.draft_host or any(
        STRATEGIES[config.strategy].facts.needs_draft_model for config in configs.values()
    )
    draft_engine = None
    draft = None
    with hosts.local_stage("loading the draft"):
        if needs_draft:
            if options.draft_model is None and options.model != "demo":
                raise InvalidRequestError("these strategies need a --draft-model")
            draft_engine = Engine.from_pretrained(
                options.draft_model or demo.draft_path(),
                hosts=HostGroup.single(hosts.device),
                dtype=options.dtype,
            )
            draft = draft_engine.model
    processor = draft_engine.processor if target_engine is None else target_engine.processor

    def caption(prompt: RenderedPrompt) -> str:
        """Let the draft answer a short question, because a captioner must be cheap."""
        if prompt.pictures:
            images = [picture.image for picture in prompt.pictures]
            answer = draft_engine.generate(
                _IMAGE_QUESTION, images=images, max_new_tokens=_CAPTION_TOKENS
            )
        else:
            (video,) = prompt.videos
            answer = draft_engine.generate(
                clips.ORDERING_QUESTION, video=video, num_frames=probe(video).num_frames
            )
        return answer.text

    def make_way(label: str, config: SpeculativeConfig | None) -> Way:
        has_draft_host = config is not None and config.draft_host
        group = hosts if has_draft_host else targets
        if group is None:
            return Way(label, config, None)
        draft_here = draft
        if has_draft_host and hosts.rank != last:
            draft_here = None
        engine = Engine(
            target, processor, group, prefill, options.model, config, draft_here, caption, reuse
        )
        return Way(label, config, engine)

    # All ways, with one cache.
    autoregressive = make_way("autoregressive", None)
    cache = None
    if autoregressive.engine is not None:
        cache = autoregressive.engine._prefiller.reuse
    ways = [autoregressive]
    for label, config in configs.items():
        way = make_way(label, config)
        if way.engine is not None:
            way.engine._prefiller = replace(way.engine._prefiller, reuse=cache)
        ways.append(way)
    return ways


def _configs_with_variants(
    options: argparse.Namespace, configs: Mapping[str, SpeculativeConfig]
) -> dict[str, SpeculativeConfig]:
    """Return configurations for the scaled target, by label, and what else the options ask for.

    With ``draft_host``, and without a preset, each that can be run with a draft host is also run
    with one.
    """
    scaled = {}
    for label, config in configs.items():
        keep = config.keep_policy
        if keep is not None and KEEP_FACTS[keep].ranks_by_change:
            # A layer of the target lies --scale times as deep in the scaled one.
            layer = options.scale * config.settings_of(UVPruneConfig).layer
            config = replace(config, uv_prune=UVPruneConfig(layer=layer))
        scaled[label] = config
    if not options.draft_host or options.preset is not None:
        return scaled
    with_draft_host = {}
    for label, config in scaled.items():
        strategy = STRATEGIES[config.strategy].facts
        can_have_host = strategy.needs_draft_model and not strategy.needs_verdicts
        if can_have_host and draft_tree(config) is None:
            with_draft_host[f"{label}, draft host"] = replace(config, draft_host=True)
    return {**scaled, **with_draft_host}
