"""What a further question about the same video, or the same long text, need not compute again.

``"exact"`` keeps what the vision tower made of a video: a further question reads and encodes nothing, and runs the
language model as ever. ``"kv"`` keeps the KV of everything before the question: a further question runs by itself
over that. Where the method is exact so is that; otherwise the KV was compressed with the first question in mind.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import ReuseConfig
from ..decode.decoder import run_language_model
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache, appending_in_place
from ..model.attention import ShardedAttention
from ..model.parts import ModelParts
from ..stats import StageTimer
from .encode import encode_visual
from .result import PrefillResult, first_tokens


class ByteBoundedCache:
    """Values by key; the ones that were not asked for longest go when there are too many bytes.

    Args:
        max_bytes: of all values together; what is larger by itself is not kept.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Any:
        """The value, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
        if num_bytes > self.max_bytes:
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed


@dataclass(frozen=True)
class KeptPrefix:
    """The KV of a prompt up to its question, as it lies on this host.

    Attributes:
        state: the earlier prompt's, without its KV.
        gathered: the KV, on host 0, where it was gathered.
        shares: where it was not, keys and values of every layer, ``[1, Hkv, T, D]``, of what this host keeps.
    """

    state: PrefillResult
    gathered: DynamicCache | None
    shares: list[tuple[Tensor, Tensor]] | None

    @classmethod
    def of(cls, state: PrefillResult, hosts: HostGroup) -> "KeptPrefix | None":
        """None where the hosts have shared out the question, too: its KV does not come last on host 0."""
        length, bare = state.inputs.query_start, replace(state, _shards=None, _gathered=None)
        if state.shards is None:
            gathered = state.to_dynamic_cache()
            return cls(bare, gathered and first_tokens(gathered, length, DynamicCache()), None)
        if state.layout.query != range(length, state.num_tokens):
            return None
        rows = sum(len(span) for span in state.layout.cache_spans(hosts.rank) if span != state.layout.query)
        return cls(
            bare, None, [(layer.keys[:, :, :rows], layer.values[:, :, :rows]) for layer in state.shards.layers]
        )

    @property
    def num_bytes(self) -> int:
        """What it keeps from being freed: with a view all of its tensor, the question's rows included."""
        layers = self.shares or []
        if self.gathered is not None:
            layers = [(layer.keys, layer.values) for layer in self.gathered.layers]
        inputs = self.state.inputs
        tensors = [self.state.logits, inputs.input_ids, inputs.position_ids, *chain.from_iterable(layers)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class Reuse:
    """What one host keeps from request to request."""

    def __init__(self, config: ReuseConfig):
        self._mode = config.mode
        self._cache = ByteBoundedCache(config.max_bytes)

    # ---- "exact" ----

    def has_embeddings(self, inputs: ModelInputs, hosts: HostGroup) -> bool:
        """Whether no host's frames need be read; collective."""
        visual = inputs.visual
        if self._mode != "exact" or visual is None:
            return False
        return _on_all(hosts, visual.source in self._cache or not visual.pieces[hosts.rank])

    def embeddings(self, inputs: ModelInputs, parts: ModelParts) -> Tensor | None:
        """What the vision tower makes of this host's frames, now or before; None where that is not kept.

        Returns:
            As :func:`apbv.prefilling.encode.encode_visual`.
        """
        if self._mode != "exact" or inputs.visual is None or inputs.visual.source is None:
            return None
        rows = self._cache.get(inputs.visual.source)
        if rows is None:
            rows = encode_visual(parts, inputs.visual)
            # In host memory, because a GPU's is what long videos are short of.
            if rows.nbytes:  # some hosts have no frames
                self._cache.put(inputs.visual.source, rows.cpu(), rows.nbytes)
        return rows.to(parts.device)

    # ---- "kv" ----

    def find_prefix(self, inputs: ModelInputs, hosts: HostGroup) -> KeptPrefix | None:
        """What every host has kept of an earlier prompt that began as this one; collective."""
        if self._mode != "kv":
            return None
        kept = self._cache.get(_prefix_key(inputs))
        return kept if _on_all(hosts, kept is not None) else None

    def keep_prefix(self, state: PrefillResult, hosts: HostGroup) -> None:
        """Keep the KV of a prompt up to its question, where its source is known."""
        key = _prefix_key(state.inputs)
        kept = KeptPrefix.of(state, hosts) if self._mode == "kv" and key is not None else None
        if kept is not None:
            self._cache.put(key, kept, kept.num_bytes)


def prefill_question(
    parts: ModelParts, inputs: ModelInputs, kept: KeptPrefix, hosts: HostGroup, timer: StageTimer
) -> PrefillResult:
    """Run a prompt's question over the KV that was kept of what comes before it; collective.

    Returns:
        As :func:`apbv.prefill`, ``exact`` where the kept KV is.
    """
    start, before = inputs.query_start, kept.state
    layout = replace(before.layout, query=range(before.layout.query.start, inputs.num_tokens))
    question, position = inputs.input_ids[0, start:].tolist(), int(inputs.position_ids[..., start].flatten()[-1])
    logits = cache = shards = None
    with hosts.collective_stage("prefill"), timer.stage("prefill"):
        if kept.shares is not None:
            shards = ShardedCache.of_shares(kept.shares, layout, hosts.rank, holds_query=False)
            attention = ShardedAttention(hosts, parts.backend)
            logits = run_language_model(parts, question, position, shards, attention, last_only=True)
        elif hosts.rank == 0:
            cache = appending_in_place(first_tokens(kept.gathered, start, DynamicCache()))
            logits = run_language_model(parts, question, position, cache, last_only=True)
        if kept.shares is None:
            if logits is None:
                logits = torch.empty(1, parts.vocab_size, dtype=parts.dtype, device=parts.device)
            logits = hosts.broadcast(logits)
        timer.mark_first_token()
    return replace(
        before,
        logits=logits,
        layout=layout,
        inputs=inputs.without_pixels(),
        timer=timer,
        reused="kv",
        _shards=shards,
        _gathered=cache,
    )


def _on_all(hosts: HostGroup, is_here: bool) -> bool:
    """Collective: hosts keep different numbers of bytes, and so forget at different times."""
    return all(found for (found,) in hosts.gather_floats([is_here]))


def _prefix_key(inputs: ModelInputs) -> Hashable:
    """What the KV before the question depends on; None where there is nothing, or nobody knows."""
    visual = inputs.visual
    if not inputs.query_start or (visual is not None and visual.source is None):
        return None
    prefix = inputs.input_ids[0, : inputs.query_start].numpy().tobytes()
    return hashlib.sha256(prefix).digest(), inputs.position_rule, visual and visual.source
