"""The speed of apbv.kernels' operators, every back end and library side by side, beside what the device can do.

    python benchmarks/operators.py --preset h200 --json operators.jsonl --plot operators.png
    python benchmarks/operators.py --ops segmented_attention --tokens 32768 --backends torch cudnn triton

Every result is compared with fp64 first: what is wrong gets an error instead of a speed, and the exit status is 1.
Rounds go through all back ends in turn, so that a drift of the device's speed hits all. On a GPU the time is that
between events behind work queued before them: the device's, and not that of launching. Operands rotate, so that
they come from memory and not from a cache. The ceilings, a large copy and a large matrix product in the same
dtype, are measured in the same run; the share of the ceiling is of the one that allows less.

Where attention is over several segments, back ends other than Triton join them or merge partial results. That is
part of their time; beside it stands the time of their attention kernels alone.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from figures import import_pyplot, legend_beside, save, short
from operator_cases import Case, Draw, Outputs, Sizes, cases
from tqdm import tqdm

from apbv.kernels import BackendError, merge_states
from apbv.kernels.backends import BACKENDS, LIBRARIES, is_interpreted
from apbv.kernels.library_attention import attend_with
from apbv.stats import append_json_lines, device_name, markdown_table, provenance


@dataclass(frozen=True)
class Preset:
    """What is run, and what shows the ceilings: a copy of so many bytes, a product of square matrices."""

    sizes: Sizes
    tokens: list[int]
    copy_bytes: int
    matrix_side: int


PRESETS = {
    "quick": Preset(Sizes(600, 2, 4, 2, 32, 9, 3, 7, 11, 48), [600], 2**24, 256),
    "cpu": Preset(Sizes(8192, 2, 8, 2, 64, 32, 16, 12, 21, 512), [8192], 2**28, 2048),
    # The heads and the width of Qwen2.5-VL-7B, and 64 frames of 720p.
    "h200": Preset(Sizes(131072, 8, 28, 4, 128, 64, 64, 26, 46, 3584), [8192, 32768, 131072], 2**30, 8192),
}
OPERATORS = tuple(dict.fromkeys(case.op for case in cases(PRESETS["quick"].sizes, [600])))
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
TIMED = tuple(name for name in BACKENDS if name not in ("auto", "reference"))
_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python")


@dataclass
class Contender:
    """One way to compute a case.

    Attributes:
        variant: "operator", or "attention kernels alone".
        prepare: makes what is timed out of the case's operands; not timed.
        run: is timed.
        finish: makes the operator's outputs out of what was timed; not timed.
        errors: of each output, relative; empty if it could not be computed.
        wrong: what is wrong with it; None: nothing.
        ms: per call, one for every round.
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
    """Milliseconds per call on a device.

    Attributes:
        bandwidth, flops: the device's ceilings, in bytes and operations per second.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, preset: Preset, rounds: int = 6):
        self.device = device
        size, side = preset.copy_bytes, preset.matrix_side
        self._source, self._target = torch.zeros(2, size, dtype=torch.uint8, device=device).random_()
        # The best of several rounds, the first of which warms up: a ceiling is what the device can do at most.
        self._copy_seconds = 0.0
        copy_ms = min(self(lambda _: self._target.copy_(self._source), [()]) for _ in range(rounds))
        self._copy_seconds = copy_ms / 1e3
        self.bandwidth = 2 * size / self._copy_seconds
        a, b = torch.randn(2, side, side, device=device, dtype=dtype)
        self.flops = 2 * side**3 / min(self(lambda _: torch.mm(a, b), [()]) for _ in range(rounds)) * 1e3

    def __call__(self, run: Callable[[tuple], object], sets: list[tuple], launching: float = 0.0) -> float:
        """The mean of one call on each set of operands.

        Args:
            launching: seconds in which this process puts all these calls into a GPU's queue.
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

    def launching(self, run: Callable[[tuple], object], sets: list[tuple]) -> float:
        """Seconds until all calls are in a GPU's queue."""
        self.synchronize()
        began = time.perf_counter()
        for operands in sets:
            run(operands)
        seconds = time.perf_counter() - began
        self.synchronize()
        return seconds

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def num_sets(self, size: int) -> int:
        """How many operands of so many bytes are several times what a cache holds."""
        if self.device.type != "cuda":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(32, max(2, -(-4 * cache // size)))


def contenders(case: Case, operands: tuple, backends: list[str], note: Callable[[str], None]) -> list[Contender]:
    """The back ends that can compute a case here; why the others cannot is noted."""
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
    """Only the attention function's calls: over all segments but the last, joined, and over the square last."""
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
    """Compare every contender's outputs with fp64, and write down what is wrong with them."""
    computed: list[tuple[Contender, Outputs]] = []
    for entry in entries:
        try:
            computed.append((entry, entry.finish(entry.run(entry.prepare(operands)))))
        except Exception as error:  # whatever a kernel may raise: it is the result of this check
            entry.wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    sums = [[[0.0, 0.0] for _ in outputs] for _, outputs in computed]
    for pick, exact in case.exact(operands):
        for (_, outputs), totals in zip(computed, sums, strict=True):
            for total, ours, its in zip(totals, pick(outputs), exact, strict=True):
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
    """Time the contenders that are right, in turn, round after round."""
    right = [entry for entry in entries if not entry.wrong]
    prepared = [[entry.prepare(operands) for operands in sets] for entry in right]
    launching = []
    for entry, own in zip(right, prepared, strict=True):
        for _ in range(warmup):
            seconds = timer.launching(entry.run, own)
        launching.append(seconds)
    for _ in range(rounds):
        for entry, own, seconds in zip(right, prepared, launching, strict=True):
            entry.ms.append(timer(entry.run, own, seconds))


def record(options: argparse.Namespace, timer: Timer, case: Case, entry: Contender, default: str) -> dict:
    """A JSON-ready record; no speed for what is wrong."""
    dtype = getattr(torch, options.dtype)
    num_bytes = case.bytes(dtype)
    ms = statistics.median(entry.ms) if entry.ms else None
    floor_ms = max(case.flops / timer.flops, num_bytes / timer.bandwidth) * 1e3
    return {
        "benchmark": "operators",
        "preset": options.preset,
        "op": case.op,
        "case": case.label,
        "backend": entry.backend,
        "variant": entry.variant,
        "is_default": entry.variant == "operator" and entry.backend == default,
        "sizes": case.sizes,
        "flops": case.flops,
        "bytes": num_bytes,
        "ms": ms,
        "tflops": case.flops / ms / 1e9 if ms else None,
        "gigabytes_per_s": num_bytes / ms / 1e6 if ms else None,
        "ceiling": {
            "tflops": timer.flops / 1e12,
            "gigabytes_per_s": timer.bandwidth / 1e9,
            "bound": "arithmetic" if case.flops / timer.flops > num_bytes / timer.bandwidth else "memory",
        },
        "share_of_ceiling": floor_ms / ms if ms else None,
        # JSON has no NaN.
        "errors": [error if error < float("inf") else None for error in entry.errors],
        "tolerances": list(case.tolerance(dtype)),
        "wrong": entry.wrong,
        "samples": {"ms": entry.ms},
        "warmup": options.warmup,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "device": device_name(timer.device),
        "dtype": options.dtype,
        "libraries": libraries(),
        "command": " ".join(["benchmarks/operators.py", *sys.argv[1:]]),
        **provenance(),
    }


def libraries() -> dict[str, str | None]:
    """Versions of what was measured; None: not installed."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    cudnn = torch.backends.cudnn.version()
    return found | {"cudnn": None if cudnn is None else str(cudnn), "cuda": torch.version.cuda}


def table(rows: list[dict]) -> str:
    """The figures for people, as Markdown."""
    header = ["operator", "tokens", "case", "back end", "ms", "TFLOP/s", "GB/s", "of ceiling", "bound", "error"]
    lines = []
    for row in rows:
        alone = "" if row["variant"] == "operator" else ", kernels alone"
        cells = [row["op"], row["sizes"]["tokens"], row["case"]]
        cells.append(row["backend"] + alone + (" (auto)" if row["is_default"] else ""))
        if row["wrong"]:
            cells += ["WRONG", "–", "–", "–"]
        else:
            cells += [f"{row[name]:.3g}" for name in ("ms", "tflops", "gigabytes_per_s")]
            cells.append(f"{row['share_of_ceiling']:.0%}")
        cells.append(row["ceiling"]["bound"])
        cells.append(" ".join("nan" if error is None else f"{error:.0e}" for error in row["errors"]) or "–")
        lines.append(cells)
    return markdown_table(header, lines)


def plot(rows: list[dict], path: Path) -> None:
    """The share of the ceiling, a group of bars for every case."""
    rows = [row for row in rows if row["ms"]]
    groups = list(dict.fromkeys((row["op"], row["case"], row["sizes"]["tokens"]) for row in rows))
    names = list(dict.fromkeys((row["backend"], row["variant"]) for row in rows))
    height = 0.8 / max(1, len(names))
    figure, axes = import_pyplot().subplots(figsize=(9, 1.5 + 0.12 * len(groups) * max(3, len(names))))
    for i, (backend, variant) in enumerate(names):
        own = [row for row in rows if (row["backend"], row["variant"]) == (backend, variant)]
        places = [groups.index((row["op"], row["case"], row["sizes"]["tokens"])) + i * height for row in own]
        label = backend if variant == "operator" else f"{backend}, kernels alone"
        axes.barh(places, [row["share_of_ceiling"] for row in own], height, label=label)
    labels = [f"{op}: {case}, {short(tokens)}" for op, case, tokens in groups]
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(groups))], labels, fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("share of the ceiling (a large matrix product, or a large copy)")
    axes.grid(axis="x", alpha=0.3)
    legend_beside(axes)
    if rows:
        axes.set_title(f"{rows[0]['device']}, {rows[0]['dtype']}", fontsize=9)
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: h200 on a GPU, cpu otherwise")
    parser.add_argument("--ops", nargs="+", choices=OPERATORS, default=OPERATORS, metavar="OP")
    parser.add_argument("--backends", nargs="+", choices=TIMED, default=TIMED, metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="+", help="context lengths, instead of the preset's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 1:
        parser.error("--rounds and --warmup must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.preset = options.preset or ("h200" if device == "cuda" else "cpu")
    options.dtype = options.dtype or DTYPES[device]
    options.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    fewest = 64 * PRESETS[options.preset].sizes.hosts
    if options.tokens and min(options.tokens) < fewest:
        parser.error(f"--tokens must be at least {fewest}, so that there is something in every block")
    return options


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """The records of all cases, one after the other."""
    dtype = getattr(torch, options.dtype)
    preset = PRESETS[options.preset]
    timer = Timer(options.device, dtype, preset)
    print(f"ceilings: {timer.flops / 1e12:.2f} TFLOP/s in {options.dtype}, {timer.bandwidth / 1e9:.1f} GB/s")
    chosen = [case for case in cases(preset.sizes, options.tokens or preset.tokens) if case.op in options.ops]
    noted = set()

    def note(message: str) -> None:
        if message not in noted:
            noted.add(message)
            tqdm.write(f"note: {message}", file=sys.stderr)

    for case in tqdm(chosen, unit="case", disable=None):
        seeds = range(options.seed, options.seed + timer.num_sets(case.bytes(dtype)))
        sets = [case.make(Draw(seed, options.device, dtype)) for seed in seeds]
        entries = contenders(case, sets[0], options.backends, note)
        check(case, sets[0], dtype, entries)
        measure(timer, sets, entries, options.rounds, options.warmup)
        default = case.chosen(sets[0], "auto")
        for entry in entries:
            yield record(options, timer, case, entry, default)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    rows = []
    try:
        for row in measured(options):
            rows.append(row)
            if options.json:
                append_json_lines(options.json, [row])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if options.plot:
        plot(rows, options.plot)
    for row in rows:
        if row["wrong"]:
            print(f"error: {row['op']} ({row['case']}) with {row['backend']} {row['wrong']}", file=sys.stderr)
    if not rows:
        print("error: none of these back ends can be used here", file=sys.stderr)
    return int(not rows or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
