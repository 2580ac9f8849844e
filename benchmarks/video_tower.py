"""Measure a Qwen2.5-VL vision tower with one attention call for all windows, beside transformers' own sdpa.

    python benchmarks/video_tower.py --frames 8 --resolution 1440p

Weights and pixels are random. Every round runs both ways in turn. Their embeddings are compared first: where they
differ by more than rounding, there are no figures.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from apbv.model.parts import ModelParts, inspect_model
from apbv.model.vision_attention import packed_vision_attention
from apbv.planning import parse_resolution
from apbv.stats import device_name, synchronize

from support.arguments import DEFAULT_DTYPES, DTYPES
from support.workloads import build_model, patch_grid, qwen_vl_config, video_prompt

# Allowed difference, relative to the largest value: the two ways round differently in every layer.
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
WAYS = {"sdpa": nullcontext, "packed": packed_vision_attention}


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision tower; windows of 112 pixels, and every eighth layer sees whole frames."""

    depth: int = 32
    hidden: int = 256
    heads: int = 4

    def build(self, dtype: str, device: str) -> ModelParts:
        """Build a model that has this tower, and else as little as possible."""
        config = qwen_vl_config(
            layers=1,
            hidden=64,
            intermediate=64,
            heads=4,
            kv_heads=2,
            vocab=2048,
            vision_depth=self.depth,
            vision_hidden=self.hidden,
            vision_heads=self.heads,
        )
        return inspect_model(build_model(config, getattr(torch, dtype), device))


class AttentionCalls(TorchDispatchMode):
    """Counts the attention operators that run on a device, each as one, however many sequences it gets."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the operator, and run it."""
        self.count += any(part in str(func) for part in ("_attention", "flash_attn"))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def measure(tower: Tower, num_frames: int, size: tuple[int, int], dtype: str, device: str, rounds: int) -> dict:
    """Time a tower over a video's frames in both ways, and count their attention calls.

    Args:
        num_frames: of the video; two make a temporal patch.
        size: (height, width) of a frame in pixels.
        dtype: of weights and pixels, by name.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: timed runs of each way, after one that is not timed.

    Returns:
        What was measured, and by way the number of calls, the median seconds by the clock and of this process's
        CPU time, which other processes disturb less, and the raw seconds.

    Raises:
        AssertionError: the two ways do not give the same embeddings.
    """
    parts = tower.build(dtype, device)
    batch = video_prompt(num_frames, *size, query_len=8).batch
    pixels, grid = (batch[name].to(device) for name in ("pixel_values_videos", "video_grid_thw"))

    def encode() -> Tensor:
        features = parts.model.model.get_video_features(pixels, grid, return_dict=True)
        synchronize(parts.device)
        return torch.cat(features.pooler_output)

    calls, rows = {}, {}
    seconds, cpu_seconds = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for way, in_force in WAYS.items():
        with in_force(parts), AttentionCalls() as counter:
            rows[way] = encode()
        calls[way] = counter.count
    error = float((rows["packed"] - rows["sdpa"]).abs().max() / rows["sdpa"].abs().max())
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"the embeddings differ by {error:.2g} of the largest")
    for _ in range(rounds):
        for way, in_force in WAYS.items():
            with in_force(parts):
                began, cpu_began = time.perf_counter(), time.process_time()
                encode()
                seconds[way].append(time.perf_counter() - began)
                cpu_seconds[way].append(time.process_time() - cpu_began)
    return {
        "tower": asdict(tower),
        "frames": num_frames,
        "grid": list(patch_grid(num_frames, *size)),
        "dtype": dtype,
        "device": device_name(parts.device),
        "threads": torch.get_num_threads(),
        "error": error,
        "ways": {
            way: {
                "attention_calls": calls[way],
                "seconds": statistics.median(seconds[way]),
                "cpu_seconds": statistics.median(cpu_seconds[way]),
                "raw": seconds[way],
            }
            for way in WAYS
        },
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--resolution", type=parse_resolution, default="720p", metavar="HxW|720p|…")
    parser.add_argument("--depth", type=int, default=Tower.depth)
    parser.add_argument("--hidden", type=int, default=Tower.hidden)
    parser.add_argument("--heads", type=int, default=Tower.heads)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the figures as JSON."""
    options = parse_arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tower = Tower(options.depth, options.hidden, options.heads)
    dtype = options.dtype or DEFAULT_DTYPES[device]
    print(json.dumps(measure(tower, options.frames, options.resolution, dtype, device, options.rounds)))


if __name__ == "__main__":
    main()
