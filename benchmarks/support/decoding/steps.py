"""Runs one decoding step in several ways, compares their logits, and times them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from transformers import DynamicCache

from apbv import HostGroup
from apbv.decode.runner import Decoder
from apbv.kv.placement import GatheredKV
from apbv.model.parts import ModelParts
from apbv.stats import synchronize


@dataclass
class Way:
    """One way to compute a step.

    Attributes:
        name: its name in tables.
        step: function that runs a pass over these tokens, takes them back, and returns the logits.
        setup_s: seconds of the first step.
        error: largest error of its logits, relative to the largest logit.
        ms: milliseconds of a step, one entry for every round.
    """

    name: str
    step: Callable[[list[int]], Tensor]
    setup_s: float = 0.0
    error: float = 0.0
    ms: list[float] = field(default_factory=list)


def with_transformers(parts: ModelParts, cache: DynamicCache, num_tokens: int) -> Callable[[list[int]], Tensor]:
    """Return the step of the model as it was loaded, with a DynamicCache."""

    def step(tokens: list[int]) -> Tensor:
        position_ids = torch.arange(num_tokens, num_tokens + len(tokens), device=parts.device)[None]
        hidden = parts.language_model(
            inputs_embeds=parts.embed_tokens(torch.tensor([tokens], device=parts.device)),
            position_ids=position_ids.expand(3, 1, -1) if parts.uses_mrope else position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.crop(-len(tokens))
        return parts.logits(hidden)[0]

    return step


def with_apbv(parts: ModelParts, cache: DynamicCache, num_tokens: int) -> Callable[[list[int]], Tensor]:
    """Return the step of apbv's decoder."""
    kv = GatheredKV(cache, num_tokens, HostGroup.single(parts.device))
    decoder = Decoder(parts, kv, num_tokens)

    def step(tokens: list[int]) -> Tensor:
        logits = decoder.advance(tokens)
        decoder.take_back(len(tokens))
        return logits

    return step


def compile_parts(parts: ModelParts) -> None:
    """Compile the MLPs and norms; the shapes of attention and cache change with every token."""
    for layer in parts.language_model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = torch.compile(module.forward, dynamic=True)


def random_cache(parts: ModelParts, num_tokens: int, seed: int) -> DynamicCache:
    """Fill a cache with random KV."""
    generator = torch.Generator(parts.device).manual_seed(seed)
    shape = (2, 1, parts.num_kv_heads, num_tokens, parts.head_dim)
    cache = DynamicCache()
    for layer in range(parts.num_layers):
        states = torch.randn(shape, generator=generator, device=parts.device).to(parts.dtype)
        cache.update(*states, layer)
    return cache


@torch.no_grad()
def measure(ways: list[Way], tokens: list[int], rounds: int, warmup: int, device: torch.device) -> None:
    """Check every way against the first, time all in turn, and check them again."""
    expected = None
    for way in ways:
        began = time.perf_counter()
        logits = way.step(tokens).double()
        way.setup_s = time.perf_counter() - began
        expected = logits if expected is None else expected
        way.error = relative_error(logits, expected)
    for number in range(warmup + rounds):
        for way in ways:
            synchronize(device)
            began = time.perf_counter()
            way.step(tokens)
            synchronize(device)
            if number >= warmup:
                way.ms.append((time.perf_counter() - began) * 1e3)
    for way in ways:  # a CUDA graph does not repeat the first step, but a later one
        errors = way.error, relative_error(way.step(tokens).double(), expected)
        way.error = float(torch.tensor(errors).max())  # NaN, if one is


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())
