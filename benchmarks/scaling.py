"""What more hosts than there are would do: simulated hosts, and a cost model of arithmetic, bytes and memory.

    python benchmarks/scaling.py plan --model qwen2.5-vl-3b --frames 64 --resolution 1440p --machine a800 --explain
    python benchmarks/scaling.py plan --tokens 32768 131072 1048576 --hosts 2 8 64 --plot growth.png
    python benchmarks/scaling.py simulate --tokens 131072 --hosts 8 --json scaling.jsonl
    python benchmarks/scaling.py check --tokens 8192 --hosts 2

plan      computes; nothing runs. Any Hugging Face config, any number of tokens and hosts.
simulate  really computes every host's share, one after the other (apbv.hosts.simulated), several times, and sets
          the speed-up over full attention at each host's mean pace beside what the cost model says: by arithmetic
          alone, and by the rates measured here.
check     how far simulated hosts are from real ones: both on one thread per host, in turn, in one run.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import throughput
import torch
from cost_model import Machine, Shape, Video, cost, explain, flop_ratio, predict
from figures import import_pyplot, legend_beside, mark_factors, mark_values, save, short
from presets import Case
from tqdm import tqdm
from transformers import AutoConfig
from workloads import CONFIGS, PREFIX_LEN, RESOLUTIONS, patch_grid

from apbv import HostGroup, PrefillConfig
from apbv.hosts.simulated import Link, Network
from apbv.kernels import segmented_attention
from apbv.layout import ContextLayout
from apbv.prefilling.methods import METHODS
from apbv.stats import append_json_lines, device_name, markdown_table, provenance

# Peak dense bf16 arithmetic, of which large matrix products are taken to reach 70 % and attention 50 %; memory
# bandwidth; what a GPU receives over NVLink. The shares are assumptions, to be replaced by --matmul-tflops and
# --attention-tflops where they have been measured.
MACHINES = {
    "a800": Machine(0.7 * 312e12, 0.5 * 312e12, 1.555e12, 200e9, 10e-6),
    "h200": Machine(0.7 * 989e12, 0.5 * 989e12, 4.8e12, 450e9, 10e-6),
}


def shape_of(model: str, bytes_per_number: int) -> Shape:
    """The shape of a built-in configuration, or of any checkpoint's.

    Raises:
        ValueError: there is no such model, or the cost model does not know its kind.
    """
    try:
        return Shape.from_config(CONFIGS.get(model) or AutoConfig.from_pretrained(model), bytes_per_number)
    except OSError as error:
        raise ValueError(f"cannot load the configuration of {model}: {error}") from error


def prompt_of(options: argparse.Namespace, num_tokens: int | None) -> tuple[int, int, int, Video | None]:
    """(n, where the context starts, where the query starts, the video if there is one)."""
    if num_tokens is not None:
        return num_tokens, 0, num_tokens - options.query_len, None
    frames, down, across = patch_grid(options.frames, *throughput.parse_resolution(options.resolution))
    start = PREFIX_LEN + 1
    visual = range(start, start + frames * down * across // 4)
    return visual.stop + 1 + options.query_len, start, visual.stop, Video(visual, frames)


def layout_of(method: str, hosts: int, prompt: tuple, config: PrefillConfig) -> ContextLayout:
    """What the method plans for a prompt on so many hosts."""
    return METHODS[method].plan(hosts, *prompt[:3], config)


def calibrate(shape: Shape, num_tokens: int, dtype: torch.dtype) -> Machine:
    """Rates of this machine at a decoder's own shapes: FLOPs per second of its products and of its attention."""

    def seconds(run, rounds: int = 3) -> float:
        run()
        began = time.perf_counter()
        for _ in range(rounds):
            run()
        return (time.perf_counter() - began) / rounds

    rows = min(num_tokens, 4096)
    hidden, weight = torch.randn(rows, shape.hidden, dtype=dtype), torch.randn(shape.intermediate, shape.hidden)
    weight = weight.to(dtype)
    matmul = 2 * rows * weight.numel() / seconds(lambda: torch.nn.functional.linear(hidden, weight))
    q, k = (torch.randn(1, heads, rows, shape.head_dim, dtype=dtype) for heads in (shape.heads, shape.kv_heads))
    pairs = shape.heads * rows * rows
    attention = 4 * shape.head_dim * pairs / seconds(lambda: segmented_attention(q, [(k, k)], 0.1, False))
    block = torch.randn(2**24)
    return Machine(matmul, attention, 2 * block.nbytes / seconds(lambda: block.clone()), float("inf"))


# ---- plan ----


