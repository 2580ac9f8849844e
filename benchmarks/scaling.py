"""Study more hosts than there are, by simulated hosts and by a cost model of arithmetic, bytes and memory.

    python benchmarks/scaling.py plan --model qwen2.5-vl-3b --frames 64 --resolution 1440p --machine a800 --explain
    python benchmarks/scaling.py plan --tokens 32768 131072 1048576 --hosts 2 8 64 --plot growth.png
    python benchmarks/scaling.py simulate --tokens 131072 --hosts 8 --json scaling.jsonl
    python benchmarks/scaling.py check --tokens 8192 --hosts 2

plan      evaluates the cost model for any Hugging Face config and any number of tokens and hosts.
simulate  computes every host's share, one after the other (apbv.hosts.simulated), several times, and compares the
          speed-up over full attention at each host's mean pace with the cost model's: by arithmetic alone, and by
          the rates measured here.
check     measures how far simulated hosts are from real ones, on one thread per host, in turn, in one run.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv import HostGroup, PrefillConfig
from apbv.hosts.simulated import Link, Network
from apbv.input.video_size import RESOLUTIONS
from apbv.kernels import segmented_attention
from apbv.launch.reduction import add_reduce_options
from apbv.stats import append_json_lines, device_name, markdown_table, provenance

from support.arguments import DTYPES, add_json_option, add_plot_option
from support.cost_model.costs import METHODS, Shape, cost, flop_ratio
from support.cost_model.plan import MACHINES, layout_of, plan, prompt_of, shape_of
from support.cost_model.times import Machine, predict
from support.prefills.bench import Bench, Workload
from support.prefills.presets import Case
from support.prefills.report import network_fields
from support.processes import figures_of
from support.workloads import CONFIGS


def calibrate(shape: Shape, num_tokens: int, dtype: torch.dtype) -> Machine:
    """Measure the rates of this machine at a decoder's own shapes."""

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


def simulate(options: argparse.Namespace) -> list[dict]:
    """Measure every method on simulated hosts, compare with the cost model, and return the records."""
    options.seed = 0
    hosts = HostGroup.single()
    bench = Bench(options, hosts)
    shape = shape_of(options.model, bench.model.dtype.itemsize)
    network = Network(Link(options.bandwidth, options.latency))
    records = []
    ways = len(options.hosts) * len(options.methods)
    runs = len(options.tokens) * (options.full_rounds + ways * (options.rounds + 1))
    # The first forward pass also sets up what later ones reuse.
    bench.run(Case("full", PrefillConfig(method="full"), 1, None), bench.prepare(Workload(tokens=2048)))
    with tqdm(total=runs, unit="prefill", disable=None) as bar:
        for num_tokens in options.tokens:
            job = bench.prepare(Workload(tokens=num_tokens))
            full = Case("full", PrefillConfig(method="full"), 1, None)
            full_ms = [_run(bench, full, job, bar)["stages_ms"]["prefill"] for _ in range(options.full_rounds)]
            machine = calibrate(shape, num_tokens, bench.model.dtype)
            prompt = prompt_of(options, num_tokens)
            alone = cost(shape, "full", layout_of("full", 1, prompt, PrefillConfig()))
            for number, method in itertools.product(options.hosts, options.methods):
                lengths = {"anchor_len": options.anchor_len, "passing_len": options.passing_len}
                case = Case(method, PrefillConfig(method=method, **lengths), number, network)
                samples = [_run(bench, case, job, bar) for _ in range(options.rounds)]
                # On a noisy machine the slowest host before an exchange is mostly the unluckiest one, so that the
                # final run is at each host's mean pace.
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
                        "network": network_fields(network),
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


def _run(bench: Bench, case: Case, job, bar: tqdm, paces=None) -> dict:
    bar.set_postfix_str(f"{case.label}, {case.hosts} hosts", refresh=True)
    run = bench.run(case, job, paces)
    bar.update()
    return run


def _mean_pace(laps: Sequence[Sequence[float]]) -> list[float]:
    """Average every stretch of computing over a host's runs."""
    return [statistics.mean(stretch) for stretch in zip(*laps, strict=True)]


def _simulated_row(record: dict) -> list:
    times = [f"{ms / 1e3:.2f}" for ms in (statistics.mean(record["full_ms"]), record["critical_path_ms"])]
    names = ("speedup_vs_full", "flop_ratio", "share_of_flop_ratio", "rate_ratio")
    rates = [f"{record['gflops'][name]:.0f}" for name in ("full", "critical_path")]
    head = [record["num_input_tokens"], record["hosts"], record["method"]]
    return [*head, *times, *(f"{record[name]:.2f}" for name in names), *rates]


def check(options: argparse.Namespace) -> list[dict]:
    """Measure the same prefills on real and simulated hosts, one thread each, and return the records."""
    script = str(Path(__file__).with_name("throughput.py"))
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
                    run = [*command, *wanted]
                    for row in figures_of(run, " ".join(run), OMP_NUM_THREADS="1"):
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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="kind", required=True)
    exact = list(METHODS)

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--query-len", type=int, default=32, help="tokens of the question")
    shared.add_argument("--anchor-len", type=int)
    shared.add_argument("--passing-len", type=int)
    add_json_option(shared)

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
    add_reduce_options(command)
    command.add_argument(
        "--density",
        type=float,
        default=1.0,
        help="the share of attention within blocks that sparse attention computes, as measured (default 1)",
    )
    command.add_argument("--explain", action="store_true", help="where the time of each must go")
    add_plot_option(command)

    for kind, run in (("simulate", "simulated hosts"), ("check", "simulated against real hosts")):
        command = commands.add_parser(kind, parents=[shared], help=run)
        command.add_argument("--model", default="llama-small", help="text models only")
        command.add_argument("--tokens", type=int, nargs="+", default=[32768 if kind == "simulate" else 8192])
        command.add_argument("--hosts", type=int, nargs="+", default=[8 if kind == "simulate" else 2])
        command.add_argument("--methods", nargs="+", choices=exact[1:], default=["apbv"])
        command.add_argument("--dtype", choices=DTYPES)
        # Simulated hosts have NVLink; for the check one process copies from another's memory.
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
