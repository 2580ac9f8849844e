"""Predict the least time of attention's operators on GPUs, of what they have to compute and to move. Nothing runs.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --tokens 32768 --hosts 4 --gpus H100 H200

The heads are those of Qwen2.5-VL-7B in bf16; anchor and passing blocks are as long as in operators.py. The peaks
are those of data sheets (of the fastest GPU with the name), which no kernel reaches: a measured time is longer.
"""

import argparse
import sys
from dataclasses import replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch

from support.operators.case import Sizes
from support.operators.presets import PRESETS
from support.roofline import PEAKS, cost_of, predicted_seconds
from support.tables import markdown_table


def shapes(sizes: Sizes) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the operator and its shapes by what a layer does on the busiest host."""
    heads = {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "dim": sizes.head_dim}
    block = heads | {"queries": sizes.block}
    passed = (2 * sizes.hosts - 1) * sizes.passing
    past = heads | {"keys": sizes.tokens}
    whole = {"queries": sizes.tokens, "causal": sizes.tokens}
    return {
        "the whole prompt, `full`": ("segmented_attention", past | whole),
        "a block behind anchor and passing blocks": (
            "segmented_attention",
            block | {"keys": sizes.anchor + passed + sizes.block, "causal": sizes.block},
        ),
        "one new token": ("verify_attention", past | {"queries": 1}),
        "8 new tokens": ("verify_attention", past | {"queries": 8, "causal": 8}),
        "merging two results of a block": ("merge_states", block | {"parts": 2}),
        f"a block's importance to {sizes.query_len} tokens": (
            "kv_importance",
            heads | {"queries": sizes.query_len, "keys": sizes.block},
        ),
    }


def table(sizes: Sizes, gpus: list[str]) -> str:
    """Format the predictions as a Markdown table, a GPU in each column."""
    lines = []
    for what, (operator, of_call) in shapes(sizes).items():
        cost = cost_of(operator, of_call, torch.bfloat16)
        least = [predicted_seconds(cost, *PEAKS[gpu]) for gpu in gpus]
        times = [f"{1e3 * seconds:.3g} ms ({bound})" for seconds, bound in least]
        lines.append([what, f"{cost[0] / 1e9:.3g}", f"{cost[1] / 1e6:.3g}", *times])
    return markdown_table(["of a layer", "GFLOP", "MB", *gpus], lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    usual = PRESETS["h200"].sizes
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--hosts", type=int, default=usual.hosts)
    parser.add_argument("--gpus", nargs="+", default=list(PEAKS), choices=PEAKS)
    options = parser.parse_args(arguments)
    if options.hosts < 1 or options.tokens < 64 * options.hosts:
        parser.error("--tokens must be at least 64 for each host, so that there is something in every block")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    sizes = replace(PRESETS["h200"].sizes, tokens=options.tokens, hosts=options.hosts)
    print(table(sizes, options.gpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