def plan(options: argparse.Namespace) -> list[dict]:
    shape = shape_of(options.model, options.bytes_per_number)
    machine = MACHINES[options.machine]
    machine = replace(
        machine,
        matmul_flops=(options.matmul_tflops or machine.matmul_flops / 1e12) * 1e12,
        attention_flops=(options.attention_tflops or machine.attention_flops / 1e12) * 1e12,
        group_size=options.group_size,
        group_link_bytes=options.group_bandwidth,
    )
    records = []
    for num_tokens in options.tokens or [None]:
        prompt = prompt_of(options, num_tokens)
        video = prompt[3]
        alone = cost(shape, "full", layout_of("full", 1, prompt, PrefillConfig()), video=video)
        full_seconds = predict(alone, machine).total_seconds
        for hosts, method in _runs(options):
            config = PrefillConfig(method=method, anchor_len=options.anchor_len, passing_len=options.passing_len)
            layout = layout_of(method, hosts, prompt, config)
            costs = cost(shape, method, layout, video=video)
            times = predict(costs, machine)
            if options.explain:
                print(explain(shape, method, layout, machine, video=video), end="\n\n")
            records.append(
                {
                    "benchmark": "scaling",
                    "kind": "plan",
                    "model": options.model,
                    "machine": {"name": options.machine, **_finite(asdict(machine))},
                    "method": method,
                    "hosts": hosts,
                    "num_input_tokens": prompt[0],
                    "anchor_len": len(layout.anchor),
                    "passing_len": layout.passing_len,
                    "flop_ratio": flop_ratio(alone, costs),
                    "floor_ms": times.floor_seconds * 1e3,
                    "total_ms": times.total_seconds * 1e3,
                    "speedup_vs_full": full_seconds / times.floor_seconds,
                    "received_bytes": max(sum(host.received.values()) for host in costs),
                    "kv_bytes": max(host.kv_bytes for host in costs),
                    "weight_bytes": costs[0].weight_bytes,
                    **provenance(),
                }
            )
    header = ["tokens", "hosts", "method", "FLOP ratio", "floor ms", "no overlap ms", "speed-up", "MB received"]
    print(markdown_table([*header, "KV MB / host"], [_plan_row(record) for record in records]))
    if options.plot:
        plot_plan(records, options.plot)
    return records


def _runs(options: argparse.Namespace) -> list[tuple[int, str]]:
    """(hosts, method); full attention is one host's, and the same whatever the others are."""
    split = [(hosts, method) for hosts in options.hosts for method in options.methods if method != "full"]
    return ([(1, "full")] if "full" in options.methods else []) + split


def _plan_row(record: dict) -> list:
    numbers = [f"{record[name]:.2f}" for name in ("flop_ratio", "floor_ms", "total_ms", "speedup_vs_full")]
    sizes = [f"{record[name] / 1e6:.1f}" for name in ("received_bytes", "kv_bytes")]
    return [record["num_input_tokens"], record["hosts"], record["method"], *numbers, *sizes]


