"""Measure the speed of apbv.kernels' operators with every backend, relative to a device's ceilings.

    python benchmarks/operators.py --preset h200 --json operators.jsonl
    python benchmarks/operators.py --ops segmented_attention --tokens 32768 --backends torch \
        flash_attn triton

Every result is compared first, with fp64 as by ``apbv.doctor``, and at the measured size with that
of torch: a wrong one gets an error instead of a speed, and the exit status is 1. Errors are
relative to what is allowed. Every round interleaves all backends, so that drift in the device's
speed affects all equally. On a GPU the time is that between two events after queued work, so that
it excludes launch overhead. Operands rotate, so that they come from memory and not from a cache.
The ceilings, a large copy and a large matrix product in the same dtype, are measured in the same
run; the share of the ceiling is the share of the lower one. Over several segments, backends other
than Triton join the segments or merge partial results, which their time includes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.metadata import distributions

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from apbv.doctor import kernels
from apbv.hosts.devices import choose_device
from apbv.kernels import BackendError
from apbv.kernels.backends import BACKENDS, LIBRARIES, is_interpreted

from support.arguments import DEFAULT_DTYPES, parser_of, presets_of
from support.operator_cases import Case, Draw, Drawn, Outputs, cases, sizes_of
from support.processes import synchronize
from support.records import columns_of, fields_of, report

PRESETS = presets_of("operators")
OPERATORS = tuple(dict.fromkeys(case.op for case in cases(sizes_of("quick"), [600])))
TIMED = tuple(name for name in BACKENDS if name != "auto")
_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4")
_CEILING_ROUNDS = 6
# The largest difference of two backends' results, relative to their size.
AGREEMENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Contender:
    """One backend that can compute a case.

    Attributes:
        run: the function that is timed.
        error: relative to what is allowed; None if it could not be computed.
        wrong: why its result is rejected; None if it is right.
        ms: milliseconds per call, one entry for every round.
    """

    backend: str
    run: Callable[[Drawn], Outputs]
    error: float | None = None
    wrong: str | None = None
    ms: list[float] = field(default_factory=list)


class Timer:
    """Measures milliseconds per call on a device.

    Args:
        device, dtype: where and in what precision the ceilings are measured.
        size: bytes of the copy that shows the bandwidth.
        side: rows of the square matrix product that shows the operations per second.

    Attributes:
        bandwidth: the device's ceiling, in bytes per second.
        flops: the device's ceiling, in operations per second.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int, side: int):
        self.device = device
        buffers = torch.zeros(2, size, dtype=torch.uint8, device=device).random_()
        self._source, self._target = buffers

        def copy(_: tuple) -> None:
            self._target.copy_(self._source)

        self._copy_seconds = self._best_seconds(copy)
        # Every byte is read and written.
        self.bandwidth = 2 * size / self._copy_seconds

        a, b = torch.randn(2, side, side, device=device, dtype=dtype)

        def multiply(_: tuple) -> None:
            torch.mm(a, b)

        self.flops = 2 * side**3 / self._best_seconds(multiply)

    def _best_seconds(self, run: Callable[[tuple], object]) -> float:
        """Return the least seconds of several calls, the first of which warms up.

        A ceiling is the most that the device can do.
        """
        return min(self(run, [()]) for _ in range(_CEILING_ROUNDS)) / 1e3

    def __call__(
        self, run: Callable[[tuple], object], sets: list[tuple], launching: float = 0.0
    ) -> float:
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
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        # Copies keep the GPU busy until all calls are in its queue.
        if launching:
            num_copies = min(100, int(launching / self._copy_seconds) + 1)
            for _ in range(num_copies):
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


def contenders(
    case: Case, operands: Drawn, backends: list[str], note: Callable[[str], None]
) -> list[Contender]:
    """Return the backends that can compute a case here, and note why the others cannot."""
    entries = []
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
        entries.append(Contender(name, partial(case.run, backend=name)))
    return entries


@torch.no_grad()
def check(case: Case, operands: Drawn, dtype: torch.dtype, entries: list[Contender]) -> None:
    """Compare every contender with fp64, as the doctor does, and at this size with the first one.

    The first one here is the first that runs.
    """
    expected = None
    for entry in entries:
        try:
            draw = kernels.Draw(tree_leaves(operands)[0].device, dtype)
            errors = []
            for doctors_case in kernels.CASES[case.op](draw):
                errors.append(kernels.error_of(case.op, doctors_case, entry.backend))
            entry.error = max(errors)
            outputs = [output.double() for output in entry.run(operands)]
        except Exception as error:
            # A kernel may raise anything, which is then the result of this check.
            entry.wrong = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if expected is None:
            expected = outputs
        differences = []
        for output, right in zip(outputs, expected, strict=True):
            differences.append(float((output - right).norm() / right.norm()))
        difference = max(differences)
        # Negated, so that NaN is wrong.
        if not entry.error <= 1:
            entry.wrong = f"is off by {entry.error:.3g} times what is allowed"
        elif not difference <= AGREEMENT[dtype]:
            entry.wrong = f"differs by {difference:.1e} from {entries[0].backend}"


