"""Measure TTFT of every prefill method in one run.

    torchrun --nproc-per-node 2 benchmarks/throughput.py --model llama-small --tokens 32768
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table5 --json table5.jsonl
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table4 --json table4.jsonl
    python benchmarks/throughput.py --preset table5  # no torchrun: the hosts are simulated

All methods do the same work outside attention: the same vision encoding, logits of the last token
only, and KV that stays where it was computed. Every round interleaves all methods, so that drift in
the machine's speed affects all equally. `full` uses one host with the CPU threads of all hosts
together; on GPUs it uses one GPU. Weights are random, unless --model is a checkpoint.

Simulated hosts (support.simulated) compute one at a time, each with the whole machine, and data
arrives after --latency plus size over --bandwidth. Their times are real computation on virtual
clocks, and are marked as simulated.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch.profiler import ProfilerActivity, profile

from apbv import HostGroup
from apbv.config import METHOD_NAMES, SPARSE_NAMES
from apbv.launch.options import prefill_config
from apbv.planning import parse_resolution
from apbv.prefilling.methods import METHODS

from support.arguments import parser_of, presets_of
from support.bench import Bench, Case, Workload, measure
from support.records import columns_of, fields_of, markdown_table, measure_on_hosts
from support.summaries import percentiles

BASELINES = ("full", "zigzag_ring")
SWITCHES = ("overlap", "fused_query", "zigzag", "frame_parallel")
PRESETS = presets_of("throughput")


def plan(options: argparse.Namespace, hosts: HostGroup) -> tuple[list[Workload], list[Case]]:
    """Return the prompts, and the cases that run on each of them.

    Raises:
        ValueError: options contradict each other.
    """
    usual = PRESETS.get(options.preset, {"hosts": [2], "frames": [16]})
    is_large = options.preset is not None and hosts.device.type != "cpu"
    if options.model is None:
        small = "llama-small" if options.tokens else "qwen2.5-vl-small"
        options.model = "qwen2.5-vl-3b" if is_large else small
    if hosts.size > 1 and options.hosts not in (None, [hosts.size]):
        raise ValueError(
            f"--hosts {options.hosts} is for simulated hosts; torchrun started {hosts.size}"
        )
    numbers = [hosts.size] if hosts.size > 1 else options.hosts or usual["hosts"]
    if min(numbers) < 2:
        raise ValueError(f"--hosts {min(numbers)}: 2 hosts at least; `full` always runs on one")

    if options.tokens:
        workloads = [Workload(tokens=length) for length in options.tokens]
    else:
        frames = options.frames or usual["frames"]
        sizes = options.resolutions or [usual.get("resolution", "720p") if is_large else "240p"]
        workloads = [
            Workload(None, count, *parse_resolution(size)) for size in sizes for count in frames
        ]

    base = prefill_config(options)
    methods = options.methods or [name for name in METHOD_NAMES if name not in SPARSE_NAMES]
    configs = {name: replace(base, method=name) for name in methods}
    if "rows" in usual and not options.methods:
        configs = {label: replace(base, **settings) for label, settings in usual["rows"].items()}
    cases = [
        Case(label, config, number if METHODS[config.method].splits else 1)
        for number in numbers
        for label, config in configs.items()
    ]
    return workloads, sorted(dict.fromkeys(cases), key=lambda case: case.hosts > 1)


def records(
    options: argparse.Namespace,
    bench: Bench,
    workload: Workload,
    cases: list[Case],
    measured: list[list[dict]],
) -> Iterator[dict]:
    """Yield one record per case of a workload; speedups are ratios of medians within the same
    run."""
    times = [[sample["ttft_ms"] for sample in samples] for samples in measured]
    medians = {
        (case.label, case.hosts): statistics.median(ms)
        for case, ms in zip(cases, times, strict=True)
    }
    for case, samples, ttft_ms in zip(cases, measured, times, strict=True):
        last = samples[-1]
        ttft = percentiles(ttft_ms)
        simulated = bench.simulated and case.hosts > 1
        baselines = {
            name: medians.get((name, case.hosts), medians.get((name, 1))) for name in BASELINES
        }
        yield {
            "benchmark": "throughput",
            **fields_of(options, "preset", "model", "warmup"),
            **fields_of(case, "label", "hosts"),
            "simulated": simulated,
            "network": {"link": asdict(bench.network)} if simulated else None,
            "threads_per_host": bench.threads * (bench.hosts.size if case.hosts == 1 else 1),
            "dtype": str(bench.model.dtype).removeprefix("torch."),
            **asdict(workload),
            **fields_of(
                last,
                "method",
                "num_input_tokens",
                "num_video_tokens",
                "anchor_len",
                "passing_len",
                "early_passing_len",
            ),
            **fields_of(last, "comm_bytes"),
            **fields_of(case.config, "importance", *SWITCHES),
            "ttft_ms": ttft,
            "request_throughput": 1e3 / ttft["p50"],
            "stages_ms": {
                name: statistics.median(sample["stages_ms"][name] for sample in samples)
                for name in last["stages_ms"]
            },
            # On a GPU: whichever is more sets the pace, the CPU that launches or the GPU.
            "busy_ms": last.get("busy_ms"),
            # Simulated hosts share one process's memory, which does not tell what each of them
            # would need.
            "peak_memory_bytes": None if simulated else last["peak_memory_bytes"],
            **{f"speedup_vs_{name}": ms and ms / ttft["p50"] for name, ms in baselines.items()},
            "samples": {"ttft_ms": ttft_ms},
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("throughput", __doc__, {"preset": PRESETS, "methods": METHOD_NAMES})
    parser.set_defaults(method="apbv")
    return parser.parse_args(arguments)


def measured_records(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield the records of all workloads, on host 0; collective."""
    with hosts.local_stage("reading the options"):
        workloads, cases = plan(options, hosts)
    runs_of_each = options.warmup + options.rounds + (options.profile is not None)
    bench = Bench(options, hosts, len(workloads) * len(cases) * runs_of_each)
    for workload in workloads:
        measured = measure(bench, workload, cases, options.rounds, options.warmup)
        if options.profile is not None:
            write_profiles(options.profile, bench, workload, cases)
        if hosts.rank == 0:
            yield from records(options, bench, workload, cases, measured)