def plot_plan(records: list[dict], path: Path) -> None:
    """Speed-up over the tokens with the most hosts, and over the hosts with the most tokens."""
    figure, panels = import_pyplot().subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, x, fixed in ((panels[0], "num_input_tokens", "hosts"), (panels[1], "hosts", "num_input_tokens")):
        most = max(record[fixed] for record in records)
        for method in dict.fromkeys(record["method"] for record in records if record["method"] != "full"):
            points = [r for r in records if r["method"] == method and r[fixed] == most]
            axes.plot([r[x] for r in points], [r["speedup_vs_full"] for r in points], marker="o", label=method)
        mark_values(axes.xaxis, (record[x] for record in records if record["method"] != "full"))
        mark_factors(axes.yaxis)
        names = {"num_input_tokens": "tokens", "hosts": "hosts"}
        axes.set_xlabel(f"{names[x]}, with {short(most)} {names[fixed]}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("predicted speed-up over `full` on one host")
    legend_beside(panels[1])
    figure.suptitle(f"{records[0]['model']} on {records[0]['machine']['name']} (cost model, perfect overlap)")
    save(figure, path)


# ---- simulate ----


def simulate(options: argparse.Namespace) -> list[dict]:
    """Measured on simulated hosts, beside the cost model."""
    options.seed = 0
    hosts = HostGroup.single()
    bench = throughput.Bench(options, hosts)
    shape = shape_of(options.model, bench.model.dtype.itemsize)
    network = Network(Link(options.bandwidth, options.latency))
    records = []
    ways = len(options.hosts) * len(options.methods)
    runs = len(options.tokens) * (options.full_rounds + ways * (options.rounds + 1))
    # The first forward pass pays for what is set up once.
    bench.run(Case("full", PrefillConfig(method="full"), 1, None), bench.prepare(throughput.Workload(tokens=2048)))
    with tqdm(total=runs, unit="prefill", disable=None) as bar:
        for num_tokens in options.tokens:
            job = bench.prepare(throughput.Workload(tokens=num_tokens))
            full = Case("full", PrefillConfig(method="full"), 1, None)
            full_ms = [_run(bench, full, job, bar)["stages_ms"]["prefill"] for _ in range(options.full_rounds)]
            machine = calibrate(shape, num_tokens, bench.model.dtype)
            prompt = prompt_of(options, num_tokens)
            alone = cost(shape, "full", layout_of("full", 1, prompt, PrefillConfig()))
            for number, method in itertools.product(options.hosts, options.methods):
                lengths = {"anchor_len": options.anchor_len, "passing_len": options.passing_len}
                case = Case(method, PrefillConfig(method=method, **lengths), number, network)
                samples = [_run(bench, case, job, bar) for _ in range(options.rounds)]
                # On a noisy machine the slowest host before an exchange is mostly the unluckiest one: once more,
                # at each host's mean pace.
                paces = [_mean_pace(laps) for laps in zip(*(sample["laps"] for sample in samples), strict=True)]
                run = _run(bench, case, job, bar, paces)
                costs = cost(shape, method, layout_of(method, number, prompt, case.config))
                path_ms = run["stages_ms"]["prefill"]
                speedup = statistics.mean(full_ms) / path_ms
                ratio = flop_ratio(alone, costs)
                by_rates = predict(alone, machine).total_seconds / predict(costs, machine).total_seconds
                records.append(
                    {
                        "benchmark": "scaling",
                        "kind": "simulate",
                        "simulated": True,
                        "model": options.model,
                        "method": method,
                        "hosts": number,
                        "threads_per_host": bench.threads,
                        "network": throughput.network_fields(network),
                        "num_input_tokens": num_tokens,
                        "anchor_len": run["anchor_len"],
                        "passing_len": run["passing_len"],
                        "full_ms": full_ms,
                        "critical_path_ms": path_ms,
                        "noisy_critical_path_ms": [sample["stages_ms"]["prefill"] for sample in samples],
                        "speedup_vs_full": speedup,
                        "flop_ratio": ratio,
                        "rate_ratio": by_rates,
                        "share_of_flop_ratio": speedup / ratio,
                        "gflops": {
                            "matmul": machine.matmul_flops / 1e9,
                            "attention": machine.attention_flops / 1e9,
                            "full": alone[0].total_flops / statistics.mean(full_ms) / 1e6,
                            "critical_path": max(c.total_flops for c in costs) / path_ms / 1e6,
                        },
                        "device": device_name(hosts.device),
                        **provenance(),
                    }
                )
    header = ["tokens", "hosts", "method", "full s", "critical path s", "speed-up", "FLOP ratio", "share of it"]
    header += ["ratio by rates", "GFLOP/s full", "GFLOP/s path"]
    print(markdown_table(header, [_simulated_row(record) for record in records]))
    return records


def _run(bench: throughput.Bench, case: Case, job, bar: tqdm, paces=None) -> dict:
    bar.set_postfix_str(f"{case.label}, {case.hosts} hosts", refresh=True)
    run = bench.run(case, job, paces)
    bar.update()
    return run


def _mean_pace(laps: Sequence[Sequence[float]]) -> list[float]:
    """The mean over a host's runs of every stretch of computing."""
    return [statistics.mean(stretch) for stretch in zip(*laps, strict=True)]


def _simulated_row(record: dict) -> list:
    times = [f"{ms / 1e3:.2f}" for ms in (statistics.mean(record["full_ms"]), record["critical_path_ms"])]
    names = ("speedup_vs_full", "flop_ratio", "share_of_flop_ratio", "rate_ratio")
    rates = [f"{record['gflops'][name]:.0f}" for name in ("full", "critical_path")]
    head = [record["num_input_tokens"], record["hosts"], record["method"]]
    return [*head, *times, *(f"{record[name]:.2f}" for name in names), *rates]


# ---- check ----


def check(options: argparse.Namespace) -> list[dict]:
    """The same prefills on real and on simulated hosts, one thread each, in turn."""
    script = str(Path(throughput.__file__))
    launch = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    records = []
    for num_tokens in options.tokens:
        for number in options.hosts:
            wanted = ["--model", options.model, "--tokens", str(num_tokens), "--methods", *options.methods]
            wanted += ["--rounds", "1", "--query-len", str(options.query_len)]
            kinds = {
                "real": [*launch, "--nproc-per-node", str(number), script],
                # Between processes of one machine data moves at about the speed of its memory.
                "simulated": [script, "--hosts", str(number), "--bandwidth", str(options.bandwidth)],
            }
            times: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
            for _ in range(options.rounds):
                for kind, command in kinds.items():
                    for row in _run_one_thread([*command, *wanted]):
                        times[kind].setdefault(row["label"], []).append(row["stages_ms"]["prefill"])
            for method in options.methods:
                real, simulated = (times[kind][method] for kind in ("real", "simulated"))
                records.append(
                    {
                        "benchmark": "scaling",
                        "kind": "check",
                        "model": options.model,
                        "method": method,
                        "hosts": number,
                        "num_input_tokens": num_tokens,
                        "real_ms": real,
                        "simulated_ms": simulated,
                        "error": statistics.median(simulated) / statistics.median(real) - 1,
                        **provenance(),
                    }
                )
    header = ["tokens", "hosts", "method", "real s", "simulated s", "error"]
    rows = [
        [r["num_input_tokens"], r["hosts"], r["method"]]
        + [f"{statistics.median(r[name]) / 1e3:.2f}" for name in ("real_ms", "simulated_ms")]
        + [f"{r['error']:+.1%}"]
        for r in records
    ]
    print(markdown_table(header, rows))
    return records


def _run_one_thread(command: list[str]) -> list[dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as figures:
        command = [sys.executable, *command, "--json", figures.name]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{result.stderr}")
        return [json.loads(line) for line in figures]


def _finite(fields: dict) -> dict:
    return {name: None if value == float("inf") else value for name, value in fields.items()}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="kind", required=True)
    exact = list(METHODS)

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--query-len", type=int, default=32, help="tokens of the question")
    shared.add_argument("--anchor-len", type=int)
    shared.add_argument("--passing-len", type=int)
    shared.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")

    command = commands.add_parser("plan", parents=[shared], help="the cost model")
    command.add_argument("--model", default="qwen2.5-vl-3b", help=f"{', '.join(CONFIGS)}, a folder or a hub id")
    command.add_argument("--tokens", type=int, nargs="+", help="lengths of a text prompt")
    command.add_argument("--frames", type=int, default=64, help="of a video prompt, where no --tokens are given")
    command.add_argument("--resolution", default="720p", help=f"HxW, or {', '.join(RESOLUTIONS)}")
    command.add_argument("--hosts", type=int, nargs="+", default=[8])
    command.add_argument("--methods", nargs="+", choices=exact, default=exact)
    command.add_argument("--machine", choices=sorted(MACHINES), default="a800")
    command.add_argument("--matmul-tflops", type=float, help="measured instead of assumed")
    command.add_argument("--attention-tflops", type=float)
    command.add_argument("--group-size", type=int, help="hosts joined by the fast link")
    command.add_argument("--group-bandwidth", type=float, default=25e9, help="bytes per second between groups")
    command.add_argument("--bytes-per-number", type=int, default=2)
    command.add_argument("--explain", action="store_true", help="where the time of each must go")
    command.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")

    for kind, run in (("simulate", "simulated hosts"), ("check", "simulated against real hosts")):
        command = commands.add_parser(kind, parents=[shared], help=run)
        command.add_argument("--model", default="llama-small", help="text models only")
        command.add_argument("--tokens", type=int, nargs="+", default=[32768 if kind == "simulate" else 8192])
        command.add_argument("--hosts", type=int, nargs="+", default=[8 if kind == "simulate" else 2])
        command.add_argument("--methods", nargs="+", choices=exact[1:], default=["apbv"])
        command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
        # NVLink's, or for the check what one process copies out of another's memory.
        command.add_argument("--bandwidth", type=float, default=200e9 if kind == "simulate" else 5e9)
        command.add_argument("--latency", type=float, default=10e-6)
        command.add_argument("--rounds", type=int, default=3)
        if kind == "simulate":
            command.add_argument("--full-rounds", type=int, default=1, help="of full attention, which takes long")
    options = parser.parse_args(arguments)
    if min(getattr(options, "rounds", 1), getattr(options, "full_rounds", 1)) < 1:
        parser.error("--rounds and --full-rounds must be at least 1")
    if options.kind != "plan" and min(options.hosts) < 2:
        parser.error("--hosts must be at least 2: full attention on one host is what they are compared with")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        records = {"plan": plan, "simulate": simulate, "check": check}[options.kind](options)
        if options.json:
            append_json_lines(options.json, records)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
