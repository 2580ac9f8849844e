"""Measure the speed of apbv.kernels' operators with every backend, relative to the device's ceilings.

    python benchmarks/operators.py --preset h200 --json operators.jsonl
    python benchmarks/operators.py --ops segmented_attention --tokens 32768 --backends torch flash_attn triton
    python benchmarks/operators.py --tune tiles.json  # kernels/tiles.json, with the fastest tiles of this GPU

Every result is compared with fp64 first: a wrong one gets an error instead of a speed, and the exit status is 1.
Every round interleaves all backends, so that drift in the device's speed affects all equally. On a GPU the time is
that between two events after queued work, so that it excludes launch overhead. Operands rotate, so that they come
from memory and not from a cache. The ceilings, a large copy and a large matrix product in the same dtype, are
measured in the same run; the share of the ceiling is the share of the lower one.

Over several segments, backends other than Triton join the segments or merge partial results. Their time includes
this; the time of their attention kernels alone is also reported.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv.kernels.backends import BACKENDS

from support.arguments import DEFAULT_DTYPES, add_shared
from support.operators.case import Case, Draw
from support.operators.cases import PRESETS, cases
from support.operators.timing import Contender, Timer, check, contenders, measure
from support.records import report, table

OPERATORS = tuple(dict.fromkeys(case.op for case in cases(PRESETS["quick"].sizes, [600])))
TIMED = tuple(name for name in BACKENDS if name != "auto")
_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4")


def record(options: argparse.Namespace, timer: Timer, case: Case, entry: Contender, default: str) -> dict:
    """Return a JSON-ready record, without a speed if the result is wrong."""
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
        "dtype": options.dtype,
        "libraries": libraries(),
    }


def libraries() -> dict[str, str | None]:
    """Return the versions of the measured libraries that are installed."""
    found = {each.name: each.version for each in distributions() if each.name in _PACKAGES}
    return {**found, "cudnn": str(torch.backends.cudnn.version()), "cuda": torch.version.cuda}


COLUMNS = {
    "operator": "{op}",
    "tokens": "{sizes[tokens]}",
    "case": "{case}",
    "back end": lambda row: (
        row["backend"]
        + ("" if row["variant"] == "operator" else ", kernels alone")
        + (" (auto)" if row["is_default"] else "")
    ),
    "ms": lambda row: "WRONG" if row["wrong"] else f"{row['ms']:.3g}",
    "TFLOP/s": "{tflops:.3g}",
    "GB/s": "{gigabytes_per_s:.3g}",
    "of ceiling": "{share_of_ceiling:.0%}",
    "bound": "{ceiling[bound]}",
    "error": lambda row: " ".join("nan" if error is None else f"{error:.0e}" for error in row["errors"]) or "–",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes (default: h200 on a GPU, else cpu)")
    parser.add_argument("--ops", nargs="+", choices=OPERATORS, default=OPERATORS, metavar="OP")
    parser.add_argument("--backends", nargs="+", choices=TIMED, default=TIMED, metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="+", help="context lengths (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="time candidate tiles, and write the best to FILE"
    )
    add_shared(parser, "dtype", "json", rounds=10, warmup=2)
    options = parser.parse_args(arguments)
    if options.warmup < 1:
        parser.error("--warmup must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.preset = options.preset or ("h200" if device == "cuda" else "cpu")
    options.dtype = options.dtype or DEFAULT_DTYPES[device]
    options.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    fewest = 64 * PRESETS[options.preset].sizes.hosts
    if options.tokens and min(options.tokens) < fewest:
        parser.error(f"--tokens must be at least {fewest}, so that there is something in every block")
    return options


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of all cases, one after the other."""
    dtype = getattr(torch, options.dtype)
    preset = PRESETS[options.preset]
    timer = Timer(options.device, dtype, preset.copy_bytes, preset.matrix_side)
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


def tuned(options: argparse.Namespace) -> int:
    """Time candidate tiles, print them, and return the exit status; without a GPU kernels are interpreted."""
    if options.device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    from support.operators import tuning

    preset = PRESETS[options.preset]
    timer = Timer(options.device, getattr(torch, options.dtype), preset.copy_bytes, preset.matrix_side)
    sizes = replace(preset.sizes, tokens=max(options.tokens or preset.tokens))
    how = timer, sizes, getattr(torch, options.dtype), options.rounds, options.warmup, options.tune
    print(table(list(tuning.tune(*how)), tuning.COLUMNS))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.tune is not None:
        return tuned(options)
    rows = report(options, measured(options), COLUMNS)
    for row in rows:
        if row["wrong"]:
            print(f"error: {row['op']} ({row['case']}) with {row['backend']} {row['wrong']}", file=sys.stderr)
    if not rows:
        print("error: none of these back ends can be used here", file=sys.stderr)
    return int(not rows or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
