"""Time to the first token with every way to prefill, side by side in one run.

    torchrun --nproc-per-node 2 benchmarks/throughput.py --model llama-small --tokens 32768
    torchrun --nproc-per-node 8 benchmarks/throughput.py --preset table5 --json table5.jsonl --plot table5.png
    python benchmarks/throughput.py --preset table5               (no torchrun: the hosts are simulated)
    python benchmarks/throughput.py --model demo --video clip.mp4 --frames 128 --hosts 4

All methods do the same work outside attention: the same vision encoding, logits of the last token only, and the
KV stays where it was computed. Rounds go through all of them in turn, so that a drift of the machine's speed hits
all. `full` is one host with the CPU threads of all hosts together; on GPUs it is one GPU. Weights are random,
unless --model is a checkpoint.

Simulated hosts (apbv.hosts.simulated) compute one after the other, each with the whole machine, and data arrives
after --latency plus size over --bandwidth. Their times are real computing on virtual
clocks, and are marked as such.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from figures import import_pyplot, legend_beside, mark_values, save
from presets import PRESETS, SWITCHES, Case
from tqdm import tqdm
from workloads import CONFIGS, RESOLUTIONS, build_model, text_prompt, video_prompt

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.allocator import keep_freed_memory, return_freed_memory
from apbv.hosts import run_on_hosts
from apbv.hosts.simulated import Link, Network, share_weights, simulate
from apbv.model.parts import inspect_model
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.stats import StageTimer, append_json_lines, device_name, markdown_table, provenance

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True)
class Workload:
    """One prompt: a text of so many tokens, or so many frames of a size; of a file or synthetic."""

    tokens: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    video: Path | None = None


@dataclass
class Measured:
    """The summaries of a case's runs, and what was run."""

    case: Case
    workload: Workload
    run: dict
    samples: list[dict] = field(default_factory=list)

    @property
    def ttft_ms(self) -> list[float]:
        return [sample["ttft_ms"] for sample in self.samples]


class Bench:
    """The model, and how to run one case on real or simulated hosts.

    Args:
        options: the command line.
        hosts: the hosts that torchrun started, or this process alone.
    """

    def __init__(self, options: argparse.Namespace, hosts: HostGroup):
        self.options, self.hosts = options, hosts
        if hosts.device.type == "cpu":
            keep_freed_memory()
        self.simulated = hosts.size == 1
        self.threads = torch.get_num_threads()
        dtype = getattr(torch, options.dtype or DTYPES[hosts.device.type])
        if options.model in CONFIGS:
            self.processor = None
            self.model = build_model(CONFIGS[options.model], dtype, hosts.device)
        else:
            engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=dtype)
            self.model, self.processor = engine.model, engine.processor
        self.twins: list = [self.model]

    def prepare(self, workload: Workload) -> Callable[[HostGroup, torch.nn.Module, PrefillConfig], dict]:
        """A function that prefills the workload once on a group and returns its figures."""
        options = self.options
        if workload.video is not None:

            def from_file(hosts, model, config):
                engine = Engine(model, self.processor, hosts, config)
                hosts.barrier()
                state = engine.prefill(options.question, video=workload.video, num_frames=workload.frames)
                return figures(state)

            return from_file
        if workload.tokens is not None:
            prompt = text_prompt(workload.tokens, options.query_len, options.seed)
        else:
            prompt = video_prompt(
                workload.frames, workload.height, workload.width, options.query_len, options.seed
            )

        def from_batch(hosts, model, config):
            parts = inspect_model(model)
            inputs = ModelInputs.from_processor(
                parts, prompt.batch, hosts, config.frame_parallel, prompt.query_start
            )
            hosts.barrier()
            return figures(prefill(model, inputs, hosts=hosts, config=config, timer=StageTimer(hosts)))

        return from_batch

    def run(self, case: Case, job, paces=None) -> dict:
        """One run of a case; the figures, on every host. ``paces``: see :func:`apbv.hosts.simulated.simulate`."""
        config = replace(case.config, kv="sharded")
        if self.hosts.device.type == "cpu" and not self.simulated:
            return_freed_memory()  # peak memory is of one run
        if case.hosts == 1:
            return self._run_alone(config, job)
        if not self.simulated:
            return job(self.hosts, self.model, config)
        while len(self.twins) < case.hosts:
            self.twins.append(share_weights(self.model))
        device = self.hosts.device

        def host_job(hosts):
            summary = job(hosts, self.twins[hosts.rank], config)
            return summary, hosts.laps

        made = simulate(case.hosts, host_job, network=case.network, device=device, paces=paces)
        summaries, laps = zip(*made, strict=True)
        return {**summaries[0], "laps": laps}

    def _run_alone(self, config: PrefillConfig, job) -> dict:
        """On host 0, with the CPU threads of all hosts, while the others wait."""
        result: dict = {}
        if self.hosts.rank == 0:
            torch.set_num_threads(self.threads * self.hosts.size)
            try:
                result = job(HostGroup.single(self.hosts.device), self.model, config)
            finally:
                torch.set_num_threads(self.threads)
        self.hosts.barrier()
        return result


