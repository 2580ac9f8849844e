"""What exports read of a prefill's result, and how they describe it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from ...hosts import HostGroup
from ...input.prompts.model_inputs import ModelInputs
from ...layout import ContextLayout, split_evenly
from ...model.parts import ModelParts
from ..cache import KVLayer, kv_layers
from ..facts import KVFacts, ModelIdentity, digest_of_positions, digest_of_tokens
from ..placement import PlacedKV


class PrunedTokens(Protocol):
    """Which visual tokens of a prompt were pruned; see :class:`apbv.prefilling.result.Reduction`.

    Attributes:
        method: the name of the reduction.
        ratio: the share of visual tokens that it was asked to keep.
        num_before: the number of visual tokens before.
        kept: the indices of those that stayed, int64.
    """

    @property
    def method(self) -> str: ...
    @property
    def ratio(self) -> float: ...
    @property
    def num_before(self) -> int: ...
    @property
    def kept(self) -> Tensor: ...


class PrefilledKV(Protocol):
    """The part of :class:`apbv.PrefillResult` that exports read; see its attributes."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def layout(self) -> ContextLayout: ...
    @property
    def method(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def inputs(self) -> ModelInputs: ...
    @property
    def kv(self) -> PlacedKV: ...
    @property
    def model(self) -> Callable[[], ModelIdentity]: ...
    @property
    def reduction(self) -> PrunedTokens | None: ...
    @property
    def density(self) -> float | None: ...


def identify(parts: ModelParts) -> ModelIdentity:
    """Identify a model by its configuration and weights, so that no other model reads its KV."""
    return ModelIdentity(
        model=parts.family.checkpoint,
        revision=parts.family.revision,
        family=parts.family.name,
        config_sha256=parts.family.config_digest(),
        weights_sha256=parts.weights_digest(),
    )


def facts_of(prefilled: PrefilledKV) -> KVFacts:
    """Describe the KV, on the leader."""
    layers = _layers(prefilled)
    return KVFacts(
        **asdict(prefilled.model()),
        num_tokens=prefilled.layout.num_tokens,
        tokens_sha256=digest_of_tokens(prefilled.inputs.input_ids[0]),
        positions_sha256=digest_of_positions(positions_of(prefilled)),
        position_rule=prefilled.inputs.position_rule,
        dtype=str(layers[0].keys.dtype).removeprefix("torch."),
        num_layers=len(layers),
        num_kv_heads=layers[0].keys.shape[1] * prefilled.kv.hosts.tensor_parallel_size,
        head_dim=layers[0].keys.shape[-1],
        method=prefilled.method,
        exact=prefilled.exact,
    )


def _layers(prefilled: PrefilledKV) -> Sequence[KVLayer]:
    """Return the layers of KV of a process that holds some."""
    cache = prefilled.kv.cache
    assert cache is not None  # it holds some
    return kv_layers(cache)


def positions_of(prefilled: PrefilledKV) -> torch.Tensor:
    """Return the rotary positions to compare: ``[3, n]`` for M-RoPE models, else ``[n]``."""
    position_ids = prefilled.inputs.position_ids
    return position_ids[:, 0] if position_ids.dim() == 3 else position_ids[0]


def local_heads(prefilled: PrefilledKV) -> range:
    """Return this process's KV heads."""
    hosts = prefilled.kv.hosts
    num_local_heads = _layers(prefilled)[0].keys.shape[1]
    return own_heads(num_local_heads * hosts.tensor_parallel_size, hosts)


def own_heads(num_kv_heads: int, hosts: HostGroup) -> range:
    """Return the range of the whole model's KV heads that this process has."""
    return split_evenly(range(num_kv_heads), hosts.tensor_parallel_size)[hosts.tensor_parallel_rank]


def hybrid_name(prefilled: PrefilledKV) -> str | None:
    """Return a hybrid model's name in a refusal; None for other models."""
    return None if prefilled.kv.states is None else "hybrid"
