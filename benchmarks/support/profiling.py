"""Profiles of a prefill by torch's profiler: which kernels ran in which stage, and for how long."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .records import markdown_table

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
    """Format the kernels of a trace by stage; without a GPU torch's operators, without what these call.

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
        for name, each in sorted(by_name.items(), key=lambda item: (item[0] == "others", -sum(item[1])))
    ]
    return markdown_table(["stage", "kernel" if kernels else "operator", "calls", "ms", "share"], rows)


def _on_cpu(events: list[dict]) -> tuple[dict[int, str], list[tuple[str, str, float]]]:
    """Return the stage of every launch by its number, and operators with their stage and own microseconds."""
    launched_in, operators = {}, []
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        inside: list[tuple[float, str, list]] = []  # of those around an event: end, stage, what is counted
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
