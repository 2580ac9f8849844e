"""Decoder with fused kernels for norms, MLPs and rotary positions, next to the original one.

A decoder layer of transformers calls torch for each step between its matrix products: each reads
and writes all rows, and is launched by itself. What is run here shares weights, submodules and
hooks with the model: of a module with fused kernels there is another one, of a subclass with
another ``forward``, and of those around it. The model itself, and other users of it, are not
affected.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from inspect import unwrap
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..kernels.backends import choose, drawn_numbers, implementation, mistake_of
from ..warn import warn_caller

_ROTARY = "apply_rotary_pos_emb"


@torch.no_grad()
def with_fused_kernels(decoder: nn.Module, backend: str, like: Tensor) -> nn.Module:
    """Return a decoder with the same weights, and fused kernels where these are right; else itself.

    Each is tried on a few rows against the module that it stands in for, and left out, with a
    warning, if wrong.

    Args:
        backend: as in :class:`apbv.PrefillConfig`; the kernels are Triton's.
        like: of the device and the dtype of the hidden states.

    Raises:
        BackendError: Triton is asked for and cannot be used.
    """
    if choose(backend, like) != "triton":
        return decoder
    names = ("rms_norm", "silu_product", "rotated")
    forwards = fused_forwards(
        decoder, *(implementation(f"elementwise.{name}", "triton") for name in names)
    )
    missing = set(KINDS) - {kind_of(module) for module in decoder.modules()}
    if any(hasattr(module, "experts") for module in decoder.modules()):
        missing -= {KINDS[1]}  # which transformers computes together
    if missing:
        warn_caller(
            f"no fused kernel fits the {', '.join(sorted(missing))} of {type(decoder).__name__}"
        )
    for module in {
        type(each): each for each in decoder.modules() if type(each) in forwards
    }.values():
        if mistake := _mistake(module, forwards[type(module)], like):
            del forwards[type(module)]
            warn_caller(f"a fused kernel is not used for {type(module).__name__}: {mistake}")
    return with_forwards(decoder, forwards)


def fused_forwards(
    decoder: nn.Module, rms_norm: Callable, silu_product: Callable, rotated: Callable
) -> dict:
    """Return by its class another ``forward`` for what is known here of a decoder's modules.

    Args:
        rms_norm, silu_product, rotated: as in :mod:`apbv.kernels.triton_elementwise`.
    """

    def norm(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if (width := cos.shape[-1]) == q.shape[-1]:
            return rotated(q, k, cos, sin)
        parts = rotated(q[..., :width], k[..., :width], cos, sin)  # the others have no position
        return tuple(
            torch.cat([part, x[..., width:]], dim=-1) for part, x in zip(parts, (q, k), strict=True)
        )

    def attention(kind: type) -> Callable:
        return with_globals(kind.forward, {_ROTARY: turned})

    makers = dict(zip(KINDS, (lambda _: norm, lambda _: mlp, attention), strict=True))
    kinds = {type(module): kind_of(module) for module in decoder.modules()}
    return {each: makers[kind](each) for each, kind in kinds.items() if kind is not None}


KINDS = ("norms", "MLPs", "rotary positions")


def kind_of(module: nn.Module) -> str | None:
    """Return for what kind of module there is a fused kernel that may fit this one; None: for
    none."""
    forward = unwrap(type(module).forward)
    if set(module._parameters) == {"weight"} and hasattr(module, "variance_epsilon"):
        # Others multiply by a gate, too.
        return KINDS[0] if forward.__code__.co_argcount == 2 else None
    if set(module._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return KINDS[1] if type(module.act_fn) is SiLUActivation else None
    return KINDS[2] if _ROTARY in forward.__code__.co_names else None


def with_globals(function: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """Return a function's own code, inside its own decorators, for which global names mean
    something else."""
    names = function.__globals__
    closure = function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = {**names, **values}
    else:
        other = with_globals(inner, values)
        closure = tuple(
            CellType(other) if cell.cell_contents is inner else cell for cell in closure
        )
    copied = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied if inner is None else update_wrapper(copied, other)


def with_forwards(module: nn.Module, forwards: Mapping[type, Callable]) -> nn.Module:
    """Return a module that shares another one's weights, but computes what is of these classes by
    other functions.

    A module with a ``forward`` of its own keeps it; an unchanged module is shared.
    Submodules that are replaced later are not noticed.
    """
    children = {
        name: child and with_forwards(child, forwards) for name, child in module._modules.items()
    }
    is_changed = type(module) in forwards and "forward" not in vars(module)
    if not is_changed and all(child is module._modules[name] for name, child in children.items()):
        return module
    other = copy.copy(module)
    kind = type(module)
    other._modules = children
    if is_changed:
        other.__class__ = type(
            kind.__name__, (kind,), {"forward": forwards[kind], "is_fused": True}
        )
    return other


def _mistake(module: nn.Module, forward: Callable, like: Tensor) -> str | None:
    """Compare a function with a module's own on a few rows; return the error, if any."""
    randn = drawn_numbers(like.device, like.dtype)
    if hasattr(module, "head_dim"):
        q_and_k = randn(2, 1, 3, 4, module.head_dim).transpose(2, 3)
        angles = randn(2, 1, 3, module.head_dim)
        operands = *q_and_k, *angles
        functions = (unwrap(each).__globals__[_ROTARY] for each in (forward, type(module).forward))
        mine, own = (partial(each, *operands) for each in functions)
    else:
        x = randn(
            1,
            3,
            module.gate_proj.in_features if hasattr(module, "gate_proj") else len(module.weight),
        )
        mine, own = (
            lambda each=each: [each(module, x)] for each in (forward, type(module).forward)
        )
    exact = [x.double() for x in own()]
    return mistake_of(
        mine, exact, [4 * torch.finfo(like.dtype).eps * float(x.abs().max()) for x in exact]
    )
