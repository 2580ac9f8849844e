"""Measure one decoding step over long KV with apbv's attention and cache, beside transformers' own.

    python benchmarks/decoding.py --tokens 2048 32768 --dtype bfloat16 --json decoding.jsonl
    python benchmarks/decoding.py --model qwen2.5-vl-7b --tokens 131072  # on a GPU
    python benchmarks/decoding.py --model demo --tokens 272 --batch 1 4 16

A step is a forward pass over 1 token, as in autoregressive decoding, or over several, as in verification, which
are then taken back. The KV is random. Every round runs all ways in turn. The logits of every way are compared
with transformers', first and last: a wrong one gets an error instead of a speed, and the exit status is 1. On a
GPU apbv's steps are CUDA graphs, and those without stand beside them. ``--compile`` adds the model with its MLPs
and norms compiled, and the time that compiling takes. ``--batch`` decodes several answers instead, in one batch
and one after the other.
"""

import argparse
import statistics
import sys
from dataclasses import replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv import DecodeConfig, HostGroup, demo
from apbv.allocator import keep_freed_memory
from apbv.model.loading import load_model
from apbv.model.parts import ModelParts, inspect_model
from apbv.stats import device_name

from support.arguments import add_json_option
from support.decoding.batches import ALONE, BatchWay, Prompt, measure_batch, median_ms
from support.decoding.steps import Way, compile_parts, measure, random_cache, with_apbv, with_transformers
from support.records import made_by, write
from support.tables import markdown_table
from support.workloads import CONFIGS, build_model

# Allowed difference, relative to the largest logit: two ways round differently in a few layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
DEMO = "demo"


def load(options: argparse.Namespace, device: torch.device) -> ModelParts:
    """Build the model, with random weights, or load the packaged one."""
    dtype = getattr(torch, options.dtype)
    if options.model == DEMO:
        model, _ = load_model(demo.model_path(), dtype, HostGroup.single(device))
    else:
        model = build_model(CONFIGS[options.model], dtype, device)
    return inspect_model(model, options.backend)


