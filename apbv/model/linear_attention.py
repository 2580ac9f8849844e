"""Plug-in point for the linear attention of hybrid models (Gated DeltaNet).

A hybrid's decoder has two kinds of layers. One attends, and keeps keys and values of every token.
The other keeps a state of constant size: a matrix per head, and the last inputs of a short
convolution. Here such a layer is a :class:`GatedDeltaNet`, with the model's weights. For its
convolution and its rule it calls the object that a forward pass hands to the decoder's layers as
``linear``: a :class:`LinearAttention`, which decides in which state a run of tokens begins. In
decoding that is :class:`LinearStates`, in a prefill over several hosts
:class:`apbv.prefilling.split_linear_attention.SplitLinearAttention`. The functions themselves are
transformers' own, which takes them from causal-conv1d and flash-linear-attention where these are
installed.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from ..errors import UnsupportedModelError
from .fused import StandIn, become
from .modules import decoder_layers

Decoder = TypeVar("Decoder", bound=nn.Module)

# transformers' functions that :class:`GatedDeltaNet` calls, in the file of every such model. Those
# with "torch" in their names are the ones that transformers replaces by a library's.
_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


# Attributes of a prompt's states that are states before some of its tokens.
_EARLIER = ("before_question", "before_last")


class LinearStates(Cache):
    """States of all linear attention layers after some tokens, for new tokens to start from.

    A layer has the last inputs of its convolution ``[1, C, K]``, and the rule's state
    ``[1, Hv, Dk, Dv]`` in fp32. Index 0 is the first linear layer, not the decoder's first layer.
    It is the :class:`LinearAttention` of decoding.

    Args:
        places: the numbers of these layers among all of the decoder.
        tensors: their states, which are copied; none: they are put later.

    Attributes:
        linear_layers: its layers.
        before_question: of a prompt, the states before its question; None: they were not kept.
        before_last: of a prompt, the states before its last token; None: they were not kept.
    """

    def __init__(self, places: Sequence[int], tensors: Iterable[tuple[Tensor, Tensor]] = ()):
        self.before_question: LinearStates | None = None
        self.before_last: LinearStates | None = None
        self.linear_layers = [LinearAttentionLayer() for _ in places]
        super().__init__(layers=list(self.linear_layers))
        self.places = tuple(places)
        for index, states in enumerate(tensors):
            self.put(index, *states)

    @property
    def named(self) -> dict[str, Tensor]:
        """All tensors by name.

        They are ``linear_layers [L]``, and for every layer i ``linear_inputs.i`` and
        ``linear_state.i``; those of earlier states begin with the attribute's name and a full stop.
        """
        named = {"linear_layers": torch.tensor(self.places)}
        for index, (inputs, state) in enumerate(self.tensors):
            named[f"linear_inputs.{index}"] = inputs
            named[f"linear_state.{index}"] = state
        for attribute in _EARLIER:
            earlier = getattr(self, attribute)
            if earlier is not None:
                named |= {f"{attribute}.{name}": tensor for name, tensor in earlier.named.items()}
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
        states = cls(places, tensors)
        for attribute in _EARLIER:
            of_earlier = {}
            for name, tensor in named.items():
                if name.startswith(f"{attribute}."):
                    of_earlier[name.removeprefix(f"{attribute}.")] = tensor
            setattr(states, attribute, cls.of_named(of_earlier, device))
        return states

    def copy(self) -> "LinearStates":
        """Return states that can change while these stay."""
        return LinearStates(self.places, self.tensors)

    def of_first_layers(self, count: int) -> "LinearStates":
        """Return the states of those layers that are among the decoder's first ``count``."""
        places = [place for place in self.places if place < count]
        return LinearStates(places, self.tensors[: len(places)])

    def among(self, cache: DynamicCache, whole: DynamicCache | None = None) -> DynamicCache:
        """Return a cache of all layers: a copy of these states, and the layers of a KV cache.

        Args:
            whole: an empty cache that gets them; None: a new one.
        """
        linear_layers = dict(zip(self.places, self.copy().layers, strict=True))
        attention_layers = iter(cache.layers)
        if whole is None:
            whole = DynamicCache()
        for place in range(len(cache.layers) + len(linear_layers)):
            if place in linear_layers:
                whole.layers.append(linear_layers[place])
            else:
                whole.layers.append(next(attention_layers))
        return whole

    @property
    def all_tensors(self) -> list[Tensor]:
        """The tensors of these states and of the earlier ones."""
        tensors = [tensor for of_layer in self.tensors for tensor in of_layer]
        for attribute in _EARLIER:
            earlier = getattr(self, attribute)
            if earlier is not None:
                tensors += earlier.all_tensors
        return tensors

    def put(self, index: int, inputs: Tensor, state: Tensor) -> None:
        """Copy a layer's states."""
        self.update_conv_state(inputs, index)
        self.update_recurrent_state(state, index)

    def convolve(self, layer: int, mixed: Tensor, convolution: "Convolution") -> Tensor:
        """Convolve new tokens ``[1, C, S]``; see :class:`LinearAttention`."""
        count = mixed.shape[2]
        state = self.get_conv_state(layer, state_idx=0)
        if state is not None and count == 1 and not self.is_recording_past(layer):
            # In place, which a cache that records the past does not allow.
            return convolution.step(mixed, state)
        # The last inputs before, or zeros, and then the new ones, whose outputs come last.
        inputs = self.update_conv_state(mixed, layer, conv_kernel_size=convolution.width)
        return convolution(inputs)[:, :, -count:]

    def attend(self, layer: int, inputs: tuple[Tensor, ...], rule: "Rule") -> Tensor:
        """Apply the rule to new tokens; see :class:`LinearAttention`."""
        count = inputs[0].shape[1]
        state = self.get_recurrent_state(layer, state_idx=0)
        out, state = rule(inputs, state, steps=state is not None and count == 1)
        self.update_recurrent_state(state, layer)
        return out

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
    """What computes the convolution and the rule of linear attention layers in a forward pass."""

    def convolve(self, layer: int, mixed: Tensor, convolution: "Convolution") -> Tensor:
        """Convolve the inputs ``[1, C, S]`` of a layer.

        Args:
            layer: the layer's number among those with linear attention.
            convolution: the layer's, for one sequence.
        """

    def attend(self, layer: int, inputs: tuple[Tensor, ...], rule: "Rule") -> Tensor:
        """Return a layer's output ``[1, S, Hv, Dv]``.

        Args:
            layer: the layer's number among those with linear attention.
            inputs: q and k ``[1, S, Hk, Dk]``, v ``[1, S, Hv, Dv]``, g (log decay) and beta
                ``[1, S, Hv]``.
            rule: the layer's, for one sequence.
        """


