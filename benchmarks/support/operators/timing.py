"""Checks the ways to compute a case against fp64, and times them on a device."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from apbv.kernels import BackendError, merge_states
from apbv.kernels.backends import LIBRARIES, is_interpreted
from apbv.kernels.library_attention import attend_with

from ..processes import synchronize
from .case import Case, Outputs

_ROUNDS = 6  # of the ceilings


@dataclass
class Contender:
    """One way to compute a case.

    Attributes:
        backend: the backend's name.
        run: the function that is timed.
        variant: "operator", or "attention kernels alone".
        prepare: makes the argument of ``run`` from the case's operands; not timed.
        finish: makes the operator's outputs from the result of ``run``; not timed.
        errors: relative error of each output; empty if it could not be computed.
        wrong: why its result is rejected; None if it is right.
        ms: milliseconds per call, one entry for every round.
    """

    backend: str
    run: Callable[[tuple], Outputs]
    variant: str = "operator"
    prepare: Callable[[tuple], tuple] = lambda operands: operands
    finish: Callable[[Outputs], Outputs] = lambda outputs: outputs
    errors: tuple[float, ...] = ()
    wrong: str | None = None
    ms: list[float] = field(default_factory=list)


class Timer:
    """Measures milliseconds per call on a device.

    Args:
        device, dtype: where and in what precision the ceilings are measured.
        size, side: bytes of the copy, and rows of the square matrix product, that show the ceilings.

    Attributes:
        bandwidth, flops: the device's ceilings, in bytes and operations per second.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int, side: int):
        self.device = device
        self._source, self._target = torch.zeros(2, size, dtype=torch.uint8, device=device).random_()
        # A ceiling is the most that the device can do: the best of several rounds, the first of which warms up.
        copies = [self(lambda _: self._target.copy_(self._source), [()]) for _ in range(_ROUNDS)]
        self._copy_seconds = min(copies) / 1e3
        self.bandwidth = 2 * size / self._copy_seconds
        a, b = torch.randn(2, side, side, device=device, dtype=dtype)
        self.flops = 2 * side**3 / min(self(lambda _: torch.mm(a, b), [()]) for _ in range(_ROUNDS)) * 1e3

    def __call__(self, run: Callable[[tuple], object], sets: list[tuple], launching: float = 0.0) -> float:
        """Return the mean milliseconds of one call on each set of operands.

        Args:
            run: the function.
            sets: its operands, in sets.
            launching: seconds that this process needs to put all these calls into a GPU's queue.
        """
        if self.device.type != "cuda":
            began = time.perf_counter()
            for operands in sets:
                run(operands)
            return (time.perf_counter() - began) * 1e3 / len(sets)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(min(100, int(launching / self._copy_seconds) + 1) if launching else 0):
            self._target.copy_(self._source)
        start.record()
        for operands in sets:
            run(operands)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(sets)

    def num_sets(self, size: int) -> int:
        """Return the number of sets of this many bytes that exceed a GPU's cache several times."""
        if self.device.type != "cuda":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(32, max(2, -(-4 * cache // size)))


def contenders(case: Case, operands: tuple, backends: list[str], note: Callable[[str], None]) -> list[Contender]:
    """Return the backends that can compute a case here, and note why the others cannot."""
    found = []
    for name in backends:
        if name in LIBRARIES and not case.is_segmented:
            continue
        if name == "triton" and is_interpreted():
            note("triton is interpreted (TRITON_INTERPRET=1), and not timed")
            continue
        try:
            case.chosen(operands, name)
        except BackendError as error:
            note(str(error))
            continue
        found.append(Contender(name, partial(case.run, backend=name)))
        if case.is_segmented and name != "triton":
            found += kernels_alone(case, operands, name)
    return found


def kernels_alone(case: Case, operands: tuple, name: str) -> list[Contender]:
    """Time only the attention function's calls: over the joined segments before the last, and over the last."""
    q, segments = operands
    if len(segments) == 1 or q.shape[2] != segments[-1][0].shape[2] or case.rows_alone:
        return []
    attend, scale = attend_with(name, q, segments[0][0]), q.shape[3] ** -0.5

    def prepare(operands: tuple) -> tuple:
        *before, last = operands[1]
        return operands[0], [torch.cat(states, dim=2) for states in zip(*before, strict=True)], last

    def run(prepared: tuple) -> Outputs:
        q, before, last = prepared
        return *attend(q, *before, scale, False), *attend(q, *last, scale, True)

    def finish(outputs: Outputs) -> Outputs:
        out, lse = merge_states(*(torch.stack(outputs[i::2]) for i in (0, 1)), backend="torch")
        return out.to(q.dtype), lse

    return [Contender(name, run, "attention kernels alone", prepare, finish)]


@torch.no_grad()
def check(case: Case, operands: tuple, dtype: torch.dtype, entries: list[Contender]) -> None:
    """Compare every contender's outputs with fp64, and record in it what is wrong with them."""
    computed: list[tuple[Contender, Outputs]] = []
    for entry in entries:
        try:
            computed.append((entry, entry.finish(entry.run(entry.prepare(operands)))))
        except Exception as error:  # a kernel may raise anything, which is then the result of this check
            entry.wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    sums = [[[0.0, 0.0] for _ in outputs] for _, outputs in computed]
    for place, exact in case.exact(operands):
        for (_, outputs), totals in zip(computed, sums, strict=True):
            for total, ours, its in zip(totals, (x[place] for x in outputs), exact, strict=True):
                if ours.shape != its.shape:
                    total[0] = float("nan")
                    continue
                total[0] += float((ours.double() - its.double()).square().sum())
                total[1] += float(its.double().square().sum())
    allowed = case.tolerance(dtype)
    for (entry, outputs), totals in zip(computed, sums, strict=True):
        entry.errors = tuple((off / max(norm, 1e-300)) ** 0.5 for off, norm in totals)
        finite = all(bool(torch.isfinite(x).all()) for x in outputs)
        if not finite or not all(error <= most for error, most in zip(entry.errors, allowed, strict=True)):
            entry.wrong = f"is off by {_errors(entry.errors)}, where {_errors(allowed)} is allowed"
            entry.wrong += "" if finite else "; not every number is finite"


def _errors(errors: tuple[float, ...]) -> str:
    return " and ".join(f"{error:.1e}" for error in errors)


@torch.no_grad()
def measure(timer: Timer, sets: list[tuple], entries: list[Contender], rounds: int, warmup: int) -> None:
    """Time the correct contenders in turn, round after round."""
    right = [entry for entry in entries if not entry.wrong]
    prepared = [[entry.prepare(operands) for operands in sets] for entry in right]
    launching = []
    for entry, own in zip(right, prepared, strict=True):
        for _ in range(warmup):
            synchronize(timer.device)
            began = time.perf_counter()
            for operands in own:
                entry.run(operands)
            seconds = time.perf_counter() - began  # until all calls are in a GPU's queue
        synchronize(timer.device)
        launching.append(seconds)
    for _ in range(rounds):
        for entry, own, seconds in zip(right, prepared, launching, strict=True):
            entry.ms.append(timer(entry.run, own, seconds))