@torch.no_grad()
def measure(
    timer: Timer, sets: list[Drawn], entries: list[Contender], rounds: int, warmup: int
) -> None:
    """Time the correct contenders in turn, round after round."""
    right = [entry for entry in entries if not entry.wrong]
    # Warm up. What is timed last is how long it takes until all calls are in a GPU's queue.
    launching = {}
    for entry in right:
        for _ in range(warmup):
            synchronize(timer.device)
            began = time.perf_counter()
            for operands in sets:
                entry.run(operands)
            launching[entry.backend] = time.perf_counter() - began
        synchronize(timer.device)
    # Measure.
    for _ in range(rounds):
        for entry in right:
            entry.ms.append(timer(entry.run, sets, launching[entry.backend]))


def record(
    options: argparse.Namespace, timer: Timer, case: Case, entry: Contender, default: str
) -> dict:
    """Return a JSON-ready record, without a speed if the result is wrong."""
    dtype = getattr(torch, options.dtype)
    num_bytes = case.bytes(dtype)
    arithmetic_seconds = case.flops / timer.flops
    memory_seconds = num_bytes / timer.bandwidth
    floor_ms = max(arithmetic_seconds, memory_seconds) * 1e3
    ms = None
    tflops = None
    gigabytes_per_s = None
    share_of_ceiling = None
    if entry.ms:
        ms = statistics.median(entry.ms)
        tflops = case.flops / ms / 1e9
        gigabytes_per_s = num_bytes / ms / 1e6
        share_of_ceiling = floor_ms / ms
    error = entry.error
    if error is not None and not error < float("inf"):
        # JSON has no infinity, and no NaN.
        error = None
    return {
        "benchmark": "operators",
        **fields_of(options, "preset", "warmup", "seed", "dtype"),
        "op": case.op,
        "case": case.label,
        "backend": entry.backend,
        "is_default": entry.backend == default,
        "sizes": asdict(case.sizes),
        "flops": case.flops,
        "bytes": num_bytes,
        "ms": ms,
        "tflops": tflops,
        "gigabytes_per_s": gigabytes_per_s,
        "ceiling": {
            "tflops": timer.flops / 1e12,
            "gigabytes_per_s": timer.bandwidth / 1e9,
            "bound": "arithmetic" if arithmetic_seconds > memory_seconds else "memory",
        },
        "share_of_ceiling": share_of_ceiling,
        "error": error,
        "wrong": entry.wrong,
        "samples": {"ms": entry.ms},
        "libraries": libraries(),
    }


def libraries() -> dict[str, str | None]:
    """Return the versions of the measured libraries that are installed."""
    versions = {}
    for package in distributions():
        if package.name in _PACKAGES:
            versions[package.name] = package.version
    versions["cudnn"] = str(torch.backends.cudnn.version())
    versions["cuda"] = torch.version.cuda
    return versions


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        "operators", __doc__, {"preset": sorted(PRESETS), "ops": OPERATORS, "backends": TIMED}
    )
    options = parser.parse_args(arguments)
    options.device = choose_device()
    options.preset = options.preset or ("h200" if options.device.type == "cuda" else "cpu")
    options.dtype = options.dtype or DEFAULT_DTYPES[options.device.type]
    fewest = 64 * PRESETS[options.preset]["sizes"]["hosts"]
    if options.tokens and min(options.tokens) < fewest:
        parser.error(
            f"--tokens must be at least {fewest}, so that there is something in every block"
        )
    return options


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of all cases, one after the other."""
    dtype = getattr(torch, options.dtype)
    preset = PRESETS[options.preset]
    timer = Timer(options.device, dtype, preset["copy_bytes"], preset["matrix_side"])
    print(
        f"ceilings: {timer.flops / 1e12:.2f} TFLOP/s in {options.dtype}, "
        f"{timer.bandwidth / 1e9:.1f} GB/s"
    )
    all_cases = cases(sizes_of(options.preset), options.tokens or preset["tokens"])
    chosen = [case for case in all_cases if case.op in options.ops]

    # The cache lets each message be written once.
    @cache
    def note(message: str) -> None:
        tqdm.write(f"note: {message}", file=sys.stderr)

    for case in tqdm(chosen, unit="case", disable=None):
        num_sets = timer.num_sets(case.bytes(dtype))
        sets = []
        for seed in range(options.seed, options.seed + num_sets):
            sets.append(case.make(Draw(seed, options.device, dtype)))
        entries = contenders(case, sets[0], options.backends, note)
        check(case, sets[0], dtype, entries)
        measure(timer, sets, entries, options.rounds, options.warmup)
        default = case.chosen(sets[0], "auto")
        for entry in entries:
            yield record(options, timer, case, entry, default)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    rows = report(options, measured(options), columns_of("operators"))
    for row in rows:
        if row["wrong"]:
            print(
                f"error: {row['op']} ({row['case']}) with {row['backend']} {row['wrong']}",
                file=sys.stderr,
            )
    if not rows:
        print("error: none of these back ends can be used here", file=sys.stderr)
    is_right = bool(rows) and not any(row["wrong"] for row in rows)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
