"""What exports read of a prefill's result, and how they describe it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...hosts import HostGroup
from ...input.prompts.model_inputs import ModelInputs
from ...layout import ContextLayout, kv_heads_of_member
from ...model.parts import ModelParts
from ..cache import KVLayer, kv_layers
from ..facts import KVFacts, ModelIdentity, digest_of_positions, digest_of_tokens
from ..placement import Layers, PlacedKV


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
    def num_kv_heads(self) -> int: ...
    @property
    def reduction(self) -> PrunedTokens | None: ...
    @property
    def density(self) -> float | None: ...


@dataclass(frozen=True)
class ExportedShare:
    """What a process exports of a prompt's KV.

    Attributes:
        tokens: the tokens, in row order.
        kv_heads: the range of KV heads, of the whole model's.
        layers: keys and values ``[1, Hkv, T, D]`` of every layer.
    """

    tokens: Sequence[range]
    kv_heads: range
    layers: Layers


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
        num_kv_heads=prefilled.num_kv_heads,
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


def exported_share(prefilled: PrefilledKV) -> ExportedShare | None:
    """Return the KV that this process exports; None if it holds nothing, or copies alone."""
    hosts = prefilled.kv.hosts
    share = prefilled.kv.local_kv()
    if share is None:
        return None
    heads = own_heads(prefilled.num_kv_heads, hosts)
    rank = hosts.tensor_parallel_rank
    if rank > 0:
        before = kv_heads_of_member(prefilled.num_kv_heads, rank - 1, hosts.tensor_parallel_size)
        if heads == before:  # the process before exports them
            return None
    tokens, layers = share
    return ExportedShare(tokens, heads, layers)


def own_heads(num_kv_heads: int, hosts: HostGroup) -> range:
    """Return the range of the whole model's KV heads that this process has."""
    return kv_heads_of_member(num_kv_heads, hosts.tensor_parallel_rank, hosts.tensor_parallel_size)


def hybrid_name(prefilled: PrefilledKV) -> str | None:
    """Return a hybrid model's name in a refusal; None for other models."""
    return None if prefilled.kv.states is None else "hybrid"
