"""Which implementation of an operator runs. The one place that knows what a device and an installation can do."""

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
    return None if major >= 8 else f"it needs a GPU of compute capability 8.0, and this one has {major}.{minor}"


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability."""
    return torch.cuda.get_device_capability(device)