def write_profiles(folder: Path, bench: Bench, workload: Workload, cases: list[Case]) -> None:
    """Run every case once more, and write and show what host 0 did; of simulated hosts what all of
    them did."""
    job = bench.prepare(workload)
    length = workload.tokens or f"{workload.frames}x{workload.height}p"
    for case in cases:
        with bench.hosts.collective_stage("profiling"):
            if bench.hosts.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{case.label}-{case.hosts}-{length}.json".replace(" ", "_")
                print(
                    f"{path}:\n\n{write_trace(path, lambda case=case: bench.run(case, job))}\n",
                    flush=True,
                )
            else:
                bench.run(case, job)


_PREFIX = "apbv."  # of a stage's name in a trace, as StageTimer gives it
_ON_CPU = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def write_trace(path: Path, run: Callable[[], object]) -> str:
    """Run a function, write its trace in the Trace Event Format, and return a table of its kernels.

    Raises:
        ValueError: the file cannot be written.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    # Simulated hosts, and those who read and encode a video, are threads that begin inside.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        run()
    try:
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot write the trace {path}: {error}") from error
    return kernel_table(trace["traceEvents"])


def kernel_table(events: Iterable[dict], least: float = 0.002) -> str:
    """Format the kernels of a trace by stage; without a GPU torch's operators, without what these
    call.

    Args:
        events: of a trace by torch's profiler.
        least: what takes a smaller share of the whole time is in one row with others of its stage.
    """
    events = [event for event in events if event.get("ph") == "X"]
    launched_in, operators = _on_cpu([event for event in events if event["cat"] in _ON_CPU])
    kernels = [
        (launched_in.get(event["args"].get("correlation"), "outside"), event["name"], event["dur"])
        for event in events
        if event["cat"] in _ON_GPU
    ]
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for stage, name, microseconds in kernels or operators:
        runs[stage, name].append(microseconds)
    whole = sum(map(sum, runs.values()))
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (stage, name), each in runs.items():
        times[stage][f"`{name[:80]}`" if sum(each) >= least * whole else "others"] += each
    rows = [
        [stage, name, len(each), f"{sum(each) / 1e3:.2f}", f"{100 * sum(each) / whole:.1f}%"]
        for stage, by_name in times.items()
        for name, each in sorted(
            by_name.items(), key=lambda item: (item[0] == "others", -sum(item[1]))
        )
    ]
    return markdown_table(
        ["stage", "kernel" if kernels else "operator", "calls", "ms", "share"], rows
    )


def _on_cpu(events: list[dict]) -> tuple[dict[int, str], list[tuple[str, str, float]]]:
    """Return the stage of every launch by its number, and operators with their stage and own
    microseconds."""
    launched_in = {}
    operators = []
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        # Of those around an event: end, stage, what is counted.
        inside: list[tuple[float, str, list]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while inside and inside[-1][0] <= event["ts"]:
                inside.pop()
            stage = inside[-1][1] if inside else "outside"
            if event["cat"] == "user_annotation" and event["name"].startswith(_PREFIX):
                stage = event["name"].removeprefix(_PREFIX)
            counted = [stage, event["name"], event["dur"]]
            if event["cat"] == "cpu_op":
                operators.append(counted)
                if inside:
                    inside[-1][2][2] -= event["dur"]
            elif event["cat"].startswith("cuda"):
                launched_in[event["args"].get("correlation")] = stage
            inside.append((event["ts"] + event["dur"], stage, counted))
    return launched_in, operators


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measured_records, columns_of("throughput"))


if __name__ == "__main__":
    sys.exit(main())
