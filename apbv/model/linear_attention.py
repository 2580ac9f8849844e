"""Plug-in point for the linear attention of hybrid models (Gated DeltaNet).

A hybrid's decoder has two kinds of layers. One attends, and keeps keys and values of every token.
The other keeps a state of constant size: a matrix per head, and the last inputs of a short
convolution. It calls two functions by name, the convolution and the rule that turns states into
outputs; transformers takes them from causal-conv1d and flash-linear-attention where these are
installed. Here such a layer runs its own code with two others in their place, which call these for
one run of tokens at a time. The keyword ``linear`` of the decoder's forward, which transformers
passes down to every layer, decides what they do: nothing is global, and no modeling code is copied.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ..errors import UnsupportedModelError
from .fused import with_forwards, with_globals
from .modules import decoder_layers

Decoder = TypeVar("Decoder", bound=nn.Module)

_CONVOLUTION = "causal_conv1d_fn"
_RULE = "torch_chunk_gated_delta_rule"
# [1, C, T] before and after; and q, k, v, g, beta [1, T, H, ...], initial_state=None,
# output_final_state=False to (out [1, T, Hv, Dv], final state [1, Hv, Dk, Dv] or None)
Convolution = Callable[[Tensor], Tensor]
Rule = Callable[..., tuple[Tensor, Tensor | None]]


class LinearStates(Cache):
    """States of all linear attention layers after some tokens, for new tokens to start from.

    A layer has the last inputs of its convolution ``[1, C, K]``, and the rule's state
    ``[1, Hv, Dk, Dv]`` in fp32. Layers are numbered among themselves.

    Args:
        places: the numbers of these layers among all of the decoder.
        tensors: their states, which are copied; none: they are put later.

    Attributes:
        linear_layers: its layers.
    """

    def __init__(self, places: Sequence[int], tensors: Iterable[tuple[Tensor, Tensor]] = ()):
        self.linear_layers = [LinearAttentionLayer() for _ in places]
        super().__init__(layers=list(self.linear_layers))
        self.places = tuple(places)
        for index, states in enumerate(tensors):
            self.put(index, *states)

    @property
    def named(self) -> dict[str, Tensor]:
        """All tensors by name.

        They are ``linear_layers [L]``, and for every layer i ``linear_inputs.i`` and
        ``linear_state.i``.
        """
        named = {"linear_layers": torch.tensor(self.places)}
        for index, (inputs, state) in enumerate(self.tensors):
            named[f"linear_inputs.{index}"] = inputs
            named[f"linear_state.{index}"] = state
        return named

    @classmethod
    def of_named(cls, named: Mapping[str, Tensor], device: torch.device) -> "LinearStates | None":
        """Make states of the tensors of :attr:`named`; None if there are none."""
        if "linear_layers" not in named:
            return None
        places = named["linear_layers"].tolist()
        tensors = []
        for index in range(len(places)):
            inputs = named[f"linear_inputs.{index}"].to(device)
            state = named[f"linear_state.{index}"].to(device)
            tensors.append((inputs, state))
        return cls(places, tensors)

    def copy(self) -> "LinearStates":
        """Return states that can change while these stay."""
        return LinearStates(self.places, self.tensors)

    def among(self, cache: DynamicCache) -> DynamicCache:
        """Return a cache of all layers: a copy of these states, and the layers of a KV cache."""
        linear_layers = dict(zip(self.places, self.copy().layers, strict=True))
        attention_layers = iter(cache.layers)
        whole = DynamicCache()
        for place in range(len(cache.layers) + len(linear_layers)):
            if place in linear_layers:
                whole.layers.append(linear_layers[place])
            else:
                whole.layers.append(next(attention_layers))
        return whole

    def put(self, index: int, inputs: Tensor, state: Tensor) -> None:
        """Copy a layer's states."""
        self.update_conv_state(inputs, index)
        self.update_recurrent_state(state, index)

    @property
    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """The states of every layer, once they are put."""
        tensors = []
        for layer in self.linear_layers:
            inputs = layer.conv_states[0]
            state = layer.recurrent_states[0]
            assert inputs is not None  # both were put
            assert state is not None
            tensors.append((inputs, state))
        return tensors


