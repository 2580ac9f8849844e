"""Attention over one segment with torch's or a library's kernels, and the choice of a backend.

Every function of type :data:`Attend` computes ``attend(q, k, v, scale, causal) -> (out, lse)`` with
q ``[B, Hq, S, D]``, k and v ``[B, Hkv, T, D]``, neighbouring numbers along D, T > 0, and causal
only where S = T; out ``[B, Hq, S, D]`` and lse ``[B, Hq, S]`` in fp32, natural logarithm.

A library's capabilities depend on its version, the GPU and its build, so none is used before it has
solved small problems correctly on the device.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from . import reference
from .backends import (
    BackendError,
    capability,
    drawn_numbers,
    mistake_of,
    num_processors,
    requested,
    why_not_triton,
)
from .segments import Segment
from .strides import cdiv

# Takes (q, k, v, scale, causal) and returns (out, lse), of the shapes in the module's docstring.
Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

# Libraries do not split the keys: a program has this many queries of a head, and all keys.
_QUERIES_PER_PROGRAM = 128
# The share of a GPU's SMs that must be occupied for a library to be faster than Triton's kernel,
# which splits the keys over all of them. Its inner loop reaches an estimated 60 % of the libraries'
# speed.
_BUSY = 0.6
_HALF = (torch.float16, torch.bfloat16)
# Queries, keys and causality of the problems on which a library is tried. No length is a multiple
# of a tile; decoding and short passing blocks have lengths such as these.
_LENGTHS = ((129, 129, True), (63, 200, False), (1, 129, False), (129, 5, False))
FEWER_QUERIES = ((129, 200, True), (63, 330, True))
# FlashAttention's modules by version, and the versions by major compute capability, the fastest
# first. Version 3 has one name as its authors build it, and another in the package fa3-fwd.
FLASH_MODULES = {
    2: ("flash_attn",),
    3: ("flash_attn_interface", "fa3_fwd_interface"),
    4: ("flash_attn.cute",),
}
_FLASH_VERSIONS = {8: (2,), 9: (3, 4, 2), 10: (4, 2)}


def choose_attention(backend: str, q: Tensor, segments: list[Segment]) -> str:
    """Choose the backend of segmented attention: ``"torch"``, ``"triton"`` or a library's name.

    Args:
        backend: a name of :data:`apbv.kernels.backends.BACKENDS`, or ``"auto"`` for the first of
            :func:`preferred` that works.
        q: ``[B, Hq, S, D]``.
        segments: (k, v) pairs, each ``[B, Hkv, T_i, D]``.

    Raises:
        BackendError: the requested backend cannot run here; the message says why.
    """
    wanted = requested(backend)
    if wanted == "torch" or (wanted == "auto" and not q.is_cuda):
        return "torch"
    groups = q.shape[1] // segments[0][0].shape[1]
    if wanted != "auto":
        obstacle = _obstacle(wanted, q, groups)
        if obstacle:
            raise BackendError(f"the {wanted} backend cannot be used: {obstacle}")
        return wanted
    num_programs = q.shape[0] * q.shape[1] * cdiv(q.shape[2], _QUERIES_PER_PROGRAM)
    for name in preferred(q.dtype, num_programs / num_processors(q.device)):
        if not _obstacle(name, q, groups):
            return name
    return "torch"


def require_usable(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> None:
    """Reject at start-up a backend that :func:`choose_attention` would reject in the first layer.

    Args:
        backend: ``"auto"`` or a name of :data:`apbv.kernels.backends.BACKENDS`.
        device, dtype: of the tensors to come.
        head_dim: D.
        groups: query heads per KV head.

    Raises:
        BackendError: the backend is unknown, or cannot run here; the message says why.
    """
    q = torch.empty(1, groups, 0, head_dim, device=device, dtype=dtype)
    choose_attention(backend, q, [(q[:, :1], q[:, :1])])


def preferred(dtype: torch.dtype, programs: float) -> tuple[str, ...]:
    """Return the backends of a GPU, the fastest first.

    Args:
        dtype: of q, k and v.
        programs: how many a library would have for each processor.
    """
    if dtype == torch.float32:
        return ("triton",)
    if dtype not in _HALF:
        return ()
    if programs < _BUSY:
        # Kernels that do not split the keys would leave too much of the GPU without work.
        return ("triton", "flash_attn", "torch")
    return ("flash_attn", "torch", "triton")


def attend_with(name: str, q: Tensor, k: Tensor) -> Attend:
    """Return the function by which torch, or the library of this name, attends over one segment."""
    if name == "torch" and _obstacle(name, q, groups=q.shape[1] // k.shape[1]):
        return attend_natively
    return ATTEND[name]


def _obstacle(name: str, q: Tensor, groups: int) -> str | None:
    if name == "triton":
        return why_not_triton(q.device, q.dtype)
    return usable(name, q.device, q.dtype, q.shape[3], groups)


@cache
def usable(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> str | None:
    """Return why a library, or torch's flash kernel, cannot attend like this, or None if it can.

    Args:
        name: a key of :data:`ATTEND`.
        device, dtype: of q, k and v.
        head_dim: D.
        groups: query heads per KV head.
    """
    if device.type != "cuda":
        return f"it runs on CUDA devices, and the tensors are on {device.type}"
    obstacle = why_not_library(name, capability(device), dtype, head_dim)
    return obstacle or probe(ATTEND[name], device, dtype, head_dim, groups)


def why_not_library(
    name: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return why a library's documentation excludes attending like this, or None if it does not."""
    major, minor = capability
    if dtype not in _HALF:
        name_of_dtype = str(dtype).removeprefix("torch.")
        return f"it computes in float16 and bfloat16, and not in {name_of_dtype}"
    if major < 8:
        return f"it needs a GPU of compute capability 8.0, and this one has {major}.{minor}"
    largest = 256
    if name == "flash_attn" and major == 10:
        largest = 128  # FlashAttention 4 takes 256 on Hopper only
    if head_dim % 8 or head_dim > largest:
        return (
            f"it takes head dimensions that are multiples of 8 up to {largest}, and this one is "
            f"{head_dim}"
        )
    return None


