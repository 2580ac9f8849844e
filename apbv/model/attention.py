"""The plug-in point in transformers: one attention function, in force only in a context manager.

The function receives the current method as the keyword argument ``apbv`` of the language model's
forward, which transformers passes down to every layer. Nothing is therefore global, and no modeling
file is copied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from ..hosts import HostGroup
from ..kernels import (
    BufferTable,
    SequenceBuffers,
    batch_decode_attention,
    merge_states,
    segmented_attention,
    verify_attention,
)
from ..pending import Pending

_NAME = "apbv"


class LayerAttention(Protocol):
    """Function that replaces a layer's attention during one forward pass."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        """Attend to the keys and values.

        Args:
            q: ``[1, Hq, S, D]``, post-RoPE.
            k, v: ``[1, Hkv, T, D]``, post-RoPE.
            scale: what the scores are multiplied by.
            layer: the index of the decoder layer.

        Returns:
            ``[1, Hq, S, D]``.
        """


def attend(
    module: Any,  # a layer's attention, of transformers
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
    """Attend as transformers' attention functions do: return (``[B, S, Hq, D]`` contiguous, None).

    Raises:
        UnsupportedModelError: the module asks for something else than plain causal attention.
    """
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} needs {name}, which apbv's attention does not support"
            )
    if attention_mask is not None:
        raise UnsupportedModelError(
            "apbv's attention takes no mask: padded and packed batches are not supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if apbv is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out, _ = segmented_attention(query, [(key, value)], scale, causal_last=causal)
    else:
        out = apbv(query, key, value, scale, module.layer_idx)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, attend)


def is_in_force(config: PreTrainedConfig) -> bool:
    """Return whether the modules of a config have apbv's attention."""
    return config._attn_implementation == _NAME


@contextmanager
def apbv_attention(language_model: PreTrainedModel) -> Iterator[None]:
    """Use apbv's attention in the language model, not its vision tower; restored even on errors.

    Not by set_attn_implementation, which takes half a millisecond, and could reject what was in
    force before.
    """
    config = language_model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@dataclass(frozen=True)
class NewTokenAttention:
    """Attention of new tokens, the last in the cache, to a KV that all of them see.

    Attributes:
        backend: what computes it, as in :class:`apbv.PrefillConfig`.
        visible: bool ``[S, N]``: which of the last N tokens in the cache, themselves included, the
            new ones see; None: those up to themselves.
        hosts: the hosts over which the KV is sharded. Host 0's share ends with the new tokens.
            Every host attends with the new queries to its own share; the partial results are
            gathered and merged in host order (Eq. 5), so that all hosts continue with the same
            numbers. None: the KV is all here.
        num_keys: of every layer int32 ``[1]`` on the device: how many rows of the cache count,
            where it has room after them; see :func:`apbv.kernels.verify_attention`. None: all. Only
            for a KV that is all here.
    """

    backend: str = "auto"
    visible: Tensor | None = None
    hosts: HostGroup | None = None
    num_keys: Sequence[Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        holds_newest = self.hosts is None or self.hosts.rank == 0
        # Other hosts have none of the new tokens.
        visible = self.visible if holds_newest else q.new_empty(q.shape[2], 0, dtype=torch.bool)
        num_keys = None if self.num_keys is None else self.num_keys[layer]
        state = verify_attention(
            q, k, v, scale, visible=visible, num_keys=num_keys, backend=self.backend
        )
        if self.hosts is None:
            out, _ = state
            return out
        return gather_and_merge([state], self.hosts, self.backend).wait()


@dataclass(frozen=True)
class CausalAttention:
    """Attention of a whole prompt's tokens to those up to themselves, in one process.

    Attributes:
        backend: what computes it, as in :class:`apbv.PrefillConfig`.
    """

    backend: str = "auto"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        out, _ = segmented_attention(q, [(k, v)], scale, causal_last=True, backend=self.backend)
        return out


@dataclass(frozen=True)
class PaddedAttention:
    """Attention of new tokens of several sequences that are padded on the left in one cache.

    Attributes:
        backend: what computes it, as in :class:`apbv.PrefillConfig`.
        starts: the first row of each sequence in the cache.
    """

    backend: str
    starts: Sequence[int]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        outs = []
        for number, start in enumerate(self.starts):
            of_sequence = slice(number, number + 1)
            out, _ = verify_attention(
                q[of_sequence],
                k[of_sequence, :, start:],
                v[of_sequence, :, start:],
                scale,
                backend=self.backend,
            )
            outs.append(out)
        return torch.cat(outs)


class BatchAttention:
    """Attention of the newest token of each of several sequences to the KV of its own sequence.

    It also appends the tokens' KV: the model runs without a cache.

    Args:
        backend: what computes it, as in :class:`apbv.PrefillConfig`.
        layers: addresses of the sequences' KV in every decoder layer.
    """

    def __init__(self, backend: str, layers: Sequence[SequenceBuffers] | Sequence[BufferTable]):
        self._backend = backend
        self._layers = layers

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        return batch_decode_attention(q, k, v, self._layers[layer], scale, backend=self._backend)


def gather_and_merge(
    states: Sequence[tuple[Tensor, Tensor]],
    hosts: HostGroup,
    backend: str = "auto",
    *,
    out: Tensor | None = None,
) -> Pending[Tensor]:
    """Start merging all hosts' partial attention results.

    Args:
        states: one or more of this host's, over disjoint keys: out ``[B, H, S, D]`` and lse
            ``[B, H, S]`` of each.
        backend: what merges them; see :func:`apbv.kernels.merge_states`.
        out: ``[B, H, S, D]``, of any strides with neighbouring numbers along D, to be
            filled; None: a new tensor in the dtype of the first partial result.

    Returns:
        The merged out, which arrives with all hosts' results.
    """
    first, first_lse = states[0]
    if hosts.size == 1 and len(states) == 1 and out is None:
        return Pending(lambda: first)
    if out is None:
        out = torch.empty_like(first)
    if hosts.size == 1 or not first.numel():
        _merge_here(states, out, backend)
        return Pending(lambda: out)
    # One message instead of two: all of out and then all of lse, so that what arrives is merged
    # where it lies.
    packed = first.new_empty(first.nbytes + first_lse.nbytes, dtype=torch.uint8)
    packed_out, packed_lse = _unpack(packed, first, first_lse)
    packed_lse.copy_(_merge_here(states, packed_out, backend))

    def merge(gathered: Tensor) -> Tensor:
        outs, lses = _unpack(gathered, first, first_lse)
        merged, _ = merge_states(outs, lses, out=out, backend=backend)
        return merged

    return hosts.all_gather(packed).then(merge)


def _merge_here(states: Sequence[tuple[Tensor, Tensor]], out: Tensor, backend: str) -> Tensor:
    """Bring one host's partial results to ``out``, as one; return its lse."""
    if len(states) == 1:
        state_out, lse = states[0]
        out.copy_(state_out)
        return lse
    outs, lses = zip(*states, strict=True)
    _, lse = merge_states(outs, lses, out=out, backend=backend)
    return lse


def _unpack(packed: Tensor, *like: Tensor) -> list[Tensor]:
    """View bytes ``[..., n]`` as adjacent tensors, with the shapes and dtypes of others."""
    chunks = packed.split([tensor.nbytes for tensor in like], dim=-1)
    return [
        chunk.view(tensor.dtype).unflatten(-1, tensor.shape)
        for chunk, tensor in zip(chunks, like, strict=True)
    ]
