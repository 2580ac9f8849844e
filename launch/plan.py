"""Estimate whether a prompt fits in memory, without loading weights.

    python launch/plan.py --model demo --frames 64
    python launch/plan.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames 512 --hosts 8 \
        --device-memory 80
    python launch/plan.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames 512 --reduce fastvid \
        --reduce-ratio 0.25

The exit status is 0 if it fits, and 1 if it does not; errors have others (docs/library.md).
"""

import argparse
import sys

from apbv.config import DTYPE_NAMES, SpeculativeConfig
from apbv.errors import ApbvError
from apbv.launch.options import (
    PREFILL,
    REDUCE,
    OptionParser,
    add_settings,
    exit_with,
    positive,
    prefill_config,
)

# The prefill settings that a plan depends on.
_OF_PREFILL = (
    "method",
    "anchor_len",
    "passing_len",
    "early_passing_len",
    "passing_budget",
    "passing_weights",
    "kv",
)


def parse_arguments(
    arguments: list[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Parse and check the options; exits if one is wrong."""
    parser = OptionParser(
        prog, "%(prog)s --model MODEL [options]", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", required=True, help='"demo", a directory, or a hub id; weights are not read'
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--frames", type=int, help="frames sampled from a video")
    prompt.add_argument("--tokens", type=int, help="tokens of a text prompt")
    parser.add_argument(
        "--resolution", default="720p", help='video resolution: "HxW", or such as 720p (default)'
    )
    parser.add_argument("--hosts", type=int, default=1, help="sequence-parallel size (default 1)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="T", help="GPUs per host (default 1)"
    )
    parser.add_argument(
        "--expert-parallel", action="store_true", help="with whole experts on each GPU of a host"
    )
    prefill_settings = [setting for setting in PREFILL if setting.field in _OF_PREFILL]
    add_settings(parser, prefill_settings, with_defaults=True)
    add_settings(parser, REDUCE)
    parser.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="auto", help="weight dtype; auto: the model's"
    )
    parser.add_argument(
        "--draft-model", metavar="PATH", help="draft model to include in the estimate"
    )
    parser.add_argument(
        "--keep-ratio", type=float, help="share of visual tokens it sees (default 0.1)"
    )
    parser.add_argument(
        "--device-memory",
        type=positive(),
        metavar="GB",
        help="memory per process (default: what is free here)",
    )
    options = parser.parse_args(arguments)
    if options.keep_ratio is not None and options.draft_model is None:
        parser.error("--keep-ratio needs --draft-model")
    with parser.rejecting():
        options.prefill = prefill_config(options)
    return options


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Print the plan; return the exit status."""
    options = parse_arguments(arguments, prog)
    # Imported here because this takes seconds.
    from apbv import plan

    try:
        speculate = None
        if options.draft_model:
            speculate = SpeculativeConfig(
                draft_model=options.draft_model, keep_ratio=options.keep_ratio
            )
        device_memory = None
        if options.device_memory is not None:
            device_memory = round(options.device_memory * 1e9)
        planned = plan(
            options.model,
            prefill=options.prefill,
            speculate=speculate,
            device_memory=device_memory,
            num_frames=options.frames,
            tokens=options.tokens,
            resolution=options.resolution,
            hosts=options.hosts,
            tensor_parallel=options.tensor_parallel,
            expert_parallel=options.expert_parallel,
            dtype=options.dtype,
        )
    except ApbvError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    print(planned)
    return 0 if planned.fits else 1


if __name__ == "__main__":
    exit_with(main)
