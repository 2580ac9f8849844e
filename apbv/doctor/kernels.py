"""Checks of attention backends, and of every operator against fp64."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import kernels
from ..hosts import HostGroup
from ..kernels import (
    ListedBlocks,
    PackedSequences,
    SequenceBuffers,
    library_attention,
    reference,
    torch_attention,
)
from ..kernels.backends import LIBRARIES, capability, drawn_numbers, why_not_triton
from .examination import Check, CheckFailed, CheckSkipped, Found

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("torch", "triton", *LIBRARIES)
_HALF_DTYPES = (torch.bfloat16, torch.float16)
# For each version of FlashAttention, how to get it, and why.
_TO_INSTALL = {
    3: "pip install fa3-fwd: FlashAttention 3 takes half the time of torch's own on this GPU "
    "(H200, bf16)",
    4: "pip install flash-attn-4, which is made for this GPU",
}
# How an obstacle begins that is Triton's or the driver's fault, not a missing requirement.
_FAILED_LAUNCH = "its first kernel"
# What an obstacle contains where a library raised an error, as one does that was not built for a
# dtype; one that returned wrong numbers is off by something instead.
_RAISED = " fails: "
_HEADS = 14
_KV_HEADS = 2
_HEAD_DIM = 128
_TOWER_HEAD_DIM = 80
_GROUPS = _HEADS // _KV_HEADS
_SCALE = _HEAD_DIM**-0.5
# How far a result may be off: the largest error over the largest number of the result, in epsilons
# of the result's dtype.
_ALLOWED_IN_HALF = 4.0
_ALLOWED_IN_FP32 = 256.0  # sums lose a few digits
# In fp32 results of operands in half precision: weights and each segment's result are rounded to
# half precision on the way.
_ALLOWED_OF_HALF = 2048.0


def backend_checks(hosts: HostGroup) -> Iterable[Check]:
    """List the checks of backends, and of the automatic choice."""
    checks = [Check(name, partial(check_backend, name)) for name in BACKENDS]
    checks.append(Check("chosen", automatic_choice))
    return checks


def operator_checks(hosts: HostGroup) -> Iterable[Check]:
    """List a check of every operator."""
    return [Check(operator, partial(check_operator, operator)) for operator in CASES]


def obstacle(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str | None, bool]:
    """Return why a backend cannot compute attention, or None, and whether that is a fault.

    It is a fault if the backend has everything that it needs, and its results are wrong or it
    cannot be loaded.
    """
    if name == "torch":
        return None, False
    if name == "triton":
        reason = why_not_triton(device, dtype)
        is_fault = reason is not None and reason.startswith(_FAILED_LAUNCH)
        return reason, is_fault
    if name == "flash_attn" and not _has_flash_attention():
        return "it is not installed", False
    if device.type != "cuda":
        return library_attention.usable(name, device, dtype, _HEAD_DIM, _GROUPS), False
    reason = library_attention.why_not_library(name, capability(device), dtype, _HEAD_DIM)
    if reason is not None:
        return reason, False
    reason = library_attention.usable(name, device, dtype, _HEAD_DIM, _GROUPS)
    return reason, reason is not None


def _has_flash_attention() -> bool:
    """Return whether a package of any version of FlashAttention is installed."""
    for modules in library_attention.FLASH_MODULES.values():
        for module in modules:
            package, _, _ = module.partition(".")
            if find_spec(package):
                return True
    return False


def check_backend(name: str, hosts: HostGroup) -> Found:
    """Try a backend with every dtype.

    Raises:
        CheckFailed: it has a fault. An error in a dtype for which it was not built is none.
        CheckSkipped: it cannot be used here.
    """
    # Sort the dtypes by what the backend does with them.
    working = []
    faults = {}
    limits = []  # why it takes no other dtypes, without a fault
    for dtype in DTYPES:
        reason, is_fault = obstacle(name, hosts.device, dtype)
        if reason is None:
            working.append(dtype_name(dtype))
        elif is_fault:
            faults[dtype_name(dtype)] = reason
        else:
            limits.append(reason)

    # Decide. A backend that works with some dtypes may raise an error with those for which it was
    # not built.
    failures = []
    for dtype_at_fault, reason in faults.items():
        is_not_built = bool(working) and _RAISED in reason
        if not is_not_built:
            failures.append(f"{dtype_at_fault}: {reason}")
    if failures:
        raise CheckFailed("; ".join(failures))
    if not working:
        raise CheckSkipped(limits[-1])

    # Describe.
    parts = [", ".join(working)]
    for dtype_at_fault, reason in faults.items():
        parts.append(f"not built for {dtype_at_fault} ({reason})")
    if limits:
        parts.append(f"else {limits[0]}")
    return "; ".join(parts), {"dtypes": working}


def automatic_choice(hosts: HostGroup) -> Found:
    """Find out which backends ``auto`` selects."""
    dtype = torch.float32 if hosts.device.type == "cpu" else torch.bfloat16
    choices = {}
    num_queries_of = {"a question": 64, "a block of 4k": 4096, "a block of 16k": 16384}
    for kind, num_queries in num_queries_of.items():
        q = torch.empty(1, _GROUPS, num_queries, _HEAD_DIM, device=hosts.device, dtype=dtype)
        kv = q[:, :1]
        choices[kind] = library_attention.choose_attention("auto", q, [(kv, kv)])
    # Torch attends to all windows of a vision tower in one call if it can.
    varlen_obstacle = torch_attention.varlen_obstacle(hosts.device, dtype, _TOWER_HEAD_DIM)
    calls = "in one call" if varlen_obstacle is None else "one after the other"
    choices["a vision tower's windows"] = f"torch, {calls}"

    text = ", ".join(f"{kind}: {choice}" for kind, choice in choices.items())
    text += f" ({dtype_name(dtype)})"
    if hosts.device.type == "cuda":
        major, _ = capability(hosts.device)
        better_version = library_attention.better_flash(major)
        if better_version is not None:
            text += f"; {_TO_INSTALL[better_version]}"
    return text, {"chosen": choices}


def check_operator(operator: str, hosts: HostGroup) -> Found:
    """Compare an operator with fp64, with every backend that works here and every dtype.

    Raises:
        CheckFailed: a result is off by more than its dtype allows, or a backend raises something.
    """
    errors: dict[str, dict[str, float]] = {}  # by backend and dtype
    failures = []
    backends = _BACKENDS_OF.get(operator, ("torch", "triton"))
    for backend, dtype in product(backends, DTYPES):
        reason, _ = obstacle(backend, hosts.device, dtype)
        if reason is not None:
            continue
        name = dtype_name(dtype)
        try:
            cases = CASES[operator](Draw(hosts.device, dtype))
            error_of_worst = max(error_of(operator, case, backend) for case in cases)
        except Exception as error:  # a backend that does not fit the machine may raise anything
            failures.append(f"{backend} in {name}: {type(error).__name__}: {error}")
            continue
        errors.setdefault(backend, {})[name] = error_of_worst
        if not error_of_worst <= 1:
            failures.append(
                f"{backend} in {name} is off by {error_of_worst:.3g} times what is allowed"
            )
    if failures:
        raise CheckFailed("; ".join(failures))
    parts = []
    for backend, errors_by_dtype in errors.items():
        parts.append(f"{backend} {max(errors_by_dtype.values()):.2f}")
    return ", ".join(parts), {"errors": errors}


# The backends of operators that have others than torch and Triton.
_BACKENDS_OF = {"segmented_attention": BACKENDS, "varlen_attention": ("torch",)}


def error_of(operator: str, case: "Case", backend: str) -> float:
    """Return the largest error of an operator's results, relative to what is allowed.

    Args:
        operator: the name of a function of :mod:`apbv.kernels`, and of its reference.
        case: its arguments but the backend.
        backend: the backend to try.
    """
    # Compute the results, and in fp64 the exact ones.
    operands, settings = case
    options = dict(settings)
    if operator != "varlen_attention":  # which has one backend only
        options["backend"] = backend
    results = tree_leaves(getattr(kernels, operator)(*operands, **options))
    wide_operands, wide_settings = tree_map(_widened, case)
    exact_results = tree_leaves(getattr(reference, operator)(*wide_operands, **wide_settings))

    # How many epsilons a result may be off, by its dtype.
    tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
    is_half = any(tensor.dtype in _HALF_DTYPES for tensor in tensors)
    allowed_epsilons = dict.fromkeys(_HALF_DTYPES, _ALLOWED_IN_HALF)
    allowed_epsilons[torch.float32] = _ALLOWED_OF_HALF if is_half else _ALLOWED_IN_FP32

    # Compare.
    worst = 0.0
    for result, exact in zip(results, exact_results, strict=True):
        if not result.is_floating_point():
            if not torch.equal(result, exact):
                worst = float("inf")
            continue
        differences = (result.double() - exact.double()).abs()
        error = differences.nan_to_num(nan=float("inf")).max().item()
        largest = max(1e-30, exact.abs().max().item())
        epsilon = torch.finfo(result.dtype).eps
        allowed = allowed_epsilons[result.dtype] * epsilon * largest
        worst = max(worst, error / allowed)
    return worst


def _widened(argument: Any) -> Any:
    """Return an argument in fp64 if it is a floating-point tensor, or has such keys and values."""
    if isinstance(argument, SequenceBuffers):
        keys = [buffer.double() for buffer in argument.keys]
        values = [buffer.double() for buffer in argument.values]
        return SequenceBuffers(keys, values, argument.lengths)
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.double()
    return argument


class Draw:
    """Draws the same random operands on every host and device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self._draw = drawn_numbers(device, torch.float32)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers of a shape; ``dtype`` replaces the operands' own."""
        return self._draw(*shape).to(dtype or self.dtype)

    def queries(self, rows: int) -> Tensor:
        """Draw queries ``[1, Hq, rows, D]`` with the strides that a projection gives them."""
        return self(1, rows, _HEADS, _HEAD_DIM).transpose(1, 2)

    def kv(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw K and V ``[1, Hkv, rows, D]``, rows of longer buffers whose rest is NaN."""
        shape = (2, 1, _KV_HEADS, rows + 7, _HEAD_DIM)
        buffers = torch.full(shape, torch.nan, device=self.device, dtype=self.dtype)
        states = buffers[:, :, :, 3 : 3 + rows]
        states.copy_(self(2, 1, _KV_HEADS, rows, _HEAD_DIM))
        k, v = states
        return k, v


Case = tuple[tuple, dict[str, Any]]  # an operator's positional and keyword arguments


def _case(*operands: Any, **settings: Any) -> Case:
    return operands, settings


def _segmented(draw: Draw) -> list[Case]:
    """Make blocks with and without an anchor, a question and a single token."""
    return [
        _case(
            draw.queries(163), [draw.kv(37), draw.kv(40), draw.kv(40), draw.kv(163)], _SCALE, True
        ),
        _case(draw.queries(200), [draw.kv(40), draw.kv(200)], _SCALE, True, num_anchor_queries=37),
        _case(draw.queries(21), [draw.kv(64), draw.kv(300)], _SCALE, False),
        _case(draw.queries(1), [draw.kv(700)], _SCALE, False),
    ]


def _verify(draw: Draw) -> list[Case]:
    """Make a token over a part of a buffer, and a tree of tokens."""
    sees = torch.eye(9, dtype=torch.bool)
    for node in range(1, 9):
        parent = (node - 1) // 2
        sees[node] |= sees[parent]
    num_keys = torch.tensor([555], dtype=torch.int32, device=draw.device)
    return [
        _case(draw.queries(1), *draw.kv(611), _SCALE, num_keys=num_keys),
        _case(draw.queries(9), *draw.kv(555), _SCALE, visible=sees.to(draw.device)),
    ]


def _batch(draw: Draw) -> list[Case]:
    """Make the newest tokens of sequences of several lengths, of which one has no other token."""
    lengths = [700, 0, 129, 256]
    keys = []
    values = []
    for length in lengths:
        key_buffer, value_buffer = draw(2, 1, _KV_HEADS, length + 9, _HEAD_DIM)
        keys.append(key_buffer)
        values.append(value_buffer)
    new_keys, new_values = draw(2, 1, _KV_HEADS, len(lengths), _HEAD_DIM)
    buffers = SequenceBuffers(keys, values, lengths)
    return [_case(draw.queries(len(lengths)), new_keys, new_values, buffers, _SCALE)]


def _varlen(draw: Draw) -> list[Case]:
    """Make the windows of a vision tower."""
    boundaries = torch.tensor([0, 64, 64, 63, 1, 129]).cumsum(0)
    sequences = PackedSequences(boundaries.int().to(draw.device), 129)
    q, k, v = draw(3, int(boundaries[-1]), 4, _TOWER_HEAD_DIM)
    return [_case(q, k, v, sequences, _TOWER_HEAD_DIM**-0.5)]


def _block_sparse(draw: Draw) -> list[Case]:
    """Make tokens whose heads list different blocks, and of which the last block is shorter."""
    is_chosen = draw(1, _HEADS, 3, 6, dtype=torch.float32) > 0
    blocks = ListedBlocks.of(is_chosen, 128, 64)
    out = draw.queries(333).fill_(torch.nan)
    return [_case(draw.queries(333), *draw.kv(333), blocks, _SCALE, out=out)]


def _antidiagonal_scores(draw: Draw) -> list[Case]:
    q = draw.queries(333)
    k, _ = draw.kv(333)
    return [_case(q, k, _SCALE, 16, 128)]


def _block_means(draw: Draw) -> list[Case]:
    k, _ = draw.kv(333)
    return [_case(k, 64)]


def _merge(draw: Draw) -> list[Case]:
    """Make partial results of several hosts, of which one had no keys."""
    outs = draw(5, 1, _HEADS, 33, _HEAD_DIM)
    lses = draw(5, 1, _HEADS, 33, dtype=torch.float32)
    lses[2] = -torch.inf
    return [_case(outs, lses)]


def _importance(draw: Draw) -> list[Case]:
    """Make a question and a block, for two rankings."""
    q_for_peak = draw.queries(19)
    k_for_peak, _ = draw.kv(333)
    q_for_softmax = draw.queries(19)
    k_for_softmax, _ = draw.kv(333)
    return [
        _case(q_for_peak, k_for_peak, _SCALE, "peak"),
        _case(q_for_softmax, k_for_softmax, _SCALE, "softmax", pool=5),
    ]


def _select_topk(draw: Draw) -> list[Case]:
    """Make scores of which many are equal, so that it matters which row comes first."""
    scores = draw(1, _KV_HEADS, 333, dtype=torch.float32).mul(2).round()
    return [_case(scores, *draw.kv(333), 50)]


# Most lengths are not multiples of a tile's, so that the last tile is not full.
CASES: dict[str, Callable[[Draw], list[Case]]] = {
    "segmented_attention": _segmented,
    "verify_attention": _verify,
    "batch_decode_attention": _batch,
    "varlen_attention": _varlen,
    "block_sparse_attention": _block_sparse,
    "antidiagonal_scores": _antidiagonal_scores,
    "block_means": _block_means,
    "merge_states": _merge,
    "kv_importance": _importance,
    "select_topk": _select_topk,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")
