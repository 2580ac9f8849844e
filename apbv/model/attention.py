"""Where apbv plugs into transformers: one attention function, in force only inside a context manager.

The function receives the method at hand as the keyword argument ``apbv`` of the language model's forward,
which transformers hands down to every layer. So nothing is global and no modeling file is copied.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..hosts import HostGroup
from ..kernels import merge_states, segmented_attention, verify_attention

_NAME = "apbv"


class LayerAttention(Protocol):
    """What stands in for a layer's attention during one forward pass."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q ``[1, Hq, S, D]`` and k, v ``[1, Hkv, T, D]``, post-RoPE, to ``[1, Hq, S, D]``."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    apbv: LayerAttention | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: returns (``[B, S, Hq, D]`` contiguous, None)."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, which apbv's attention does not have")
    if attention_mask is not None:
        raise ValueError("apbv's attention takes no mask: padded and packed batches are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if apbv is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out, _ = segmented_attention(query, [(key, value)], scale, causal_last=causal)
    else:
        out = apbv(query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def apbv_attention(language_model: PreTrainedModel) -> Iterator[None]:
    """Let the language model (never its vision tower) use apbv's attention; restored also on error."""
    config = language_model.config
    before = config._attn_implementation
    language_model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        # Not set_attn_implementation: it would re-validate, and could refuse, what the caller had in force.
        config._attn_implementation = before


class PlainAttention:
    """Attention of new tokens, the last in the cache, over a long KV that is all here."""

    def __init__(self, backend: str = "auto"):
        self._backend = backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return verify_attention(q, k, v, scale, backend=self._backend)[0]


class ShardedAttention:
    """Attention of new tokens over a KV that is spread over the hosts (decoding, and a separate query pass).

    Every host attends with the new queries to its own share; the partial results are gathered and merged in
    host order (Eq. 5), so all hosts continue with the same numbers. Host 0's share ends with the new tokens.
    """

    def __init__(self, hosts: HostGroup, backend: str = "auto"):
        self._hosts, self._backend = hosts, backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        visible = None if self._hosts.rank == 0 else torch.ones(q.shape[2], 0, dtype=torch.bool, device=q.device)
        out, lse = verify_attention(q, k, v, scale, visible=visible, backend=self._backend)
        return gather_and_merge(out, lse, self._hosts, self._backend)()


class TreeAttention:
    """Attention of new tokens that form a tree, behind a KV that all of them see.

    Args:
        visible: bool ``[S, N]``: which of the last N tokens in the cache, themselves included, the new ones see.
        hosts: over whom the KV is spread, of which host 0's share ends with the new tokens; None: it is all here.
    """

    def __init__(self, visible: Tensor, hosts: HostGroup | None = None, backend: str = "auto"):
        self._visible, self._hosts, self._backend = visible, hosts, backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self._hosts is None:
            return verify_attention(q, k, v, scale, visible=self._visible, backend=self._backend)[0]
        visible = self._visible if self._hosts.rank == 0 else self._visible[:, :0]
        out, lse = verify_attention(q, k, v, scale, visible=visible, backend=self._backend)
        return gather_and_merge(out, lse, self._hosts, self._backend)()


class KeptAttention:
    """Attention of new tokens, which are all that the cache holds, behind some of a prompt's tokens.

    The prompt's KV is read where it lies and never written: a draft on the target's own KV needs no copy of it.

    Args:
        layers: of each decoder layer the prompt's keys and values, ``[1, Hkv, n, D]``, and which of its tokens
            a KV head sees, int32 ``[1, Hkv, M]``. Every forward pass goes through all layers in this order: which
            one a call is for is known by counting.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor, Tensor]], backend: str = "auto"):
        self._layers, self._backend = itertools.cycle(layers), backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values, kept = next(self._layers)
        unmasked = torch.ones(q.shape[2], 0, dtype=torch.bool, device=q.device)
        partials = [
            verify_attention(q, keys, values, scale, visible=unmasked, kept=kept, backend=self._backend),
            verify_attention(q, k, v, scale, backend=self._backend),
        ]
        outs, lses = map(torch.stack, zip(*partials, strict=True))
        return merge_states(outs, lses, backend=self._backend)[0].to(q.dtype)


class PrefillObserver(Protocol):
    """Looks on while a prompt is prefilled, on every host that computes.

    Attributes:
        hidden_layers: which decoder layers' inputs it wants to see (0: the embeddings); possibly none.
        wants_passed: whether it wants to be told what is passed on.
    """

    hidden_layers: tuple[int, ...]
    wants_passed: bool

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        """One layer's attention: the query's states, and the keys of what this host keeps.

        Args:
            q_query: ``[1, Hq, n_q, D]``, post-RoPE.
            keys: ``[1, Hkv, T_i, D]`` for each of the layout's ``cache_spans`` of this host.
        """

    def observe_hidden(self, layer: int, query: Tensor | None, kept: Sequence[Tensor] | None) -> None:
        """A layer's input, of the query and of the rest: each in the pass that computes it as the model means.

        Args:
            query: ``[n_q, d]``
            kept: ``[T_i, d]`` for each of the layout's ``cache_spans`` of this host.
        """

    def observe_nothing(self) -> None:
        """This host computes nothing of the prompt; called where the others begin, to join in their exchanges."""

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        """One layer's selection of a block's KV; see :attr:`apbv.prefilling.methods.PrefillMethod.on_passed`."""


class ObservedAttention:
    """A layer's attention, and somebody who looks on.

    Args:
        query_rows, kept_rows: where the query and this host's cache spans lie among the local tokens.
    """

    def __init__(
        self,
        attention: LayerAttention,
        observer: PrefillObserver,
        query_rows: range,
        kept_rows: Sequence[range],
    ):
        self._attention, self._observer = attention, observer
        self._query_rows, self._kept_rows = query_rows, kept_rows

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows = self._query_rows
        keys = [k[:, :, kept.start : kept.stop] for kept in self._kept_rows]
        self._observer.observe(q[:, :, rows.start : rows.stop], keys, scale)
        return self._attention(q, k, v, scale)


def gather_and_merge(out: Tensor, lse: Tensor, hosts: HostGroup, backend: str = "auto"):
    """Start exchanging partial attention results; the returned function waits, merges and returns the output.

    Args:
        out: ``[B, H, S, D]``, this host's partial result.
        lse: ``[B, H, S]``.
    """
    if hosts.size == 1 or not out.numel():
        return lambda: out
    # One message instead of two: all of out and then all of lse, so that what arrives is merged where it lies.
    packed = out.new_empty(out.nbytes + lse.nbytes, dtype=torch.uint8)
    for place, states in zip(_unpack(packed, out, lse), (out, lse), strict=True):
        place.copy_(states)
    exchange = hosts.all_gather(packed)

    def finish() -> Tensor:
        return merge_states(*_unpack(exchange.wait(), out, lse), backend=backend)[0].to(out.dtype)

    return finish


def _unpack(packed: Tensor, *like: Tensor) -> list[Tensor]:
    """Bytes ``[..., n]`` seen as tensors one after the other, of the shapes and dtypes of others."""
    parts = packed.split([tensor.nbytes for tensor in like], dim=-1)
    return [part.view(tensor.dtype).unflatten(-1, tensor.shape) for part, tensor in zip(parts, like, strict=True)]
