"""Measure TTFT of every prefill method in one run.

    torchrun --nproc-per-node 2 benchmarks/throughput.py --model llama-small --tokens 32768
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table5 --json table5.jsonl
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table4 --json table4.jsonl
    python benchmarks/throughput.py --preset table5  # no torchrun: the hosts are simulated

All methods do the same work outside attention: the same vision encoding, logits of the last token
only, and KV that stays where it was computed. Every round interleaves all methods, so that drift in
the machine's speed affects all equally. `full` uses one host with the CPU threads of all hosts
together; on GPUs it uses one GPU. Weights are random, unless --model is a checkpoint.

Simulated hosts (apbv.testing) compute one at a time, each with the whole machine, and data
arrives after --latency plus size over --bandwidth. Their times are real computation on virtual
clocks, and are marked as simulated.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError, StorageError

# isort: split
import torch
from torch.profiler import ProfilerActivity, profile

from apbv import HostGroup
from apbv.config import METHOD_NAMES, SPARSE_NAMES, AblationConfig
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
        InvalidRequestError: options contradict each other.
    """
    preset = PRESETS.get(options.preset, {"hosts": [2], "frames": [16]})
    is_large = options.preset is not None and hosts.device.type != "cpu"

    # The model and the numbers of hosts.
    if options.model is None:
        if is_large:
            options.model = "qwen2.5-vl-3b"
        elif options.tokens:
            options.model = "llama-small"
        else:
            options.model = "qwen2.5-vl-small"
    if hosts.size > 1:
        if options.hosts not in (None, [hosts.size]):
            raise InvalidRequestError(
                f"--hosts {options.hosts} is for simulated hosts; torchrun started {hosts.size}"
            )
        numbers_of_hosts = [hosts.size]
    else:
        numbers_of_hosts = options.hosts or preset["hosts"]
    fewest = min(numbers_of_hosts)
    if fewest < 2:
        raise InvalidRequestError(f"--hosts {fewest}: 2 hosts at least; `full` always runs on one")

    # The prompts.
    workloads = []
    if options.tokens:
        workloads = [Workload(tokens=length) for length in options.tokens]
    else:
        default_resolution = preset.get("resolution", "720p") if is_large else "240p"
        for resolution in options.resolutions or [default_resolution]:
            height, width = parse_resolution(resolution)
            for frames in options.frames or preset["frames"]:
                workloads.append(Workload(frames=frames, height=height, width=width))

    # The cases: rows of the preset, or methods.
    base = prefill_config(options)
    configs = {}
    if "rows" in preset and not options.methods:
        for label, settings in preset["rows"].items():
            ablation = AblationConfig(**settings.get("ablation", {}))
            configs[label] = replace(base, **(settings | {"ablation": ablation}))
    else:
        methods = options.methods or [name for name in METHOD_NAMES if name not in SPARSE_NAMES]
        for name in methods:
            configs[name] = replace(base, method=name)
    # Cases on one host, which are the same for all numbers of hosts, come first and once.
    cases_alone: list[Case] = []
    cases_on_several: list[Case] = []
    for num_hosts in numbers_of_hosts:
        for label, config in configs.items():
            if METHODS[config.method].facts.splits:
                case = Case(label, config, num_hosts)
                same_kind = cases_on_several
            else:
                case = Case(label, config)
                same_kind = cases_alone
            if case not in same_kind:
                same_kind.append(case)
    return workloads, cases_alone + cases_on_several


def records(
    options: argparse.Namespace,
    bench: Bench,
    workload: Workload,
    cases: list[Case],
    measured: list[list[dict]],
) -> Iterator[dict]:
    """Yield one record per case of a workload.

    Speedups are ratios of medians within the same run.

    Args:
        measured: each case's figures, by round.
    """
    medians = {}
    for case, samples in zip(cases, measured, strict=True):
        times = [sample["ttft_ms"] for sample in samples]
        medians[case.label, case.hosts] = statistics.median(times)
    for case, samples in zip(cases, measured, strict=True):
        last = samples[-1]
        ttft_ms = [sample["ttft_ms"] for sample in samples]
        ttft = percentiles(ttft_ms)
        simulated = bench.simulated and case.hosts > 1
        # A case on one host has the threads of all hosts.
        threads = bench.threads
        if case.hosts == 1:
            threads *= bench.hosts.size
        stages_ms = {}
        for name in last["stages_ms"]:
            stages_ms[name] = statistics.median(sample["stages_ms"][name] for sample in samples)
        speedups = {}
        for name in BASELINES:
            baseline_ms = medians.get((name, case.hosts), medians.get((name, 1)))
            speedup = None if baseline_ms is None else baseline_ms / ttft["p50"]
            speedups[f"speedup_vs_{name}"] = speedup
        yield {
            "benchmark": "throughput",
            **fields_of(options, "preset", "model", "warmup"),
            **fields_of(case, "label", "hosts"),
            "simulated": simulated,
            "network": {"link": asdict(bench.network)} if simulated else None,
            "threads_per_host": threads,
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
                "comm_bytes",
            ),
            "importance": case.config.importance,
            **fields_of(case.config.ablation, *SWITCHES),
            "ttft_ms": ttft,
            "request_throughput": 1e3 / ttft["p50"],
            "stages_ms": stages_ms,
            # On a GPU: whichever is more sets the pace, the CPU that launches or the GPU.
            "busy_ms": last.get("busy_ms"),
            # Simulated hosts share one process's memory, which does not tell what each of them
            # would need.
            "peak_memory_bytes": None if simulated else last["peak_memory_bytes"],
            **speedups,
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
    runs_of_each = options.warmup + options.rounds
    if options.profile is not None:
        runs_of_each += 1
    bench = Bench(options, hosts, len(workloads) * len(cases) * runs_of_each)
    for workload in workloads:
        measured = measure(bench, workload, cases, options.rounds, options.warmup)
        if options.profile is not None:
            write_profiles(options.profile, bench, workload, cases)
        if hosts.rank == 0:
            yield from records(options, bench, workload, cases, measured)