@dataclass(frozen=True)
class Convolution:
    """The short causal convolution of a layer; a call maps ``[1, C, T]`` to ``[1, C, T]``.

    Attributes:
        weight: ``[C, K]``.
        bias: ``[C]`` or None.
        activation: the name of the function that follows the convolution.
        function: transformers' ``causal_conv1d_fn``, of a sequence.
        step_function: transformers' ``causal_conv1d_update``, of one token, which also moves the
            state on in place.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str
    function: Callable[..., Tensor]
    step_function: Callable[..., Tensor]

    @property
    def width(self) -> int:
        """K, the number of inputs that an output depends on."""
        return self.weight.shape[-1]

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.function(inputs, self.weight, self.bias, activation=self.activation)

    def step(self, inputs: Tensor, state: Tensor) -> Tensor:
        """Convolve one token ``[1, C, 1]``, and move the state ``[1, C, K]`` on in place."""
        return self.step_function(inputs, state, self.weight, self.bias, self.activation)


@dataclass(frozen=True)
class Rule:
    """The gated delta rule of a layer; its functions divide queries and keys by their norms.

    Attributes:
        function: transformers' rule of a sequence, in chunks.
        step_function: transformers' rule of one token after another.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    step_function: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self, inputs: Sequence[Tensor], state: Tensor | None, *, steps: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Apply the rule.

        Args:
            inputs: q, k, v, g and beta, as in :meth:`LinearAttention.attend`.
            state: the state before, ``[1, Hv, Dk, Dv]``; None: zeros.
            steps: whether to take one token after another.

        Returns:
            The output ``[1, S, Hv, Dv]``, and the state after the last token.
        """
        q, k, v, g, beta = inputs
        function = self.step_function if steps else self.function
        return function(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )


class GatedDeltaNet(StandIn):
    """Linear attention of Qwen3-Next and Qwen3.5 that calls a :class:`LinearAttention`.

    That object, the argument ``linear`` of its forward pass, applies the convolution and the rule,
    to one run of tokens after another if it likes.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    activation: str
    layer_idx: int
    conv1d: nn.Conv1d
    A_log: Tensor
    dt_bias: Tensor
    norm: nn.Module
    out_proj: nn.Module
    in_proj_qkv: nn.Module  # of Qwen3.5
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    in_proj_qkvz: nn.Module  # of Qwen3-Next
    in_proj_ba: nn.Module
    functions_module: str

    def forward(self, hidden_states: Tensor, *args, linear: LinearAttention, **kwargs) -> Tensor:
        batch, num_rows, _ = hidden_states.shape
        functions = sys.modules[self.functions_module]
        mixed, z, b, a = self._projected(hidden_states)

        # Convolve.
        convolution = Convolution(
            weight=self.conv1d.weight.squeeze(1),
            bias=self.conv1d.bias,
            activation=self.activation,
            function=functions.causal_conv1d_fn,
            step_function=functions.causal_conv1d_update,
        )
        mixed = linear.convolve(self.layer_idx, mixed.transpose(1, 2), convolution)
        widths = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = mixed.transpose(1, 2).split(widths, dim=-1)
        q = q.reshape(batch, num_rows, -1, self.head_k_dim)
        k = k.reshape(batch, num_rows, -1, self.head_k_dim)
        v = v.reshape(batch, num_rows, -1, self.head_v_dim)

        # Apply the rule.
        beta = b.sigmoid()
        # In fp32: the exponential of A may not be finite in fp16.
        log_decay = -self.A_log.float().exp() * functional.softplus(a.float() + self.dt_bias)
        rule = Rule(
            functions.torch_chunk_gated_delta_rule, functions.torch_recurrent_gated_delta_rule
        )
        out = linear.attend(self.layer_idx, (q, k, v, log_decay, beta), rule)

        # Gate and project.
        out = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(out.reshape(batch, num_rows, -1))

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the convolution's input ``[B, S, C]``, the gate ``[B, S, Hv, Dv]``, b and a.

        The latter are ``[B, S, Hv]``.
        """
        batch, num_rows, _ = hidden_states.shape
        if hasattr(self, "in_proj_qkv"):  # Qwen3.5
            z = self.in_proj_z(hidden_states).reshape(batch, num_rows, -1, self.head_v_dim)
            b = self.in_proj_b(hidden_states)
            a = self.in_proj_a(hidden_states)
            return self.in_proj_qkv(hidden_states), z, b, a
        # Qwen3-Next: of each key head the columns of q, of k, and of v and z of its value heads.
        values_per_key = self.num_v_heads // self.num_k_heads
        value_width = values_per_key * self.head_v_dim
        qkvz = self.in_proj_qkvz(hidden_states).view(batch, num_rows, self.num_k_heads, -1)
        q, k, v, z = qkvz.split(
            [self.head_k_dim, self.head_k_dim, value_width, value_width], dim=-1
        )
        ba = self.in_proj_ba(hidden_states).view(batch, num_rows, self.num_k_heads, -1)
        b, a = ba.split([values_per_key, values_per_key], dim=-1)
        flat = [states.reshape(batch, num_rows, -1) for states in (q, k, v)]
        return (
            torch.cat(flat, dim=-1),
            z.reshape(batch, num_rows, -1, self.head_v_dim),
            b.reshape(batch, num_rows, self.num_v_heads),
            a.reshape(batch, num_rows, self.num_v_heads),
        )


def is_linear(layer: nn.Module) -> bool:
    """Return whether a decoder layer has linear attention."""
    return hasattr(layer, "linear_attn")


def with_linear_attention(decoder: Decoder) -> Decoder:
    """Return a hybrid's decoder, with the same weights, whose linear layers take ``linear``.

    This keyword is :class:`LinearStates`, which new tokens continue, or another
    :class:`LinearAttention`. Layers of attention are numbered among themselves, like the layers of
    the KV cache, and so are the linear ones.

    Raises:
        UnsupportedModelError: a linear layer is of another kind than :class:`GatedDeltaNet`.
    """
    next_number = {"linear_attn": 0, "self_attn": 0}
    layers = []
    for own_layer in decoder_layers(decoder):
        layer = copy.copy(own_layer)
        name = "linear_attn" if is_linear(layer) else "self_attn"
        mixer: Any = copy.copy(layer.get_submodule(name))
        if is_linear(layer):
            module = type(mixer).__module__
            _require_functions(type(mixer), sys.modules[module])
            become(mixer, GatedDeltaNet, functions_module=module)
        mixer.layer_idx = next_number[name]
        next_number[name] += 1
        # A copied module shares its dict of children with the original: it gets one of its own.
        layer._modules = {**layer._modules, name: mixer}
        layers.append(layer)
    decoder = copy.copy(decoder)
    decoder._modules = {**decoder._modules, "layers": nn.ModuleList(layers)}
    return decoder


def _require_functions(kind: type[nn.Module], module: Any) -> None:
    """Reject a linear attention whose own forward calls other functions than the stand-in's."""
    # The global names that the original's forward uses.
    called = unwrap(kind.forward).__code__.co_names
    missing = [name for name in _FUNCTIONS if name not in called or not hasattr(module, name)]
    if missing:
        raise UnsupportedModelError(
            f"{kind.__name__} of this transformers release does not call {', '.join(missing)}, "
            "which apbv replaces"
        )
