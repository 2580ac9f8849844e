"""Estimate scaling to more hosts than available, with simulated hosts or a cost model of FLOPs,
bytes and memory.

    python benchmarks/scaling.py plan --model qwen2.5-vl-3b --frames 64 --resolution 1440p --explain
    python benchmarks/scaling.py plan --tokens 32768 131072 1048576 --hosts 2 8 64
    python benchmarks/scaling.py simulate --tokens 131072 --hosts 8 --json scaling.jsonl

plan      evaluates the cost model for any Hugging Face config and any number of tokens and hosts.
simulate  computes every host's share, one after the other (support.simulated), several times, and
compares the
          speedup over full attention at each host's mean pace with the cost model's ratio of FLOPs.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import HostGroup, PrefillConfig
from apbv.hosts import run_on_hosts
from apbv.launch.options import REDUCE, add_settings, prefill_config
from apbv.planning import parse_resolution

from support.arguments import add_options
from support.bench import Bench, Case, Workload
from support.cost_model import METHODS, Shape, Video, cost_of_prompt, explain, flop_ratio
from support.records import columns_of, fields_of, report
from support.simulated import Lap
from support.workloads import MERGE, PREFIX_LEN, config_of, patch_grid

FULL = PrefillConfig(method="full")


def prompt_of(
    options: argparse.Namespace, num_tokens: int | None
) -> tuple[int, int, int, Video | None]:
    """Return n, where the context starts, where the query starts, and the video if there is one."""
    if num_tokens is not None:
        return num_tokens, 0, num_tokens - options.query_len, None
    config = config_of(options.model)
    start = PREFIX_LEN + 1
    frames, down, across = patch_grid(options.frames, *parse_resolution(options.resolution))
    frame_tokens = down // MERGE * (across // MERGE)
    if config.model_type == "internvl":  # which resizes all frames to one size
        frames = options.frames
        frame_tokens = config.image_seq_length
    visual = range(start, start + frames * frame_tokens)
    return visual.stop + 1 + options.query_len, start, visual.stop, Video(visual, frames)


def plan(options: argparse.Namespace) -> Iterator[dict]:
    """Predict every method on every number of hosts; full attention is one host's."""
    shape = Shape.from_config(config_of(options.model))
    split = [method for method in options.methods if method != "full"]
    runs = [(1, "full")] * ("full" in options.methods) + list(
        itertools.product(options.hosts, split)
    )
    for num_tokens in options.tokens or [None]:
        prompt = prompt_of(options, num_tokens)
        _, alone = cost_of_prompt(shape, 1, prompt, FULL)
        for hosts, method in runs:
            settings = replace(prefill_config(options), method=method)
            layout, costs = cost_of_prompt(shape, hosts, prompt, settings, options.density)
            if options.explain:
                print(explain(method, layout, costs, alone), end="\n\n")
            yield {
                "benchmark": "scaling",
                "kind": "plan",
                "method": method,
                "hosts": hosts,
                "num_input_tokens": prompt[0],
                "reduce": settings.reduce and asdict(settings.reduce),
                **fields_of(options, "model", "density"),
                **fields_of(layout, "anchor_len", "passing_len"),
                "flop_ratio": flop_ratio(alone, costs),
                "received_bytes": max(sum(host.received.values()) for host in costs),
                "kv_bytes": max(host.kv_bytes for host in costs),
            }


def simulate(options: argparse.Namespace) -> Iterator[dict]:
    """Measure every method on simulated hosts, and compare with the cost model."""
    ways = list(itertools.product(options.hosts, options.methods))
    num_runs = 1 + len(options.tokens) * (options.full_rounds + len(ways) * (options.rounds + 1))
    bench = Bench(options, HostGroup.single(), num_runs)
    shape = Shape.from_config(config_of(options.model), bench.model.dtype.itemsize)
    full = Case("full", FULL)
    # The first forward pass also sets up what later ones reuse.
    bench.run(full, bench.prepare(Workload(tokens=2048)))
    for num_tokens in options.tokens:
        job = bench.prepare(Workload(tokens=num_tokens))
        prompt = prompt_of(options, num_tokens)
        full_ms = [prefill_ms(bench.run(full, job)) for _ in range(options.full_rounds)]
        _, alone = cost_of_prompt(shape, 1, prompt, FULL)
        for number, method in ways:
            case = Case(method, replace(prefill_config(options), method=method), number)
            samples = [bench.run(case, job) for _ in range(options.rounds)]
            # On a noisy machine the slowest host before an exchange is mostly the unluckiest one,
            # so that the last run is at each host's mean pace: every stretch of computing is
            # averaged over its runs.
            paces = [
                [
                    Lap(*map(statistics.mean, zip(*stretch, strict=True)))
                    for stretch in zip(*laps, strict=True)
                ]
                for laps in zip(*(sample["laps"] for sample in samples), strict=True)
            ]
            last = bench.run(case, job, paces)
            speedup = statistics.mean(full_ms) / prefill_ms(last)
            ratio = flop_ratio(alone, cost_of_prompt(shape, number, prompt, case.config)[1])
            yield {
                "benchmark": "scaling",
                "kind": "simulate",
                "simulated": True,
                "model": options.model,
                "method": method,
                "hosts": number,
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


def prefill_ms(figures: dict) -> float:
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
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    measure = {"plan": plan, "simulate": simulate}[options.kind]
    return run_on_hosts(
        lambda _: report(options, measure(options), columns_of(f"scaling {options.kind}"))
    )


if __name__ == "__main__":
    sys.exit(main())
