"""This module predicts by the cost model how prefills scale: the command ``scaling.py plan``."""

import argparse
from dataclasses import asdict, replace
from math import isqrt
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers import AutoConfig, PreTrainedConfig

from apbv import PrefillConfig
from apbv.input.video_size import parse_resolution
from apbv.launch.reduction import reduce_config
from apbv.layout import ContextLayout
from apbv.prefilling.methods import METHODS
from apbv.prefilling.reduction.forecast import Forecast, shape_left
from apbv.prefilling.reduction.shape import PromptShape
from apbv.stats import markdown_table, provenance

from ..plots import import_pyplot, legend_beside, mark_factors, mark_values, save, short
from ..workloads import CONFIGS, MERGE, PREFIX_LEN, patch_grid
from .costs import HostCost, Shape, Video, cost, flop_ratio
from .reduced import reduced_cost
from .times import Machine, explain, predict

# Large matrix products are assumed to reach 70 % of the peak dense bf16 arithmetic, and attention 50 %; measured
# rates can be given by --matmul-tflops and --attention-tflops. Links are NVLink.
MACHINES = {
    "a800": Machine(0.7 * 312e12, 0.5 * 312e12, 1.555e12, 200e9, 10e-6),
    "h200": Machine(0.7 * 989e12, 0.5 * 989e12, 4.8e12, 450e9, 10e-6),
}


def shape_of(model: str, bytes_per_number: int) -> Shape:
    """Read the shape of a built-in configuration, or of any checkpoint's.

    Raises:
        ValueError: there is no such model, or the cost model does not know its kind.
    """
    return Shape.from_config(config_of(model), bytes_per_number)


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
    frames, height, width = frames_of(options)
    start = PREFIX_LEN + 1
    visual = range(start, start + frames * height * width)
    return visual.stop + 1 + options.query_len, start, visual.stop, Video(visual, frames)


def frames_of(options: argparse.Namespace) -> tuple[int, int, int]:
    """Return the frames of the video that a prompt shows, as the model merges them, and their rows and columns."""
    config = config_of(options.model)
    if config.model_type == "internvl":  # which resizes all frames to one size
        side = isqrt(config.image_seq_length)
        return options.frames, side, side
    frames, down, across = patch_grid(options.frames, *parse_resolution(options.resolution))
    return frames, down // MERGE, across // MERGE


def layout_of(method: str, hosts: int, prompt: tuple, config: PrefillConfig) -> ContextLayout:
    """Return what a method plans for a prompt on so many hosts."""
    return METHODS[method].plan(hosts, *prompt[:3], config)


def costs_of(
    shape: Shape, hosts: int, prompt: tuple, config: PrefillConfig, options: argparse.Namespace
) -> tuple[ContextLayout, list[HostCost]]:
    """Return the layout of a prefill's first layers, and its cost on every host.

    Args:
        prompt: as :func:`prompt_of` returns it.
        config: the method and the reduction.
        options: of the command, which have the density of attention.

    Raises:
        ValueError: visual tokens are to be left out of a text, or a length does not fit.
    """
    num_tokens, start, stop, video = prompt
    method, settings = config.method, config.reduce
    if settings is None or settings.leaves_all:
        layout = layout_of(method, hosts, prompt, config)
        return layout, cost(shape, method, layout, video=video, density=options.density)
    if video is None:
        raise ValueError(f"{settings.method} leaves visual tokens out: it needs the frames of a video")
    frames = frames_of(options)
    read = PromptShape(num_tokens, start, stop, len(video.tokens), (frames,))
    if not settings.is_late:
        read = shape_left(settings, read)
        tokens = range(start, start + read.num_visual)
        video = replace(video, tokens=tokens, frame_tokens=frames[1] * frames[2])
    kind = METHODS[method]
    layout = kind.plan(hosts, read.num_tokens, read.context_start, read.query_start, config)
    runs = Forecast.of(config, shape, kind, layout, read).most
    return layout, reduced_cost(shape, method, runs, video=video, density=options.density)


def plan(options: argparse.Namespace) -> list[dict]:
    """Predict every method on every number of hosts, print a table, and return the records."""
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
            lengths = {"anchor_len": options.anchor_len, "passing_len": options.passing_len}
            config = PrefillConfig(method=method, reduce=reduce_config(options), **lengths)
            layout, costs = costs_of(shape, hosts, prompt, config, options)
            times = predict(costs, machine)
            if options.explain:
                print(explain(method, layout, machine, costs, alone), end="\n\n")
            records.append(
                {
                    "benchmark": "scaling",
                    "kind": "plan",
                    "model": options.model,
                    "machine": {"name": options.machine, **_finite(asdict(machine))},
                    "method": method,
                    "hosts": hosts,
                    "num_input_tokens": prompt[0],
                    "anchor_len": layout.anchor_len,
                    "passing_len": layout.passing_len,
                    "reduce": config.reduce and asdict(config.reduce),
                    "density": options.density,
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
    """Return (hosts, method) of all runs; full attention is one host's, and runs once."""
    split = [(hosts, method) for hosts in options.hosts for method in options.methods if method != "full"]
    return ([(1, "full")] if "full" in options.methods else []) + split


def _plan_row(record: dict) -> list:
    numbers = [f"{record[name]:.2f}" for name in ("flop_ratio", "floor_ms", "total_ms", "speedup_vs_full")]
    sizes = [f"{record[name] / 1e6:.1f}" for name in ("received_bytes", "kv_bytes")]
    return [record["num_input_tokens"], record["hosts"], record["method"], *numbers, *sizes]


def plot_plan(records: list[dict], path: Path) -> None:
    """Plot the speed-up over tokens, with the most hosts, and over hosts, with the most tokens."""
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


def _finite(fields: dict) -> dict:
    return {name: None if value == float("inf") else value for name, value in fields.items()}