def figures(state) -> dict:
    """What a run took, and what it really was."""
    layout = state.layout
    return {
        **state.timer.summary(),
        "method": state.method,
        "num_input_tokens": state.num_tokens,
        "num_video_tokens": state.inputs.num_visual_tokens,
        "anchor_len": len(layout.anchor),
        "passing_len": layout.passing_len,
    }


def measure(bench: Bench, workload: Workload, cases: list[Case], bar: tqdm) -> list[Measured]:
    """All cases of a workload, in turn, round after round."""
    job = bench.prepare(workload)
    measured = [Measured(case, workload, {}) for case in cases]
    for index in range(bench.options.warmup + bench.options.rounds):
        for entry in measured:
            bar.set_postfix_str(f"{entry.case.label}, {entry.case.hosts} hosts", refresh=True)
            summary = bench.run(entry.case, job)
            bar.update()
            if index >= bench.options.warmup and summary:
                entry.run = summary
                entry.samples.append(summary)
    return measured


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p90 and p99, interpolated."""
    if len(samples) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), samples[0])
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {f"p{share}": cuts[share - 1] for share in (50, 90, 99)}


def records(bench: Bench, measured: list[Measured]) -> Iterator[dict]:
    """One JSON-ready record per case of a workload; speed-ups are ratios within the same run."""
    options = bench.options
    median = {id(entry): statistics.median(entry.ttft_ms) for entry in measured}

    def speedup(entry: Measured, baseline: str) -> float | None:
        """By the median time; an own baseline on as many hosts, or on one."""
        for other in measured:
            same_hosts = other.case.hosts in (entry.case.hosts, 1) and other.case.network in (
                entry.case.network,
                None,
            )
            if other.case.config.method == baseline and same_hosts:
                return median[id(other)] / median[id(entry)]
        return None

    for entry in measured:
        case, run = entry.case, entry.run
        simulated = bench.simulated and case.hosts > 1
        stages = {
            name: statistics.median(sample["stages_ms"][name] for sample in entry.samples)
            for name in run["stages_ms"]
        }
        ttft = percentiles(entry.ttft_ms)
        yield {
            "benchmark": "throughput",
            "preset": options.preset,
            "label": case.label,
            "method": run["method"],
            "hosts": case.hosts,
            "simulated": simulated,
            "network": network_fields(case.network) if simulated else None,
            "threads_per_host": bench.threads * (bench.hosts.size if case.hosts == 1 else 1),
            "model": options.model,
            "dtype": str(bench.model.dtype).removeprefix("torch."),
            "device": device_name(bench.hosts.device),
            "frames": entry.workload.frames,
            "height": entry.workload.height,
            "width": entry.workload.width,
            "num_input_tokens": run["num_input_tokens"],
            "num_video_tokens": run["num_video_tokens"],
            "anchor_len": run["anchor_len"],
            "passing_len": run["passing_len"],
            "importance": case.config.importance,
            **{switch: getattr(case.config, switch) for switch in SWITCHES.values()},
            "ttft_ms": ttft,
            "request_throughput": 1e3 / ttft["p50"],
            "stages_ms": stages,
            "comm_bytes": run["comm_bytes"],
            # Simulated hosts share one process's memory: what each would need cannot be read off it.
            "peak_memory_bytes": None if simulated else run["peak_memory_bytes"],
            "speedup_vs_full": speedup(entry, "full"),
            "speedup_vs_zigzag_ring": speedup(entry, "zigzag_ring"),
            "samples": {"ttft_ms": entry.ttft_ms},
            "warmup": options.warmup,
            "seed": options.seed,
            "command": " ".join(["benchmarks/throughput.py", *sys.argv[1:]]),
            **provenance(),
        }


def network_fields(network: Network) -> dict:
    """A network for JSON, where an infinite bandwidth is null."""
    fields = asdict(network)
    for name in ("link", "between_groups"):
        if fields[name]["bandwidth"] == float("inf"):
            fields[name]["bandwidth"] = None
    return fields


def table(rows: list[dict]) -> str:
    """The figures for people, as Markdown."""
    header = ["tokens", "hosts", "method", "l_a", "l_p", "TTFT p50 ms", "p99 ms", "req/s", "vs full", "vs ring"]
    header += ["encode ms", "prefill ms", "MiB received"]
    lines = []
    for row in rows:
        ratios = [row["speedup_vs_full"], row["speedup_vs_zigzag_ring"]]
        cells = [row["num_input_tokens"], f"{row['hosts']}{' (simulated)' if row['simulated'] else ''}"]
        cells += [row["label"], row["anchor_len"], row["passing_len"]]
        cells += [f"{row['ttft_ms'][name]:.1f}" for name in ("p50", "p99")]
        cells += [f"{row['request_throughput']:.3f}", *("–" if r is None else f"{r:.2f}" for r in ratios)]
        cells += [f"{row['stages_ms'][name]:.1f}" for name in ("encode", "prefill")]
        cells.append(f"{sum(row['comm_bytes']) / 2**20:.1f}")
        lines.append(cells)
    return markdown_table(header, lines)


def plot(rows: list[dict], path: Path) -> None:
    """Speed-up against full attention (requests per second where it was not run), over what varies."""
    varying = [name for name in ("num_input_tokens", "hosts", "passing_len", "anchor_len")]
    x = next((name for name in varying if len({row[name] for row in rows if row["hosts"] > 1}) > 1), varying[0])
    y = "speedup_vs_full" if all(row["speedup_vs_full"] for row in rows) else "request_throughput"
    figure, axes = import_pyplot().subplots(figsize=(7, 4.5))
    lines: dict[tuple[str, int | None], list[dict]] = {}
    several = len({row["hosts"] for row in rows if row["hosts"] > 1}) > 1
    for row in rows:
        hosts = row["hosts"] if several and x != "hosts" else None
        lines.setdefault((row["label"], hosts), []).append(row)
    # A way has its colour, a number of hosts its kind of line.
    labels = list(dict.fromkeys(label for label, _ in lines))
    numbers = sorted({hosts for _, hosts in lines if hosts is not None}, reverse=True)
    for (label, hosts), points in lines.items():
        points = sorted(points, key=lambda row: row[x])
        axes.plot(
            [row[x] for row in points],
            [row[y] for row in points],
            ("-", "--", "-.", ":")[numbers.index(hosts) % 4 if hosts else 0],
            color=f"C{labels.index(label)}",
            marker="o",
            label=f"{label}, {hosts} host{'s' if hosts > 1 else ''}" if hosts else label,
        )
    mark_values(axes.xaxis, (row[x] for row in rows))
    axes.set_xlabel(x.removeprefix("num_").replace("_", " "))
    axes.set_ylabel("speed-up over full attention" if y.startswith("speedup") else "requests per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    simulated = " (simulated hosts)" if any(row["simulated"] for row in rows) else ""
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}{simulated}")
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="a sweep of the paper; other options override it"
    )
    parser.add_argument("--model", help=f"{', '.join(CONFIGS)} (random weights), demo, a folder or a hub id")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--hosts", type=int, nargs="+", help="numbers of simulated hosts (not under torchrun)")
    what = parser.add_argument_group("prompts")
    what.add_argument("--tokens", type=int, nargs="+", help="lengths of a text prompt")
    what.add_argument("--frames", type=int, nargs="+", help="numbers of frames")
    what.add_argument("--resolutions", nargs="+", help=f"HxW, or {', '.join(RESOLUTIONS)}")
    what.add_argument("--video", type=Path, help="a file instead of synthetic frames; --model is a checkpoint")
    what.add_argument("--question", default="What happens in this video?", help="asked about --video")
    what.add_argument("--query-len", type=int, default=32, help="tokens of the question otherwise")
    what.add_argument("--seed", type=int, default=0)
    how = parser.add_argument_group("prefill")
    how.add_argument("--anchor-len", type=int, nargs="+")
    how.add_argument("--passing-len", type=int, nargs="+")
    how.add_argument("--importance", choices=sorted(IMPORTANCE), default=PrefillConfig().importance)
    how.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    net = parser.add_argument_group("network of simulated hosts")
    net.add_argument("--bandwidth", type=float, default=200e9, help="bytes per second (default NVLink's: 200e9)")
    net.add_argument("--latency", type=float, default=10e-6, help="seconds")
    run = parser.add_argument_group("measuring")
    run.add_argument("--rounds", type=int, default=3)
    # The others wait while host 0 runs `full`.
    run.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait for another host")
    run.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    run.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")
    run.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 0:
        parser.error("--rounds must be at least 1, --warmup at least 0")
    if options.video and not options.model:
        parser.error("--video needs --model: a checkpoint, or demo")
    return options


def parse_resolution(text: str) -> tuple[int, int]:
    """(height, width) of "720p" or "720x1280".

    Raises:
        ValueError: it is neither.
    """
    if text in RESOLUTIONS:
        return RESOLUTIONS[text]
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(f"{text!r} is no resolution: write HxW, or one of {', '.join(RESOLUTIONS)}")
    return int(height), int(width)


def plan(options: argparse.Namespace, hosts: HostGroup) -> tuple[list[Workload], list[Case]]:
    """The prompts, and what is run on each of them.

    Raises:
        ValueError: options contradict one another.
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
            for method in options.methods or METHODS
        ]
    cases = [*_with_lengths(cases, options)]
    full = [Case("full", replace(base, method="full"), 1, None)] if any(c.label == "full" for c in cases) else []
    return workloads, full + [case for case in cases if case.label != "full"]


def _with_lengths(cases: list[Case], options: argparse.Namespace) -> Iterator[Case]:
    """The cases with every anchor and passing length that was asked for, where they matter."""
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
    """Measure, and print or write what came of it."""
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
    if hosts.rank == 0:
        print(table(rows))
        if options.json:
            append_json_lines(options.json, rows)
        if options.plot:
            plot(rows, options.plot)


if __name__ == "__main__":
    sys.exit(main())