def run_batches(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Measure batches of all sizes on all lengths, and return the records."""
    parts, records = load(options, device), []
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        for size in options.batch:
            generator = torch.Generator(device).manual_seed(options.seed)
            logits = torch.randn(size, parts.vocab_size, generator=generator, device=device)
            # No two are equally long.
            lengths = [num_tokens + 7 * number for number in range(size)]
            prompts = [
                Prompt(parts, random_cache(parts, length, options.seed + number), row)
                for number, (length, row) in enumerate(zip(lengths, logits, strict=True))
            ]
            ways = measure_batch(parts, prompts, options.answer_tokens, options.rounds, options.warmup)
            records += [batch_record(options, ways[0], way, num_tokens, size, device) for way in ways]
    return records


def run(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Measure all ways on all lengths, and return the records."""
    parts = load(options, device)
    compiled = None
    by_launches = replace(parts, decode=DecodeConfig(cuda_graphs="off"))
    if options.compile:
        compiled = load(options, device)
        compile_parts(compiled)
    records = []
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        # Each way has a cache object of its own with the same numbers.
        num_ways = 2 + options.compile + (device.type == "cuda")
        caches = [random_cache(parts, num_tokens, options.seed) for _ in range(num_ways)]
        for num_new in options.new_tokens:
            ways = [
                Way("transformers", with_transformers(parts, caches[0], num_tokens)),
                Way("apbv", with_apbv(parts, caches[1], num_tokens)),
            ]
            if device.type == "cuda":
                ways.append(Way("apbv, no graphs", with_apbv(by_launches, caches[2], num_tokens)))
            if compiled is not None:
                ways.append(Way("apbv, compiled", with_apbv(compiled, caches[-1], num_tokens)))
            measure(ways, list(range(1, num_new + 1)), options.rounds, options.warmup, device)
            records += [record(options, ways[0], way, num_tokens, num_new, device) for way in ways]
    return records


def batch_record(
    options: argparse.Namespace, alone: BatchWay, way: BatchWay, num_tokens: int, size: int, device: torch.device
) -> dict:
    """Return a JSON-ready record of a batch, without a speed if its logits are wrong."""
    ms, right = median_ms(way), way.error <= TOLERANCE[options.dtype]  # False for NaN
    return {
        "benchmark": "batch_decoding",
        "way": way.name,
        "num_tokens": num_tokens,
        "num_answers": size,
        "answer_tokens": options.answer_tokens,
        "ms": ms if right else None,
        "tokens_per_s": size / ms * 1e3 if right else None,
        "speedup": median_ms(alone) / ms if right else None,
        "error": way.error if way.error < float("inf") else None,
        "samples": {"ms": way.ms},
        **conditions(options, device),
    }


def record(
    options: argparse.Namespace, baseline: Way, way: Way, num_tokens: int, num_new: int, device: torch.device
) -> dict:
    """Return a JSON-ready record, without a speed if the way is wrong."""
    ms = statistics.median(way.ms)
    right = way.error <= TOLERANCE[options.dtype]  # False for NaN
    return {
        "benchmark": "decoding",
        "way": way.name,
        "num_tokens": num_tokens,
        "num_new_tokens": num_new,
        "ms": ms if right else None,
        "speedup": statistics.median(baseline.ms) / ms if right else None,
        "setup_s": way.setup_s,
        "error": way.error if way.error < float("inf") else None,
        "samples": {"ms": way.ms},
        **conditions(options, device),
    }


def conditions(options: argparse.Namespace, device: torch.device) -> dict:
    """Return what every record says of the run."""
    return {
        "model": options.model,
        "backend": options.backend,
        "tolerance": TOLERANCE[options.dtype],
        "warmup": options.warmup,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "dtype": options.dtype,
        **made_by("decoding.py"),
    }


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table."""
    lines = []
    for row in rows:
        wrong = row["speedup"] is None
        figures = ["WRONG", "–"] if wrong else [f"{row['ms']:.2f}", f"{row['speedup']:.2f} ×"]
        error = "–" if row["error"] is None else f"{row['error']:.0e}"
        lines.append(
            [row["num_tokens"], row["num_new_tokens"], row["way"], *figures, f"{row['setup_s']:.1f}", error]
        )
    return markdown_table(["context", "new tokens", "way", "ms", "speed-up", "first step s", "error"], lines)


def batch_table(rows: list[dict]) -> str:
    """Format records of batches as a Markdown table."""
    lines = []
    for row in rows:
        wrong = row["speedup"] is None
        speed = ["WRONG", "–"] if wrong else [f"{row['tokens_per_s']:.0f}", f"{row['speedup']:.2f} ×"]
        error = "–" if row["error"] is None or row["way"] == ALONE else f"{row['error']:.0e}"
        lines.append([row["num_tokens"], row["num_answers"], row["way"], *speed, error])
    return markdown_table(["context", "answers", "way", "tokens/s", "speed-up", "error"], lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[DEMO, *sorted(CONFIGS)], default="llama-small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32768], help="KV that is there already")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 6], help="in one pass")
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help="decode so many answers at a time")
    parser.add_argument("--answer-tokens", type=int, default=32, help="tokens of each answer, with --batch")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--compile", action="store_true", help="also with compiled MLPs and norms")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    counts = [*options.tokens, *options.new_tokens, *(options.batch or []), options.answer_tokens, options.rounds]
    if min(counts) < 1 or options.warmup < 0:
        parser.error("--warmup must be at least 0, and all other numbers at least 1")
    if options.batch and options.compile:
        parser.error("--batch has no compiled way: leave out --compile")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    keep_freed_memory()
    try:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        rows = run_batches(options, device) if options.batch else run(options, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(options, rows, batch_table if options.batch else table)
    wrong = [row for row in rows if row["speedup"] is None]
    for row in wrong:
        print(
            f"error: {row['way']} over {row['num_tokens']} tokens is off by {row['error']}, where "
            f"{row['tolerance']} is allowed",
            file=sys.stderr,
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
