"""Decoder with fused kernels for norms, MLPs and rotary positions, next to the original one.

A decoder layer of transformers calls torch for each step between its matrix products: each reads
and writes all rows, and is launched by itself. What is run here shares weights, submodules and
hooks with the model: of a module with fused kernels there is another one, of a subclass with
another ``forward``, and of those around it. The model itself, and other users of it, are not
affected.
"""

import copy
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial, update_wrapper
from inspect import unwrap
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..kernels.backends import choose, drawn_numbers, implementation, mistake_of
from ..reporting import warn_caller

_ROTARY = "apply_rotary_pos_emb"

Model = TypeVar("Model", bound=nn.Module)


class FusedKind(StrEnum):
    """What a fused kernel computes, as warnings name it."""

    NORM = "norms"
    MLP = "MLPs"
    ROTARY = "rotary positions"


@torch.no_grad()
def with_fused_kernels(decoder: Model, backend: str, like: Tensor) -> Model:
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
    forwards = fused_forwards(
        decoder,
        rms_norm=implementation("elementwise.rms_norm", "triton"),
        silu_product=implementation("elementwise.silu_product", "triton"),
        rotated=implementation("elementwise.rotated", "triton"),
    )

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
    for module_class, forward in list(forwards.items()):
        mistake = _mistake(module_of_class[module_class], forward, like)
        if mistake:
            del forwards[module_class]
            warn_caller(f"a fused kernel is not used for {module_class.__name__}: {mistake}")
    return with_forwards(decoder, forwards)


def fused_forwards(
    decoder: nn.Module, rms_norm: Callable, silu_product: Callable, rotated: Callable
) -> dict[type[nn.Module], Callable]:
    """Return by its class another ``forward`` for what is known here of a decoder's modules.

    Args:
        rms_norm, silu_product, rotated: as in :mod:`apbv.kernels.triton_elementwise`.
    """

    def norm(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        width = cos.shape[-1]
        if width == q.shape[-1]:
            return rotated(q, k, cos, sin)
        # The other dimensions have no position.
        q_turned, k_turned = rotated(q[..., :width], k[..., :width], cos, sin)
        return (
            torch.cat([q_turned, q[..., width:]], dim=-1),
            torch.cat([k_turned, k[..., width:]], dim=-1),
        )

    forwards: dict[type[nn.Module], Callable] = {}
    for module in decoder.modules():
        module_class = type(module)
        match kind_of(module):
            case FusedKind.NORM:
                forwards[module_class] = norm
            case FusedKind.MLP:
                forwards[module_class] = mlp
            case FusedKind.ROTARY if module_class not in forwards:
                forwards[module_class] = with_globals(module_class.forward, {_ROTARY: turned})
    return forwards


def kind_of(module: nn.Module) -> FusedKind | None:
    """Return the kind of fused kernel that may fit a module; None: none does."""
    forward = unwrap(type(module).forward)
    if set(module._parameters) == {"weight"} and hasattr(module, "variance_epsilon"):
        # Others multiply by a gate, too.
        takes_rows_alone = forward.__code__.co_argcount == 2
        return FusedKind.NORM if takes_rows_alone else None
    if set(module._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        has_silu = type(module.act_fn) is SiLUActivation
        return FusedKind.MLP if has_silu else None
    return FusedKind.ROTARY if _ROTARY in forward.__code__.co_names else None


def with_globals(function: Callable, values: Mapping[str, Any]) -> Callable:
    """Return a function in which some global names mean something else.

    It has the function's own code and decorators.
    """
    assert isinstance(function, FunctionType)  # of Python
    names = function.__globals__
    closure = function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = {**names, **values}
    else:
        other = with_globals(inner, values)
        assert closure is not None  # a decorator's function refers to the one that it wraps
        closure = tuple(
            CellType(other) if cell.cell_contents is inner else cell for cell in closure
        )
    copied = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied if inner is None else update_wrapper(copied, other)


def with_forwards(module: Model, forwards: Mapping[type, Callable]) -> Model:
    """Return a module that computes modules of these classes by other functions.

    It shares the weights of the given module.

    A module with a ``forward`` of its own keeps it; an unchanged module is shared.
    Submodules that are replaced later are not noticed.
    """
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else with_forwards(child, forwards)
    has_own_forward = "forward" in vars(module)
    is_changed = type(module) in forwards and not has_own_forward
    has_changed_child = any(child is not module._modules[name] for name, child in children.items())
    if not is_changed and not has_changed_child:
        return module
    other = copy.copy(module)
    other._modules = children
    if is_changed:
        module_class = type(module)
        attributes = {"forward": forwards[module_class], "is_fused": True}
        other.__class__ = type(module_class.__name__, (module_class,), attributes)
    return other


def _mistake(module: Any, forward: Callable, like: Tensor) -> str | None:
    """Compare a function with a module's own on a few rows; return the error, if any."""
    randn = drawn_numbers(like.device, like.dtype)
    own_forward = type(module).forward
    fused: Callable
    if hasattr(module, "head_dim"):
        # Of an attention only the rotary positions are fused.
        q, k = randn(2, 1, 3, 4, module.head_dim).transpose(2, 3)
        cos, sin = randn(2, 1, 3, module.head_dim)
        fused_rotary = unwrap(forward).__globals__[_ROTARY]
        own_rotary = unwrap(own_forward).__globals__[_ROTARY]
        fused = partial(fused_rotary, q, k, cos, sin)
        expected = own_rotary(q, k, cos, sin)
    else:
        width = len(module.weight) if hasattr(module, "weight") else module.gate_proj.in_features
        x = randn(1, 3, width)

        def run_fused() -> list[Tensor]:
            return [forward(module, x)]

        fused = run_fused
        expected = [own_forward(module, x)]
    exact = [each.double() for each in expected]
    eps = torch.finfo(like.dtype).eps
    tolerances = [4 * eps * float(each.abs().max()) for each in exact]
    return mistake_of(fused, exact, tolerances)
