"""Estimate scaling to more hosts than available, by simulated hosts or a cost model.

    python benchmarks/scaling.py plan --model qwen2.5-vl-3b --frames 64 --resolution 1440p --explain
    python benchmarks/scaling.py plan --tokens 32768 131072 1048576 --hosts 2 8 64
    python benchmarks/scaling.py simulate --tokens 131072 --hosts 8 --json scaling.jsonl
    python benchmarks/scaling.py plot --table scaling.jsonl --plot scaling.png

plan      evaluates the cost model of FLOPs, bytes and memory for any Hugging Face config and any
          number of tokens and hosts.
simulate  computes every host's share, one after the other (apbv.testing.simulated), several times,
          and compares the speedup over full attention at each host's mean pace with the cost
          model's ratio of FLOPs.
plot      draws the speedups of simulated hosts over their number, beside the ideal: that of as many
          hosts without any loss.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
from apbv import HostGroup, PrefillConfig
from apbv.hosts import run_on_hosts
from apbv.launch.options import REDUCE, add_settings, prefill_config
from apbv.planning import parse_resolution
from apbv.testing.random_models import MERGE, PREFIX_LEN, config_of, patch_grid
from apbv.testing.simulated import Lap

from support.arguments import add_options
from support.bench import Bench, Case, Workload
from support.cost_model import METHODS, Shape, Video, cost_of_prompt, explain, flop_ratio
from support.records import Curves, columns_of, fields_of, plot, read_records, report

FULL = PrefillConfig(method="full")


def prompt_of(
    options: argparse.Namespace, num_tokens: int | None
) -> tuple[int, int, int, Video | None]:
    """Return n, where the context starts, where the query starts, and the video if there is one."""
    if num_tokens is not None:
        return num_tokens, 0, num_tokens - options.query_len, None
    config = config_of(options.model)
    if config.model_type == "internvl":
        # It resizes all frames to one size.
        frames = options.frames
        frame_tokens = config.image_seq_length
    else:
        height, width = parse_resolution(options.resolution)
        frames, down, across = patch_grid(options.frames, height, width)
        frame_tokens = down // MERGE * (across // MERGE)
    # One token marks the start of the video, and one its end.
    start = PREFIX_LEN + 1
    stop = start + frames * frame_tokens
    num_tokens = stop + 1 + options.query_len
    return num_tokens, start, stop, Video(range(start, stop), frames)


def plan(options: argparse.Namespace) -> Iterator[dict]:
    """Predict every method on every number of hosts; full attention is one host's."""
    shape = Shape.from_config(config_of(options.model))
    runs = []
    if "full" in options.methods:
        runs.append((1, "full"))
    for hosts, method in itertools.product(options.hosts, options.methods):
        if method != "full":
            runs.append((hosts, method))
    for num_tokens in options.tokens or [None]:
        prompt = prompt_of(options, num_tokens)
        _, full_costs = cost_of_prompt(shape, 1, prompt, FULL)
        for hosts, method in runs:
            config = replace(prefill_config(options), method=method)
            layout, costs = cost_of_prompt(shape, hosts, prompt, config, options.density)
            if options.explain:
                print(explain(method, layout, costs, full_costs), end="\n\n")
            yield {
                "benchmark": "scaling",
                "kind": "plan",
                "method": method,
                "hosts": hosts,
                "num_input_tokens": prompt[0],
                "reduce": None if config.reduce is None else asdict(config.reduce),
                **fields_of(options, "model", "density"),
                **fields_of(layout, "anchor_len", "passing_len"),
                "flop_ratio": flop_ratio(full_costs, costs),
                "received_bytes": max(host_cost.received.total() for host_cost in costs),
                "kv_bytes": max(host_cost.kv_bytes for host_cost in costs),
            }


