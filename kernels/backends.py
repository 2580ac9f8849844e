"""Which implementation of an operator runs. The one place that knows what a device and an installation can do."""

import math
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

ENVIRONMENT_VARIABLE = "APBV_BACKEND"
LIBRARIES = ("cudnn", "flash_attn", "flashinfer")
BACKENDS = ("auto", "torch", "triton", "reference", *LIBRARIES)


class BackendError(ValueError):
    """A back end was asked for that cannot compute this; the message says why."""


def requested(backend: str = "auto") -> str:
    """What the caller wants, or else the environment variable ``APBV_BACKEND``, or else ``"auto"``.

    Raises:
        BackendError: there is no such back end.
    """
    source = "backend"
    if backend == "auto":
        source, backend = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise BackendError(f"{source} must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return backend


def choose(backend: str, tensor: Tensor) -> str:
    """``"torch"``, ``"triton"`` or ``"reference"``, for every operator but attention itself.

    A library of attention kernels has no say here: with one, these operators run as with ``"auto"``.

    Args:
        tensor: an operand; its device and dtype decide.

    Raises:
        BackendError: what was asked for cannot run here.
    """
    wanted = requested(backend)
    if wanted in ("torch", "reference"):
        return wanted
    obstacle = why_not_triton(tensor.device, tensor.dtype)
    if wanted == "triton" and obstacle:
        raise BackendError(f"the triton back end cannot be used: {obstacle}")
    return "triton" if wanted == "triton" or (tensor.is_cuda and not obstacle) else "torch"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps Triton from running on such tensors; None: nothing."""
    if not _is_installed("triton"):
        return "triton is not installed"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its kernels accumulate in float32, which is too little for {dtype}"
    if is_interpreted():
        if dtype == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 products wrongly"
        return None
    if device.type != "cuda":
        return f"it compiles for GPUs, and the tensors are on {device.type} (TRITON_INTERPRET=1 runs it anywhere)"
    major, minor = capability(device)
    if major < 8:
        return f"it needs a GPU of compute capability 8.0, and this one has {major}.{minor}"
    return failed_launch(device)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def failed_launch(device: torch.device) -> str | None:
    """What went wrong when Triton compiled and ran one small kernel; None: nothing.

    For that it needs more than to be installed: a C compiler, and a driver that takes its code.
    """
    try:
        from .triton_merging import merge_states

        ones = torch.ones(2, 1, 1, 1, 16, device=device)
        out, lse = merge_states(torch.cat([ones[:1], 3 * ones[1:]]), ones[..., 0])
        # Two partial results that weigh the same: their mean, and the lse of both.
        off = max(float((out - 2).abs().max()), float((lse - 1 - math.log(2)).abs().max()))
    except Exception as error:  # whatever an installation that does not fit the machine may raise
        return f"its first kernel failed with {type(error).__name__}: {error}".splitlines()[0]
    return None if off < 1e-5 else f"its first kernel's result was off by {off:.2g}"


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability."""
    return torch.cuda.get_device_capability(device)
