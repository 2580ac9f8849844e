"""Decoder with fused kernels for norms, MLPs and rotary positions, next to the original one.

A decoder layer of transformers calls torch for each step between its matrix products: each reads
and writes all rows, and is launched by itself. What is run here shares weights, submodules and
hooks with the model: of a module with fused kernels there is another one, whose class has another
``forward``, and of those around it. The model itself, and other users of it, are not affected.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from inspect import unwrap
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from ..compat.versions import CACHE_ARGUMENT
from ..kernels.backends import choose, drawn_numbers, implementation, mistake_of
from ..reporting import warn_caller
from .attention import apbv_attention, attend, is_in_force

_ROTARY = "apply_rotary_pos_emb"  # transformers' function, in the file of every model
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}

Model = TypeVar("Model", bound=nn.Module)
Decoder = TypeVar("Decoder", bound=PreTrainedModel)


class FusedKind(StrEnum):
    """What a fused kernel computes, as warnings name it."""

    NORM = "norms"
    MLP = "MLPs"
    ROTARY = "rotary positions"


@dataclass(frozen=True)
class ElementwiseKernels:
    """The kernels that fused modules call; see :mod:`apbv.kernels.triton_elementwise`.

    Attributes:
        rms_norm: rows ``[..., d]``, a weight ``[d]`` and epsilon to the normed rows.
        silu_product: gate and up ``[..., w]`` to silu(gate) * up.
        rotated: q and k ``[B, H, S, D]`` and cos and sin ``[B, S, D]`` to q and k at their rotary
            positions.
    """

    rms_norm: Callable[..., Tensor]
    silu_product: Callable[..., Tensor]
    rotated: Callable[..., tuple[Tensor, Tensor]]


class StandIn(nn.Module):
    """Computes what a module of a model does in another way, with its weights and hooks.

    A class to inherit from before the module's own class; see :func:`with_stand_ins`.
    """

    is_fused = True
    kind: ClassVar[FusedKind | None] = None  # of its fused kernel, if it has one


class FusedNorm(StandIn):
    """RMS norm in one kernel."""

    kind = FusedKind.NORM
    kernels: ElementwiseKernels
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class FusedMLP(StandIn):
    """Gated MLP with SiLU, in one kernel between its matrix products."""

    kind = FusedKind.MLP
    kernels: ElementwiseKernels
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.kernels.silu_product(self.gate_proj(x), self.up_proj(x)))


class FusedAttention(StandIn):
    """Attention with rotary positions in one kernel, where apbv's attention is in force.

    It has what transformers' decoders of today have: norms of the heads of q and k (Qwen3), a gate
    beside q (Qwen3.5), layers without positions (SmolLM3).
    """

    kind = FusedKind.ROTARY
    kernels: ElementwiseKernels
    config: PreTrainedConfig
    layer_idx: int
    q_proj: Any
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: Any
    q_norm: nn.Module  # of some
    k_norm: nn.Module
    head_dim: int
    scaling: float

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        if not is_in_force(self.config):
            return super().forward(hidden_states, *args, **kwargs)
        cache = kwargs.pop(CACHE_ARGUMENT, None)
        position_embeddings = kwargs.pop("position_embeddings")
        attention_mask = kwargs.pop("attention_mask", None)

        # Project.
        rows_shape = hidden_states.shape[:-1]
        heads_shape = (*rows_shape, -1, self.head_dim)
        q = self.q_proj(hidden_states)
        gate = None
        if self.q_proj.out_features == 2 * self.o_proj.in_features:
            q, gate = q.view(*rows_shape, -1, 2 * self.head_dim).chunk(2, dim=-1)
        q = q.view(heads_shape)
        k = self.k_proj(hidden_states).view(heads_shape)
        v = self.v_proj(hidden_states).view(heads_shape).transpose(1, 2)
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)

        # Rotate, attend, project.
        if getattr(self, "use_rope", True):
            q, k = self._rotated(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        out = out.reshape(*rows_shape, -1)
        if gate is not None:
            out = out * torch.sigmoid(gate.reshape(*rows_shape, -1))
        return self.o_proj(out), None

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        if width == q.shape[-1]:
            return self.kernels.rotated(q, k, cos, sin)
        # The other dimensions have no position.
        q_rotated, k_rotated = self.kernels.rotated(q[..., :width], k[..., :width], cos, sin)
        return (
            torch.cat([q_rotated, q[..., width:]], dim=-1),
            torch.cat([k_rotated, k[..., width:]], dim=-1),
        )


_STAND_INS = {stand_in.kind: stand_in for stand_in in (FusedNorm, FusedMLP, FusedAttention)}


@torch.no_grad()
def with_fused_kernels(decoder: Decoder, backend: str, like: Tensor) -> Decoder:
    """Return a decoder with the same weights, and fused kernels where these are right; else itself.

    Each is tried on a few rows against the module that it stands in for, and left out, with a
    warning, if wrong.

    Args:
        backend: as in :class:`apbv.PrefillConfig`; the kernels are Triton's.
        like: of the device and the dtype of the hidden states.

    Raises:
        BackendUnavailableError: Triton is asked for and cannot be used.
    """
    if choose(backend, like) != "triton":
        return decoder
    kernels = ElementwiseKernels(
        rms_norm=implementation("elementwise.rms_norm", "triton"),
        silu_product=implementation("elementwise.silu_product", "triton"),
        rotated=implementation("elementwise.rotated", "triton"),
    )
    stand_ins = fused_stand_ins(decoder)

    # Kinds without a kernel that fits.
    missing = set(FusedKind) - {kind_of(module) for module in decoder.modules()}
    if any(hasattr(module, "experts") for module in decoder.modules()):
        # transformers computes these together.
        missing.discard(FusedKind.MLP)
    if missing:
        warn_caller(
            f"no fused kernel fits the {', '.join(sorted(missing))} of {type(decoder).__name__}"
        )

    # One module of each class is tried.
    module_of_class = {type(module): module for module in decoder.modules()}
    for module_class, stand_in in list(stand_ins.items()):
        module = module_of_class[module_class]
        if stand_in is FusedAttention:
            with apbv_attention(decoder):
                mistake = _mistake_of_attention(module, kernels, like)
        else:
            mistake = _mistake_of_rows(module, stand_in, kernels, like)
        if mistake:
            del stand_ins[module_class]
            warn_caller(f"a fused kernel is not used for {module_class.__name__}: {mistake}")
    return with_stand_ins(decoder, stand_ins, kernels=kernels)


def fused_stand_ins(decoder: nn.Module) -> dict[type[nn.Module], type[StandIn]]:
    """Return the stand-ins that may fit the modules of a decoder, by the modules' classes."""
    stand_ins: dict[type[nn.Module], type[StandIn]] = {}
    for module in decoder.modules():
        kind = kind_of(module)
        if kind is not None:
            stand_ins[type(module)] = _STAND_INS[kind]
    return stand_ins


