"""Predict the least time of operators on GPUs, of what they have to compute and to move. Nothing runs.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --tokens 32768 --hosts 4 --gpus H100 H200

The cases are those of operators.py in bf16, with the heads of Qwen2.5-VL-7B. The peaks are those of data sheets
(of the fastest GPU with the name), which no kernel reaches: a measured time is longer.
"""

import argparse
import sys
from dataclasses import replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch

from support.arguments import COUNT
from support.operators.cases import PRESETS, cases
from support.records import markdown_table

# Dense bf16 arithmetic with sums in fp32, and memory bandwidth: operations and bytes per second.
PEAKS = {"A100": (312e12, 2.0e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "B200": (2250e12, 8.0e12)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    usual = PRESETS["h200"].sizes
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=COUNT, default=usual.tokens)
    parser.add_argument("--hosts", type=COUNT, default=usual.hosts)
    parser.add_argument("--gpus", nargs="+", default=list(PEAKS), choices=PEAKS)
    options = parser.parse_args(arguments)
    if options.tokens < 64 * options.hosts:
        parser.error("--tokens must be at least 64 for each host, so that there is something in every block")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    lines = []
    for case in cases(replace(PRESETS["h200"].sizes, hosts=options.hosts), [options.tokens]):
        num_bytes, times = case.bytes(torch.bfloat16), []
        for gpu in options.gpus:
            flops, bandwidth = PEAKS[gpu]
            arithmetic, memory = 1e3 * case.flops / flops, 1e3 * num_bytes / bandwidth
            bound = "arithmetic" if arithmetic > memory else "memory"
            times.append(f"{max(arithmetic, memory):.3g} ms ({bound})")
        lines.append([case.op, case.label, f"{case.flops / 1e9:.3g}", f"{num_bytes / 1e6:.3g}", *times])
    print(markdown_table(["operator", "case", "GFLOP", "MB", *options.gpus], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