def write_profiles(folder: Path, bench: Bench, workload: Workload, cases: list[Case]) -> None:
    """Run every case once more, and write and show what host 0 did.

    Of simulated hosts it is what all of them did.
    """
    job = bench.prepare(workload)
    length = workload.tokens or f"{workload.frames}x{workload.height}p"
    for case in cases:
        with bench.hosts.collective_stage("profiling"):
            if bench.hosts.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{case.label}-{case.hosts}-{length}.json".replace(" ", "_")
                kernels = write_trace(path, partial(bench.run, case, job))
                print(f"{path}:\n\n{kernels}\n", flush=True)
            else:
                bench.run(case, job)


# Of a stage's name in a trace, as StageTimer gives it.
_PREFIX = "apbv."
# Categories of a trace's events.
_ON_CPU = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# A row of small ones.
_OTHERS = "others"


def write_trace(path: Path, run: Callable[[], object]) -> str:
    """Run a function, write its trace in the Trace Event Format, and return a table of its kernels.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Simulated hosts, and those who read and encode a video, are threads that begin inside.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        run()
    try:
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write the trace {path}: {error}") from error
    return kernel_table(trace["traceEvents"])


def kernel_table(events: Iterable[dict], least: float = 0.002) -> str:
    """Format the kernels of a trace by stage; without a GPU torch's operators.

    An operator's time is without that of the operators that it calls.

    Args:
        events: of a trace by torch's profiler.
        least: what takes a smaller share of the whole time is in one row with others of its stage.
    """
    events = [event for event in events if event.get("ph") == "X"]
    cpu_events = [event for event in events if event["cat"] in _ON_CPU]
    gpu_events = [event for event in events if event["cat"] in _ON_GPU]
    stage_of_launch, operators = _on_cpu(cpu_events)

    # The microseconds of all calls, by stage and name.
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    if gpu_events:
        for event in gpu_events:
            stage = stage_of_launch.get(event["args"].get("correlation"), "outside")
            calls[stage, event["name"]].append(event["dur"])
    else:
        for operator in operators:
            calls[operator.stage, operator.name].append(operator.own_time)
    total = sum(sum(times) for times in calls.values())

    # The same with small ones together, by stage and by name.
    calls_of_stage: dict[str, dict[str, list[float]]] = {}
    for (stage, name), times in calls.items():
        title = f"`{name[:80]}`" if sum(times) >= least * total else _OTHERS
        calls_of_stage.setdefault(stage, {}).setdefault(title, []).extend(times)

    rows = []
    for stage, calls_of_title in calls_of_stage.items():
        for title in sorted(calls_of_title, key=partial(_place_in_table, calls_of_title)):
            times = calls_of_title[title]
            ms = sum(times) / 1e3
            share = 100 * sum(times) / total
            rows.append([stage, title, len(times), f"{ms:.2f}", f"{share:.1f}%"])
    kind = "kernel" if gpu_events else "operator"
    return markdown_table(["stage", kind, "calls", "ms", "share"], rows)


def _place_in_table(calls_of_title: dict[str, list[float]], title: str) -> tuple[bool, float]:
    """Return by what a stage's rows are sorted: the longest first, and the others last."""
    return title == _OTHERS, -sum(calls_of_title[title])


@dataclass
class _CpuEvent:
    """An event on a CPU's thread, in microseconds.

    Attributes:
        own_time: without that of the operators inside.
    """

    stage: str
    name: str
    end: float
    own_time: float


def _on_cpu(events: list[dict]) -> tuple[dict[int, str], list[_CpuEvent]]:
    """Return the stage of every launch by its number, and all operators."""
    stage_of_launch = {}
    operators = []
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for events_of_thread in threads.values():
        # By beginning; an event before those inside it.
        events_of_thread.sort(key=_beginning)
        # The events around the next one, the innermost last.
        around: list[_CpuEvent] = []
        for event in events_of_thread:
            while around and around[-1].end <= event["ts"]:
                around.pop()
            stage = around[-1].stage if around else "outside"
            if event["cat"] == "user_annotation" and event["name"].startswith(_PREFIX):
                stage = event["name"].removeprefix(_PREFIX)
            end = event["ts"] + event["dur"]
            cpu_event = _CpuEvent(stage, event["name"], end, event["dur"])
            if event["cat"] == "cpu_op":
                operators.append(cpu_event)
                if around:
                    around[-1].own_time -= event["dur"]
            elif event["cat"].startswith("cuda"):
                stage_of_launch[event["args"].get("correlation")] = stage
            around.append(cpu_event)
    return stage_of_launch, operators


def _beginning(event: dict) -> tuple[float, float]:
    return event["ts"], -event["dur"]


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measured_records, columns_of("throughput"))


if __name__ == "__main__":
    sys.exit(main())