@cache
def is_bottom_right(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> bool:
    """Return whether a library's causal mask ends at the last key, also with fewer queries.

    Then the last query sees all keys. Other libraries let the first query see the first key only:
    the actual behaviour is tested.

    Args:
        name, device, dtype, head_dim, groups: see :func:`usable`.
    """
    if usable(name, device, dtype, head_dim, groups) is not None:
        return False
    return probe(ATTEND[name], device, dtype, head_dim, groups, FEWER_QUERIES) is None


@torch.no_grad()
def probe(
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    lengths: tuple[tuple[int, int, bool], ...] = _LENGTHS,
) -> str | None:
    """Run a function on small problems, and return its error, or None if there is none.

    The memory layout is that of a prefill: q as a projection leaves it, k and v as rows of a longer
    buffer.

    Args:
        attend: the function.
        device, dtype: of the tensors.
        head_dim: D.
        groups: query heads per KV head.
        lengths: the numbers of queries and keys of each problem, and whether it is causal,
            bottom-right.
    """
    heads = 2
    scale = head_dim**-0.5
    randn = drawn_numbers(device, dtype)
    for queries, keys, causal in lengths:
        q = randn(2, queries, heads * groups, head_dim).transpose(1, 2)
        # Rows of NaN before and after K and V.
        k_buffer, v_buffer = q.new_full((2, 2, heads, keys + 7, head_dim), math.nan)
        k = k_buffer[:, :, 3 : 3 + keys].copy_(randn(2, heads, keys, head_dim))
        v = v_buffer[:, :, 3 : 3 + keys].copy_(randn(2, heads, keys, head_dim))
        exact = reference.segmented_attention(q.double(), [(k.double(), v.double())], scale, causal)
        call = partial(attend, q, k, v, scale, causal)
        # Out averages numbers of about 1, so that rounding to `dtype` costs about its epsilon.
        mistake = mistake_of(call, exact, (4 * torch.finfo(dtype).eps, 1e-3))
        if mistake:
            kind = "causal attention" if causal else "attention"
            verdict = "fails" if "Error: " in mistake else "is wrong"
            return f"its {kind} of {queries} queries over {keys} keys {verdict}: {mistake}"
    return None


@cache
def flash_attention(major: int) -> tuple[int, Callable]:
    """Import the best FlashAttention for a generation of GPUs; return its version and function.

    Raises:
        ImportError: none is installed, or none can be imported.
    """
    problems = []
    for version in _FLASH_VERSIONS.get(major, (2,)):
        for module in FLASH_MODULES[version]:
            try:
                return version, import_module(module).flash_attn_func
            except Exception as error:  # a package built for another torch fails in many ways
                problems.append(f"{module}: {error}")
    raise ImportError("; ".join(problems))


@cache
def flash_version(major: int) -> int | None:
    """Return which FlashAttention (2, 3 or 4) runs on GPUs of a major compute capability."""
    with suppress(ImportError):
        return flash_attention(major)[0]
    return None


def better_flash(major: int) -> int | None:
    """Return the FlashAttention made for these GPUs, unless it or a later one runs.

    Args:
        major: of the GPUs' compute capability.
    """
    best, *_ = _FLASH_VERSIONS.get(major, (2,))
    running = flash_version(major) or 2  # which is part of torch
    if running < best:
        return best
    return None


def attend_natively(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend by torch alone: on a CPU with its fused kernel, on a GPU by definition.

    The latter is for what flash kernels do not compute, such as fp64.
    """
    if q.device.type != "cpu":
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril()
        out, lse = attend_masked(q, k, v, visible, scale)
        return out.to(q.dtype), lse
    q, scale = with_positive_scale(q, scale)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a scale that give the same scores, the scale above 0.

    Fused kernels multiply a mask by the scale, or a maximum of scores without it: at or below 0
    they give NaN.
    """
    if scale > 0:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1.0
    return -q, -scale


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend under a bool mask ``[S, T]`` by definition, in fp32 at least; S and T should be small.

    No fused kernel takes a mask and returns the lse.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, S, D]
    k = k.to(wide).unsqueeze(2)
    v = v.to(wide).unsqueeze(2)
    scores = (grouped @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(wide).min)[..., None])
    return (weights @ v).flatten(1, 2), lse.flatten(1, 2)


def _attend_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    version, flash_attn_func = flash_attention(capability(q.device)[0])
    # The option with which it returns the lse, too.
    lse_option = "return_lse" if version == 4 else "return_attn_probs"
    q, scale = with_positive_scale(q, scale)
    # [B, S, H, D]
    out, lse, *_ = flash_attn_func(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=scale,
        causal=causal,
        **{lse_option: True},
    )
    return out.transpose(1, 2), lse


def _attend_torch_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    q, scale = with_positive_scale(q, scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


ATTEND: dict[str, Attend] = {"flash_attn": _attend_flash_attn, "torch": _attend_torch_flash}