class LinearAttention(Protocol):
    """Replacement of the two functions of the linear attention layers during one forward pass."""

    def convolve(self, layer: int, mixed: Tensor, width: int, function: Convolution) -> Tensor:
        """Convolve the inputs ``[1, C, S]`` of a layer.

        Args:
            width: K, of the convolution.
            function: the convolution, for one sequence.
        """

    def attend(self, layer: int, inputs: tuple[Tensor, ...], function: Rule) -> Tensor:
        """Return a layer's output ``[1, S, Hv, Dv]``.

        Args:
            inputs: q and k ``[1, S, Hk, Dk]``, v ``[1, S, Hv, Dv]``, g (log decay) and beta
                ``[1, S, Hv]``.
            function: the rule, for one sequence.
        """


def is_linear(layer: nn.Module) -> bool:
    """Return whether a decoder layer has linear attention."""
    return hasattr(layer, "linear_attn")


def with_linear_attention(decoder: Decoder) -> Decoder:
    """Return a hybrid's decoder, with the same weights, whose linear layers take ``linear``.

    This keyword is :class:`LinearStates`, which new tokens continue, or :class:`LinearAttention`.
    Layers of attention are numbered among themselves, like the layers of the KV cache, and so are
    the linear ones.

    Raises:
        UnsupportedModelError: its layers do not call the two functions that can be replaced.
    """
    own_layers = decoder_layers(decoder)
    kinds = {type(layer.get_submodule("linear_attn")) for layer in own_layers if is_linear(layer)}
    decoder = with_forwards(decoder, {kind: _forward(kind) for kind in kinds})
    next_number = {"linear_attn": 0, "self_attn": 0}
    layers = []
    for own_layer in decoder_layers(decoder):
        layer = copy.copy(own_layer)
        name = "linear_attn" if is_linear(layer) else "self_attn"
        mixer: Any = copy.copy(layer.get_submodule(name))
        mixer.layer_idx = next_number[name]
        next_number[name] += 1
        layer._modules = {**layer._modules, name: mixer}
        layers.append(layer)
    decoder._modules = {**decoder._modules, "layers": nn.ModuleList(layers)}
    return decoder


def _forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    own_forward = kind.forward
    names = unwrap(own_forward).__globals__
    if not {_CONVOLUTION, _RULE} <= set(unwrap(own_forward).__code__.co_names):
        raise UnsupportedModelError(
            f"{kind.__name__} of this transformers release calls other functions than {_RULE}"
        )

    def convolve(
        mixed: Tensor, weight: Tensor, *args, replaced: tuple[LinearAttention, int], **kwargs
    ) -> Tensor:
        linear, layer = replaced
        convolution = names[_CONVOLUTION]

        def convolve_sequence(x: Tensor) -> Tensor:
            return convolution(x, weight, *args, **kwargs)

        return linear.convolve(layer, mixed, weight.shape[-1], convolve_sequence)

    def attend(query, key, value, g, beta, *, replaced: tuple[LinearAttention, int], **kwargs):
        linear, layer = replaced
        kwargs.pop("initial_state")
        kwargs.pop("output_final_state")
        rule = partial(names[_RULE], **kwargs)
        return linear.attend(layer, (query, key, value, g, beta), rule), None

    in_runs = with_globals(own_forward, {_CONVOLUTION: convolve, _RULE: attend})

    def forward(
        self, hidden_states: Tensor, *args, linear: LinearStates | LinearAttention, **kwargs
    ) -> Tensor:
        if isinstance(linear, LinearStates):
            return own_forward(self, hidden_states, linear)
        return in_runs(self, hidden_states, replaced=(linear, self.layer_idx))

    return forward
