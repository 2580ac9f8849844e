"""Measure the time to first token of every way to prefill, side by side in one run.

    torchrun --nproc-per-node 2 benchmarks/throughput.py --model llama-small --tokens 32768
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table5 --json table5.jsonl --plot table5.png
    python benchmarks/throughput.py --preset table5  # no torchrun: the hosts are simulated
    python benchmarks/throughput.py --model demo --video clip.mp4 --frames 128 --hosts 4

All methods do the same work outside attention: the same vision encoding, logits of the last token only, and the
KV stays where it was computed. Every round runs all of them in turn, so that a drift of the machine's speed
affects all alike. `full` is one host with the CPU threads of all hosts together; on GPUs it is one GPU. Weights
are random, unless --model is a checkpoint.

Simulated hosts (support.simulated) compute one after the other, each with the whole machine, and data arrives
after --latency plus size over --bandwidth. Their times are
real computing on virtual clocks, and are marked as simulated.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm

from apbv import HostGroup, PrefillConfig
from apbv.config import SPARSE_NAMES
from apbv.hosts import run_on_hosts
from apbv.planning import parse_resolution
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE

from support.arguments import DTYPES, add_json_option, add_plot_option
from support.prefills.bench import Bench, Workload, measure
from support.prefills.presets import PRESETS, Case
from support.prefills.report import plot, records, table
from support.records import write_by_host_0
from support.simulated import Link, Network
from support.workloads import CONFIGS


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="a sweep of the paper; other options override it"
    )
    parser.add_argument("--model", help=f"{', '.join(CONFIGS)} (random weights), demo, a folder or a hub id")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        help="default: all but sparse ones, whose time depends on what is read",
    )
    parser.add_argument("--hosts", type=int, nargs="+", help="numbers of simulated hosts (not under torchrun)")
    what = parser.add_argument_group("prompts")
    what.add_argument("--tokens", type=int, nargs="+", help="lengths of a text prompt")
    what.add_argument("--frames", type=int, nargs="+", help="numbers of frames")
    what.add_argument("--resolutions", nargs="+", help="HxW, or such as 720p")
    what.add_argument("--video", type=Path, help="a file instead of synthetic frames; --model is a checkpoint")
    what.add_argument("--question", default="What happens in this video?", help="asked about --video")
    what.add_argument("--query-len", type=int, default=32, help="tokens of the question otherwise")
    what.add_argument("--seed", type=int, default=0)
    how = parser.add_argument_group("prefill")
    how.add_argument("--anchor-len", type=int, nargs="+")
    how.add_argument("--passing-len", type=int, nargs="+")
    how.add_argument("--importance", choices=sorted(IMPORTANCE), default=PrefillConfig().importance)
    how.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU")
    net = parser.add_argument_group("network of simulated hosts")
    net.add_argument("--bandwidth", type=float, default=200e9, help="bytes per second (default NVLink's: 200e9)")
    net.add_argument("--latency", type=float, default=10e-6, help="seconds")
    run = parser.add_argument_group("measuring")
    run.add_argument("--rounds", type=int, default=3)
    # The other hosts wait while host 0 runs `full`.
    run.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait for another host")
    run.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    add_json_option(run)
    add_plot_option(run)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 0:
        parser.error("--rounds must be at least 1, --warmup at least 0")
    if options.video and not options.model:
        parser.error("--video needs --model: a checkpoint, or demo")
    return options


def plan(options: argparse.Namespace, hosts: HostGroup) -> tuple[list[Workload], list[Case]]:
    """Return the prompts, and the cases that run on each of them.

    Raises:
        ValueError: options contradict each other.
    """
    preset = PRESETS[options.preset](hosts.device.type) if options.preset else None
    if options.model is None:
        text_only = bool(options.tokens)
        options.model = preset.model if preset else "llama-small" if text_only else "qwen2.5-vl-small"
    if hosts.size > 1 and options.hosts not in (None, [hosts.size]):
        raise ValueError(f"--hosts {options.hosts} is for simulated hosts; torchrun started {hosts.size}")
    numbers = [hosts.size] if hosts.size > 1 else options.hosts or (list(preset.hosts) if preset else [2])
    if min(numbers) < 2:
        raise ValueError(f"--hosts {min(numbers)}: 2 hosts at least; `full` always runs on one")

    if options.tokens:
        workloads = [Workload(tokens=length) for length in options.tokens]
    else:
        frames = options.frames or (list(preset.frames) if preset else [16])
        sizes = options.resolutions or (list(preset.resolutions) if preset else ["240p"])
        if options.video:
            workloads = [Workload(frames=count, video=options.video) for count in frames]
        else:
            shapes = [parse_resolution(size) for size in sizes]
            workloads = [Workload(None, count, *shape) for shape in shapes for count in frames]

    link = Link(options.bandwidth, options.latency)
    base = PrefillConfig(importance=options.importance)
    if preset and not options.methods:
        cases = [case for number in numbers for case in preset.cases(number, link, base)]
    else:
        cases = [
            Case(method, replace(base, method=method), number, Network(link))
            for number in numbers
            for method in options.methods or [name for name in METHODS if name not in SPARSE_NAMES]
        ]
    cases = [*_with_lengths(cases, options)]
    one_host = ("full", *SPARSE_NAMES)  # which host 0 computes alone
    alone = [
        Case(name, replace(base, method=name), 1, None) for name in one_host if any(c.label == name for c in cases)
    ]
    return workloads, alone + [case for case in cases if case.label not in one_host]


def _with_lengths(cases: list[Case], options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases with every requested anchor and passing length, where these matter."""
    for case in cases:
        if case.config.method not in ("apbv", "apb"):
            yield case
            continue
        for anchor in options.anchor_len or [case.config.anchor_len]:
            for passing in options.passing_len or [case.config.passing_len]:
                yield replace(case, config=replace(case.config, anchor_len=anchor, passing_len=passing))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_on_hosts(lambda hosts: run(options, hosts), options.timeout)


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Measure, and print and write the figures."""
    with hosts.local_stage("reading the options"):
        workloads, cases = plan(options, hosts)
    bench = Bench(options, hosts)
    rows = []
    runs = len(workloads) * len(cases) * (options.warmup + options.rounds)
    with tqdm(total=runs, unit="prefill", disable=None if hosts.rank == 0 else True) as bar:
        for workload in workloads:
            measured = measure(bench, workload, cases, bar)
            if hosts.rank == 0:
                rows += records(bench, measured)
    write_by_host_0(hosts, options, rows, table, plot)


if __name__ == "__main__":
    sys.exit(main())
