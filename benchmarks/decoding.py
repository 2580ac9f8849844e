"""Measure one decoding step over a long KV cache with apbv's attention and cache, and with transformers' own.

    python benchmarks/decoding.py --tokens 2048 32768 --dtype bfloat16 --json decoding.jsonl
    python benchmarks/decoding.py --model qwen2.5-vl-7b --tokens 131072  # on a GPU
    python benchmarks/decoding.py --model demo --tokens 272 --batch 1 4 16

A step is a forward pass over 1 token, as in autoregressive decoding, or over several, as in verification, which
are then rolled back. The KV is random. Every round interleaves all variants. Each variant's logits are compared
with transformers', first and last: a wrong one gets an error instead of a speed, and the exit status is 1. On a
GPU apbv's steps are CUDA graphs, and eager steps are also reported. ``--batch`` decodes several answers instead,
sequentially, in one batch, and in one batch of transformers, padded on the left.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv import DecodeConfig, HostGroup
from apbv.allocator import keep_freed_memory
from apbv.model.parts import ModelParts, inspect_model

from support.arguments import COUNT, add_shared
from support.decoding import (
    Prompt,
    Way,
    batch_ways,
    compare,
    measure,
    random_cache,
    with_apbv,
    with_transformers,
)
from support.records import report
from support.workloads import CONFIGS, load_model

# Allowed difference, relative to the largest logit: two ways round differently in a few layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def batches(options: argparse.Namespace, parts: ModelParts) -> Iterator[dict]:
    """Decode batches of all sizes on all lengths, and yield the records."""
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        for size in options.batch:
            # No two prompts are equally long.
            prompts = [Prompt(parts, num_tokens + 7 * number, number) for number in range(size)]
            ways = batch_ways(parts, prompts, options.answer_tokens)
            measure(ways, options.rounds, options.warmup, parts.device, options.answer_tokens)
            for way in ways:
                record = record_of(options, ways[0], way)
                speed = None if record["ms"] is None else size / record["ms"] * 1e3
                what = {"num_tokens": num_tokens, "num_answers": size, "answer_tokens": options.answer_tokens}
                yield {"benchmark": "batch_decoding", **what, "tokens_per_s": speed, **record}


def steps(options: argparse.Namespace, parts: ModelParts) -> Iterator[dict]:
    """Run steps in all ways on all lengths, and yield the records."""
    kinds = {"transformers": (with_transformers, parts), "apbv": (with_apbv, parts)}
    if parts.device.type == "cuda":
        kinds["apbv, no graphs"] = with_apbv, replace(parts, decode=DecodeConfig(cuda_graphs="off"))
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        # Each way has a cache object of its own with the same numbers.
        caches = {name: random_cache(parts, num_tokens) for name in kinds}
        for num_new in options.new_tokens:
            tokens = list(range(1, num_new + 1))
            ways = [Way(name, make(own, caches[name], tokens)) for name, (make, own) in kinds.items()]
            compare(ways)
            measure(ways, options.rounds, options.warmup, parts.device)
            compare(ways)
            for way in ways:
                what = {"num_tokens": num_tokens, "num_new_tokens": num_new}
                yield {"benchmark": "decoding", **what, **record_of(options, ways[0], way)}


def record_of(options: argparse.Namespace, baseline: Way, way: Way) -> dict:
    """Return the fields of every record, without a speed if the result is wrong."""
    ms, right = statistics.median(way.ms), way.error <= TOLERANCE[options.dtype]  # False for NaN
    return {
        "way": way.name,
        "ms": ms if right else None,
        "speedup": statistics.median(baseline.ms) / ms if right else None,
        "error": way.error if way.error < float("inf") else None,
        "tolerance": TOLERANCE[options.dtype],
        "samples": {"ms": way.ms},
        "model": options.model,
        "warmup": options.warmup,
        "dtype": options.dtype,
    }


_SPEED = {"speed-up": "{speedup:.2f} ×", "error": "{error:.0e}"}
COLUMNS = {"context": "{num_tokens}", "new tokens": "{num_new_tokens}", "way": "{way}", "ms": "{ms:.2f}"}
COLUMNS |= _SPEED
BATCH_COLUMNS = {"context": "{num_tokens}", "answers": "{num_answers}", "way": "{way}"}
BATCH_COLUMNS |= {"tokens/s": "{tokens_per_s:.0f}", **_SPEED}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["demo", *sorted(CONFIGS)], default="llama-small")
    parser.add_argument("--tokens", type=COUNT, nargs="+", default=[2048, 32768], help="context lengths")
    parser.add_argument("--new-tokens", type=COUNT, nargs="+", default=[1, 6], help="tokens per forward pass")
    parser.add_argument("--batch", type=COUNT, nargs="+", metavar="N", help="batch sizes (default: no batching)")
    parser.add_argument("--answer-tokens", type=COUNT, default=32, help="tokens of each answer, with --batch")
    add_shared(parser, "json", dtype="float32", rounds=20, warmup=3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    keep_freed_memory()
    parts = inspect_model(load_model(options.model, getattr(torch, options.dtype), HostGroup.single()))
    measured, columns = (batches, BATCH_COLUMNS) if options.batch else (steps, COLUMNS)
    rows = report(options, measured(options, parts), columns)
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
