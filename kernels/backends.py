"""Selects the implementation of an operator by the capabilities of device and installation."""

import math
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

ENVIRONMENT_VARIABLE = "APBV_BACKEND"
LIBRARIES = ("flash_attn",)
BACKENDS = ("auto", "torch", "triton", *LIBRARIES)
# An interpreted kernel has no processors; this many make it split keys in some of the tests.
_INTERPRETED_PROCESSORS = 8


class BackendError(ValueError):
    """Raised if the requested backend cannot compute this; the message says why.

    Attributes:
        apbv_code: the code of the kind to which it belongs (:mod:`apbv.errors`), which is not
            imported here.
    """

    apbv_code = "backend"


def requested(backend: str = "auto") -> str:
    """Return the caller's choice; for ``"auto"``, what ``APBV_BACKEND`` names, if it is set.

    Raises:
        BackendError: the backend is unknown.
    """
    source = "backend"
    if backend == "auto":
        source = ENVIRONMENT_VARIABLE
        backend = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise BackendError(f"{source} must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return backend


def choose(backend: str, tensor: Tensor) -> str:
    """Choose ``"torch"`` or ``"triton"`` for an operator other than segmented attention.

    Libraries of attention kernels do not have these operators: naming one is the same as ``"auto"``
    here.

    Args:
        backend: ``"auto"`` or a name of :data:`BACKENDS`.
        tensor: an operand, whose device and dtype decide.

    Raises:
        BackendError: the requested backend cannot run here.
    """
    wanted = requested(backend)
    if wanted == "torch":
        return wanted
    if not tensor.is_cuda and wanted != "triton":
        return "torch"
    obstacle = why_not_triton(tensor.device, tensor.dtype)
    if wanted == "triton" and obstacle:
        raise BackendError(f"the triton backend cannot be used: {obstacle}")
    return "torch" if obstacle else "triton"


@cache
def implementation(operator: str, backend: str) -> Callable:
    """Return the function that computes an operator with a backend.

    Modules are imported here and not at the top of a file, because triton need not be installed.

    Args:
        operator: a public function of :mod:`apbv.kernels`, by its family and its name.
        backend: what :func:`choose` or :func:`apbv.kernels.library_attention.choose_attention`
            returned.
    """
    if backend in LIBRARIES:
        # A library attends over one segment; torch code splits the problem and merges the results.
        return partial(implementation(operator, "torch"), library=backend)
    family, name = operator.split(".")
    function = getattr(import_module(f".{backend}_{family}", __package__), name)
    return partial(_on_its_device, function) if backend == "triton" else function


def _on_its_device(function: Callable, operand: Tensor | Sequence[Tensor], *operands, **options):
    """Call a function while the GPU of its first operand is current, on which Triton launches.

    Another may be current: a thread begins with the first GPU, and a group of hosts may be given
    any.
    """
    first = operand if isinstance(operand, Tensor) else operand[0]
    device = first.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return function(operand, *operands, **options)
    with torch.cuda.device(device):
        return function(operand, *operands, **options)


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton cannot run on such tensors, or None if it can."""
    if not _has_triton():
        return "triton is not installed"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its kernels accumulate in float32, which is too little for {dtype}"
    if is_interpreted():
        if dtype == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 products wrongly"
        return None
    if device.type != "cuda":
        return (
            f"it compiles for GPUs, and the tensors are on {device.type} (TRITON_INTERPRET=1 runs "
            "it anywhere)"
        )
    major, minor = capability(device)
    if major < 8:
        return f"it needs a GPU of compute capability 8.0, and this one has {major}.{minor}"
    return failed_launch(device)


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs kernels in Python, on any device, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def drawn_numbers(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of a shape, the same ones on every device."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    return draw


def mistake_of(
    call: Callable[[], Sequence[Tensor]], exact: Sequence[Tensor], most: Sequence[float]
) -> str | None:
    """Return a call's error, or None if its results are right.

    Args:
        call: returns the results.
        exact: what it should return.
        most: by how much each result may be off.
    """
    try:
        results = call()
        shapes = [tuple(result.shape) for result in results]
        exact_shapes = [tuple(result.shape) for result in exact]
        if shapes != exact_shapes:
            return f"it returned {shapes} in place of {exact_shapes}"
        errors = []
        for result, exact_result in zip(results, exact, strict=True):
            errors.append(float((result.double() - exact_result).abs().max()))
    except Exception as error:  # an installation that does not fit the machine may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    # An error of NaN is not within any bound.
    if all(error <= bound for error, bound in zip(errors, most, strict=True)):
        return None
    return f"it is off by {' and '.join([f'{error:.2g}' for error in errors])}"


@cache
def failed_launch(device: torch.device) -> str | None:
    """Compile and run one small Triton kernel; return the error, or None if there is none.

    An installed Triton is not enough: it also needs a C compiler and a driver that accepts its
    code.
    """
    ones = torch.ones(2, 1, 1, 1, 16, device=device)
    # Two partial results of equal weight must give their mean, and the lse of both.
    outs = torch.cat([ones[:1], 3 * ones[1:]])
    lses = ones[..., 0]
    exact_out = 2 * ones[0]
    exact_lse = (1 + math.log(2)) * ones[0, ..., 0]

    def merge() -> Sequence[Tensor]:
        return implementation("merging.merge_states", "triton")(outs, lses)

    mistake = mistake_of(merge, (exact_out, exact_lse), (1e-5, 1e-5))
    if mistake is None:
        return None
    return f"its first kernel failed: {mistake}"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability as (major, minor)."""
    return torch.cuda.get_device_capability(device)


@cache
def num_processors(device: torch.device) -> int:
    """Return the minimum number of programs that a device runs concurrently."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETED_PROCESSORS
