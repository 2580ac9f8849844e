"""Study more hosts than there are, by simulated hosts and by a cost model of arithmetic, bytes and memory.

    python benchmarks/scaling.py plan --model qwen2.5-vl-3b --frames 64 --resolution 1440p --explain
    python benchmarks/scaling.py plan --tokens 32768 131072 1048576 --hosts 2 8 64
    python benchmarks/scaling.py simulate --tokens 131072 --hosts 8 --json scaling.jsonl

plan      evaluates the cost model for any Hugging Face config and any number of tokens and hosts.
simulate  computes every host's share, one after the other (support.simulated), several times, and compares the
          speed-up over full attention at each host's mean pace with the cost model's ratio of arithmetic.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig

from apbv import HostGroup, PrefillConfig
from apbv.launch.options import REDUCE, add_settings, reduce_config
from apbv.planning import parse_resolution
from apbv.stats import append_json_lines, device_name, provenance

from support.arguments import DTYPES, add_json_option
from support.cost_model import METHODS, Shape, Video, cost_of_prompt, explain, flop_ratio
from support.prefills.bench import Bench, Workload
from support.prefills.presets import Case
from support.prefills.report import network_fields
from support.simulated import Link, Network
from support.tables import markdown_table
from support.workloads import CONFIGS, MERGE, PREFIX_LEN, patch_grid


def config_of(model: str) -> PreTrainedConfig:
    """Return a built-in configuration, or any checkpoint's.

    Raises:
        ValueError: there is no such model.
    """
    try:
        return CONFIGS.get(model) or AutoConfig.from_pretrained(model)
    except OSError as error:
        raise ValueError(f"cannot load the configuration of {model}: {error}") from error


def prompt_of(options: argparse.Namespace, num_tokens: int | None) -> tuple[int, int, int, Video | None]:
    """Return n, where the context starts, where the query starts, and the video if there is one."""
    if num_tokens is not None:
        return num_tokens, 0, num_tokens - options.query_len, None
    config, start = config_of(options.model), PREFIX_LEN + 1
    frames, down, across = patch_grid(options.frames, *parse_resolution(options.resolution))
    frame_tokens = down // MERGE * (across // MERGE)
    if config.model_type == "internvl":  # which resizes all frames to one size
        frames, frame_tokens = options.frames, config.image_seq_length
    visual = range(start, start + frames * frame_tokens)
    return visual.stop + 1 + options.query_len, start, visual.stop, Video(visual, frames)


def plan(options: argparse.Namespace) -> list[dict]:
    """Predict every method on every number of hosts, print a table, and return the records."""
    config = config_of(options.model)
    shape = Shape.from_config(config, options.bytes_per_number)
    records = []
    split = [(hosts, method) for hosts in options.hosts for method in options.methods if method != "full"]
    runs = [(1, "full")] * ("full" in options.methods) + split  # full attention is one host's
    for num_tokens in options.tokens or [None]:
        prompt = prompt_of(options, num_tokens)
        _, alone = cost_of_prompt(shape, 1, prompt, PrefillConfig(method="full"))
        for hosts, method in runs:
            lengths = {"anchor_len": options.anchor_len, "passing_len": options.passing_len}
            settings = PrefillConfig(method=method, reduce=reduce_config(options), **lengths)
            layout, costs = cost_of_prompt(shape, hosts, prompt, settings, options.density)
            if options.explain:
                print(explain(method, layout, costs, alone), end="\n\n")
            records.append(
                {
                    "benchmark": "scaling",
                    "kind": "plan",
                    "model": options.model,
                    "method": method,
                    "hosts": hosts,
                    "num_input_tokens": prompt[0],
                    "anchor_len": layout.anchor_len,
                    "passing_len": layout.passing_len,
                    "reduce": settings.reduce and asdict(settings.reduce),
                    "density": options.density,
                    "flop_ratio": flop_ratio(alone, costs),
                    "received_bytes": max(sum(host.received.values()) for host in costs),
                    "kv_bytes": max(host.kv_bytes for host in costs),
                    **provenance(),
                }
            )
    rows = [
        [r["num_input_tokens"], r["hosts"], r["method"], f"{r['flop_ratio']:.2f}"]
        + [f"{r[name] / 1e6:.1f}" for name in ("received_bytes", "kv_bytes")]
        for r in records
    ]
    print(markdown_table(["tokens", "hosts", "method", "FLOP ratio", "MB received", "KV MB / host"], rows))
    return records


def simulate(options: argparse.Namespace) -> list[dict]:
    """Measure every method on simulated hosts, compare with the cost model, and return the records."""
    options.seed = 0
    hosts = HostGroup.single()
    bench = Bench(options, hosts)
    shape = Shape.from_config(config_of(options.model), bench.model.dtype.itemsize)
    network = Network(Link(options.bandwidth, options.latency))
    full = Case("full", PrefillConfig(method="full"), 1, None)
    records = []
    ways = list(itertools.product(options.hosts, options.methods))
    runs = len(options.tokens) * (options.full_rounds + len(ways) * (options.rounds + 1))
    # The first forward pass also sets up what later ones reuse.
    bench.run(full, bench.prepare(Workload(tokens=2048)))
    with tqdm(total=runs, unit="prefill", disable=None) as bar:
        for num_tokens in options.tokens:
            job, prompt = bench.prepare(Workload(tokens=num_tokens)), prompt_of(options, num_tokens)
            full_ms = [_run(bench, full, job, bar)["stages_ms"]["prefill"] for _ in range(options.full_rounds)]
            _, alone = cost_of_prompt(shape, 1, prompt, full.config)
            for number, method in ways:
                lengths = {"anchor_len": options.anchor_len, "passing_len": options.passing_len}
                case = Case(method, PrefillConfig(method=method, **lengths), number, network)
                samples = [_run(bench, case, job, bar) for _ in range(options.rounds)]
                # On a noisy machine the slowest host before an exchange is mostly the unluckiest one, so that the
                # final run is at each host's mean pace.
                paces = [_mean_pace(laps) for laps in zip(*(sample["laps"] for sample in samples), strict=True)]
                run = _run(bench, case, job, bar, paces)
                path_ms = run["stages_ms"]["prefill"]
                speedup = statistics.mean(full_ms) / path_ms
                ratio = flop_ratio(alone, cost_of_prompt(shape, number, prompt, case.config)[1])
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
                        "share_of_flop_ratio": speedup / ratio,
                        "device": device_name(hosts.device),
                        **provenance(),
                    }
                )
    header = ["tokens", "hosts", "method", "full s", "critical path s", "speed-up", "FLOP ratio", "share of it"]
    rows = [
        [r["num_input_tokens"], r["hosts"], r["method"], f"{statistics.mean(r['full_ms']) / 1e3:.2f}"]
        + [f"{r['critical_path_ms'] / 1e3:.2f}"]
        + [f"{r[name]:.2f}" for name in ("speedup_vs_full", "flop_ratio", "share_of_flop_ratio")]
        for r in records
    ]
    print(markdown_table(header, rows))
    return records


def _run(bench: Bench, case: Case, job, bar: tqdm, paces=None) -> dict:
    bar.set_postfix_str(f"{case.label}, {case.hosts} hosts", refresh=True)
    run = bench.run(case, job, paces)
    bar.update()
    return run


def _mean_pace(laps: Sequence[Sequence[float]]) -> list[float]:
    """Average every stretch of computing over a host's runs."""
    return [statistics.mean(stretch) for stretch in zip(*laps, strict=True)]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="kind", required=True)

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--query-len", type=int, default=32, help="tokens of the question")
    shared.add_argument("--anchor-len", type=int)
    shared.add_argument("--passing-len", type=int)
    add_json_option(shared)

    command = commands.add_parser("plan", parents=[shared], help="the cost model")
    command.add_argument("--model", default="qwen2.5-vl-3b", help=f"{', '.join(CONFIGS)}, a folder or a hub id")
    command.add_argument("--tokens", type=int, nargs="+", help="lengths of a text prompt")
    command.add_argument("--frames", type=int, default=64, help="of a video prompt, where no --tokens are given")
    command.add_argument("--resolution", default="720p", help="HxW, or such as 720p")
    command.add_argument("--hosts", type=int, nargs="+", default=[8])
    command.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    command.add_argument("--bytes-per-number", type=int, default=2)
    add_settings(command.add_argument_group("fewer visual tokens"), REDUCE)
    command.add_argument(
        "--density",
        type=float,
        default=1.0,
        help="the share of attention within blocks that sparse attention computes, as measured (default 1)",
    )
    command.add_argument("--explain", action="store_true", help="the parts of the busiest host's work")

    command = commands.add_parser("simulate", parents=[shared], help="simulated hosts")
    command.add_argument("--model", default="llama-small", help="text models only")
    command.add_argument("--tokens", type=int, nargs="+", default=[32768])
    command.add_argument("--hosts", type=int, nargs="+", default=[8])
    command.add_argument("--methods", nargs="+", choices=METHODS[1:], default=["apbv"])
    command.add_argument("--dtype", choices=DTYPES)
    command.add_argument("--bandwidth", type=float, default=200e9, help="bytes per second (default NVLink's)")
    command.add_argument("--latency", type=float, default=10e-6)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--full-rounds", type=int, default=1, help="of full attention, which takes long")
    options = parser.parse_args(arguments)
    if options.kind == "simulate" and min(options.rounds, options.full_rounds, *options.hosts) < 1:
        parser.error("--hosts, --rounds and --full-rounds must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        records = {"plan": plan, "simulate": simulate}[options.kind](options)
        if options.json:
            append_json_lines(options.json, records)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