def simulate(options: argparse.Namespace) -> Iterator[dict]:
    """Measure every method on simulated hosts, and compare with the cost model."""
    runs = list(itertools.product(options.hosts, options.methods))
    num_prefills = options.full_rounds + len(runs) * (options.rounds + 1)
    bench = Bench(options, HostGroup.single(), 1 + len(options.tokens) * num_prefills)
    shape = Shape.from_config(config_of(options.model), bench.model.dtype.itemsize)
    full = Case("full", FULL)
    # The first forward pass also sets up what later ones reuse.
    bench.run(full, bench.prepare(Workload(tokens=2048)))
    for num_tokens in options.tokens:
        job = bench.prepare(Workload(tokens=num_tokens))
        prompt = prompt_of(options, num_tokens)
        full_ms = [prefill_ms(bench.run(full, job)) for _ in range(options.full_rounds)]
        _, full_costs = cost_of_prompt(shape, 1, prompt, FULL)
        for num_hosts, method in runs:
            case = Case(method, replace(prefill_config(options), method=method), num_hosts)
            samples = [bench.run(case, job) for _ in range(options.rounds)]
            # On a noisy machine the slowest host before an exchange is mostly the unluckiest one,
            # so that the last run is at each host's mean pace.
            paces = mean_paces([sample["laps"] for sample in samples])
            last = bench.run(case, job, paces)
            speedup = statistics.mean(full_ms) / prefill_ms(last)
            _, costs = cost_of_prompt(shape, num_hosts, prompt, case.config)
            ratio = flop_ratio(full_costs, costs)
            yield {
                "benchmark": "scaling",
                "kind": "simulate",
                "simulated": True,
                "model": options.model,
                "method": method,
                "label": method if options.label is None else f"{method}, {options.label}",
                "hosts": num_hosts,
                "threads_per_host": bench.threads,
                "network": {"link": asdict(bench.network)},
                "num_input_tokens": num_tokens,
                **fields_of(last, "anchor_len", "passing_len"),
                "full_ms": full_ms,
                "critical_path_ms": prefill_ms(last),
                "noisy_critical_path_ms": [prefill_ms(sample) for sample in samples],
                "speedup_vs_full": speedup,
                "flop_ratio": ratio,
                "share_of_flop_ratio": speedup / ratio,
            }


def speedup_curves(records: Sequence[dict]) -> dict[str, Curves]:
    """Return the median speedups over the number of hosts, for each number of tokens.

    Args:
        records: of :func:`simulate`.
    """
    panels: dict[str, Curves] = {}
    for num_tokens in sorted({record["num_input_tokens"] for record in records}):
        of_label: dict[str, dict[int, list[float]]] = {}
        for record in records:
            if record["num_input_tokens"] == num_tokens:
                of_hosts = of_label.setdefault(record["label"], {})
                speedups = of_hosts.setdefault(record["hosts"], [])
                speedups.append(record["speedup_vs_full"])
        curves: dict[str, list[tuple[float, float]]] = {}
        all_hosts: set[int] = set()
        for label, of_hosts in of_label.items():
            all_hosts |= of_hosts.keys()
            curves[label] = [(hosts, statistics.median(of_hosts[hosts])) for hosts in of_hosts]
        curves["ideal"] = [(hosts, hosts) for hosts in sorted(all_hosts)]
        panels[f"hosts, {num_tokens:,} tokens"] = curves
    return panels


def mean_paces(laps_of_runs: Sequence[Sequence[Sequence[Lap]]]) -> list[list[Lap]]:
    """Average every lap of every host over runs of the same job.

    Args:
        laps_of_runs: laps by run and by host.

    Returns:
        laps by host.
    """
    paces = []
    for laps_of_host in zip(*laps_of_runs, strict=True):
        pace = []
        for same_laps in zip(*laps_of_host, strict=True):
            cpu = statistics.mean([lap.cpu for lap in same_laps])
            gpu = statistics.mean([lap.gpu for lap in same_laps])
            pace.append(Lap(cpu, gpu))
        paces.append(pace)
    return paces


def prefill_ms(figures: dict) -> float:
    """Return the milliseconds of the language model's prefill."""
    return figures["stages_ms"]["prefill"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.set_defaults(method="apbv")
    commands = parser.add_subparsers(dest="kind", required=True)
    command = commands.add_parser("plan", help="predict with the cost model")
    add_options(command, "scaling plan", {"methods": METHODS})
    add_settings(command.add_argument_group("visual-token pruning"), REDUCE)
    command = commands.add_parser("simulate", help="measure with simulated hosts")
    add_options(command, "scaling simulate", {"methods": METHODS[1:]})
    command = commands.add_parser("plot", help="plot what was measured")
    add_options(command, "scaling plot")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.kind == "plot":
        panels = speedup_curves(read_records(options.table))
        plot(options.plot, panels, "speedup over full attention on one host", "log")
        return 0

    def run(hosts: HostGroup) -> None:
        records = plan(options) if options.kind == "plan" else simulate(options)
        report(options, records, columns_of(f"scaling {options.kind}"))

    return run_on_hosts(run)


if __name__ == "__main__":
    sys.exit(main())