def kind_of(module: nn.Module) -> FusedKind | None:
    """Return the kind of fused kernel that may fit a module; None: none does."""
    if isinstance(module, StandIn):
        return module.kind
    forward = unwrap(type(module).forward)
    if set(module._parameters) == {"weight"} and hasattr(module, "variance_epsilon"):
        # Others multiply by a gate, too.
        takes_rows_alone = forward.__code__.co_argcount == 2
        return FusedKind.NORM if takes_rows_alone else None
    if set(module._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        has_silu = type(module.act_fn) is SiLUActivation
        return FusedKind.MLP if has_silu else None
    is_attention = set(module._modules) in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS)
    if is_attention and _ROTARY in forward.__code__.co_names:
        return FusedKind.ROTARY
    return None


def with_stand_ins(
    module: Model, stand_ins: Mapping[type[nn.Module], type[StandIn]], **attributes: Any
) -> Model:
    """Return a module in which stand-ins compute the modules of these classes.

    It shares the weights of the given module.

    A module with a ``forward`` of its own keeps it; an unchanged module is shared.
    Submodules that are replaced later are not noticed.

    Args:
        attributes: what the stand-ins have besides those of the modules.
    """
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None
        if child is not None:
            children[name] = with_stand_ins(child, stand_ins, **attributes)
    has_own_forward = "forward" in vars(module)
    stand_in = None if has_own_forward else stand_ins.get(type(module))
    has_changed_child = any(child is not module._modules[name] for name, child in children.items())
    if stand_in is None and not has_changed_child:
        return module
    other = copy.copy(module)
    other._modules = children
    if stand_in is not None:
        become(other, stand_in, **attributes)
    return other


def become(module: nn.Module, stand_in: type[StandIn], **attributes: Any) -> None:
    """Make a copy of a module a stand-in, which is also of the module's class."""
    module_class = type(module)
    module.__class__ = type(module_class.__name__, (stand_in, module_class), {})
    for name, value in attributes.items():
        setattr(module, name, value)


def _mistake_of_rows(
    module: Any, stand_in: type[StandIn], kernels: ElementwiseKernels, like: Tensor
) -> str | None:
    """Compare a norm or an MLP with its stand-in on a few rows; return the error, if any."""
    width = len(module.weight) if hasattr(module, "weight") else module.gate_proj.in_features
    x = drawn_numbers(like.device, like.dtype)(1, 3, width)
    other = copy.copy(module)
    become(other, stand_in, kernels=kernels)
    expected = type(module).forward(module, x)
    return _mistake(lambda: [stand_in.forward(other, x)], [expected], like)


def _mistake_of_attention(module: Any, kernels: ElementwiseKernels, like: Tensor) -> str | None:
    """Compare an attention with its stand-in on a few rows; return the error, if any.

    First the kernel, and then, with transformers' own rotary positions, the rest of its steps.
    """
    randn = drawn_numbers(like.device, like.dtype)
    rotate = getattr(sys.modules[type(module).__module__], _ROTARY)
    q, k = randn(2, 1, 3, 4, module.head_dim).transpose(2, 3)
    cos, sin = randn(2, 1, 3, module.head_dim)
    mistake = _mistake(lambda: kernels.rotated(q, k, cos, sin), rotate(q, k, cos, sin), like)
    if mistake:
        return mistake
    x = randn(1, 3, module.q_proj.in_features)
    other = copy.copy(module)
    become(other, FusedAttention, kernels=replace(kernels, rotated=rotate))
    inputs = {"position_embeddings": (cos, sin), "attention_mask": None}
    expected, _ = type(module).forward(module, x, **inputs)
    return _mistake(lambda: [FusedAttention.forward(other, x, **inputs)[0]], [expected], like)


def _mistake(fused: Callable, expected: Any, like: Tensor) -> str | None:
    """Compare what a function returns with tensors; return the error, if any."""
    exact = [tensor.double() for tensor in expected]
    eps = torch.finfo(like.dtype).eps
    tolerances = [4 * eps * float(tensor.abs().max()) for tensor in exact]
    return mistake_of(fused, exact, tolerances)
