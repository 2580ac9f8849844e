"""Makes up the KV that a prefill of a real model would leave on its hosts."""

from dataclasses import dataclass

import torch

from apbv import HostGroup
from apbv.input.model_inputs import ModelInputs
from apbv.kv.cache import ShardedCache
from apbv.kv.facts import ModelIdentity
from apbv.kv.placement import ShardedKV
from apbv.layout import plan_layout
from apbv.prefilling.result import PrefillResult
from apbv.stats import StageTimer

QUESTION_LEN = 32  # tokens


@dataclass(frozen=True)
class Shape:
    """The KV of a model, in bf16: decoder layers, KV heads, and numbers of a head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int = 128


SHAPES = {"qwen2.5-vl-3b": Shape(36, 2), "qwen2.5-vl-7b": Shape(28, 4)}


def made_up_prefill(hosts: HostGroup, shape: Shape, num_tokens: int) -> PrefillResult:
    """Return what a prefill on these hosts would leave, with random KV that is spread as APB-V spreads it."""
    layout = plan_layout(
        num_hosts=hosts.size,
        num_tokens=num_tokens,
        context_start=0,
        query_start=num_tokens - QUESTION_LEN,
        anchor_len=None,
        passing_len=None,
        zigzag=True,
    )
    num_rows = sum(map(len, layout.cache_spans(hosts.rank)))
    random = torch.Generator().manual_seed(hosts.rank)
    size = 2, 1, shape.num_kv_heads, num_rows, shape.head_dim
    layers = [
        tuple(torch.randn(size, generator=random, dtype=torch.bfloat16).unbind()) for _ in range(shape.num_layers)
    ]
    positions = torch.arange(num_tokens)[None]
    return PrefillResult(
        logits=torch.zeros(1, 1),
        layout=layout,
        method="apbv",
        exact=False,
        inputs=ModelInputs(torch.zeros_like(positions), positions, 0, layout.query.start),
        timer=StageTimer(hosts),
        kv=ShardedKV(ShardedCache.of_shares(layers, [layout] * len(layers), hosts.rank), hosts),
        model=lambda: ModelIdentity(
            model="made up", revision=None, family="qwen2_5_vl", config_sha256="", weights_sha256=""
        ),
    )
