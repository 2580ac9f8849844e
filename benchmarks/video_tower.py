"""Measure a Qwen2.5-VL vision tower with one attention call for all windows, beside transformers' own sdpa.

    python benchmarks/video_tower.py --frames 8 --resolution 1440p

Weights and pixels are random. Every round runs both ways in turn. Their embeddings are compared first: where they
differ by more than rounding, there are no figures.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from apbv.model.parts import inspect_model
from apbv.model.vision_attention import packed_attention
from apbv.planning import parse_resolution
from apbv.stats import synchronize

from support.arguments import COUNT, DEFAULT_DTYPES, add_shared
from support.records import report
from support.workloads import build_model, qwen_vl_config, video_prompt

# Allowed difference, relative to the largest value: the two ways round differently in every layer.
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
WAYS = {"sdpa": nullcontext, "packed": lambda parts: packed_attention(parts.packed_vision_tower, parts.backend)}


class AttentionCalls(TorchDispatchMode):
    """Counts the attention operators that run on a device, each as one, however many sequences it gets."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(part in str(func) for part in ("_attention", "flash_attn"))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Time a tower over a video's frames in both ways, and count their attention calls.

    Raises:
        AssertionError: the two ways do not give the same embeddings.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype or DEFAULT_DTYPES[device]
    tower = {"depth": options.depth, "hidden": options.hidden, "heads": options.heads}
    config = qwen_vl_config(1, 64, 64, 4, 2, vocab=2048, vision=tuple(tower.values()))
    parts = inspect_model(build_model(config, getattr(torch, dtype), device))
    batch = video_prompt(options.frames, *options.resolution, query_len=8).batch
    pixels, grid = (batch[name].to(device) for name in ("pixel_values_videos", "video_grid_thw"))

    def encode() -> Tensor:
        features = parts.model.model.get_video_features(pixels, grid, return_dict=True)
        synchronize(parts.device)
        return torch.cat(features.pooler_output)

    calls, rows, seconds = {}, {}, {way: [] for way in WAYS}
    for way, in_force in WAYS.items():
        with in_force(parts), AttentionCalls() as counter:
            rows[way] = encode()
        calls[way] = counter.count
    error = float((rows["packed"] - rows["sdpa"]).abs().max() / rows["sdpa"].abs().max())
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"the embeddings differ by {error:.2g} of the largest")
    for _ in range(options.rounds):
        for way, in_force in WAYS.items():
            with in_force(parts):
                began = time.perf_counter()
                encode()
                seconds[way].append(time.perf_counter() - began)
    for way in WAYS:
        figures = {"attention_calls": calls[way], "seconds": statistics.median(seconds[way]), "error": error}
        yield {"way": way, "frames": options.frames, **tower, "dtype": dtype, **figures, "raw": seconds[way]}


COLUMNS = {"": "{way}", "attention calls": "{attention_calls}", "s": "{seconds:.2f}", "error": "{error:.1g}"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=COUNT, default=8)
    parser.add_argument("--resolution", type=parse_resolution, default="720p", metavar="HxW|720p|…")
    parser.add_argument("--depth", type=COUNT, default=32, help="layers, of which every eighth sees whole frames")
    parser.add_argument("--hidden", type=COUNT, default=256)
    parser.add_argument("--heads", type=COUNT, default=4)
    add_shared(parser, "dtype", "json", rounds=3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    report(options, measure(options), COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
