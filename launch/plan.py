"""Say whether a prompt will fit in memory, before any weights are loaded.

    python launch/plan.py --model demo --frames 64
    python launch/plan.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames 512 --hosts 8 --device-memory 80
    python launch/plan.py --model Qwen/Qwen2.5-VL-7B-Instruct --frames 512 --reduce fastvid --reduce-ratio 0.25

The exit status is 0 where it fits, and 1 where it does not.
"""

import argparse
import sys

from apbv.config import DTYPE_NAMES, KV_PLACEMENTS, METHOD_NAMES, PrefillConfig, SpeculativeConfig
from apbv.launch.options import OptionParser, exit_with
from apbv.launch.reduction import add_reduce_options, reduce_config
from apbv.launch.sparse import add_sparse_options, sparse_config


def parse_arguments(arguments: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Read the options, which ends the process where one is wrong."""
    parser = OptionParser(prog, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", required=True, help='"demo", a directory, or a hub id; its weights are not read'
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--frames", type=int, help="frames sampled from a video")
    prompt.add_argument("--tokens", type=int, help="tokens of a long text")
    parser.add_argument("--resolution", default="720p", help='of the video: "HxW", or such as 720p (default)')
    parser.add_argument("--audio-seconds", type=float, default=0.0, help="so long it is heard (default 0)")
    parser.add_argument("--hosts", type=int, default=1, help="processes, or groups of them (default 1)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="T", help="GPUs of a host (default 1)")
    defaults = PrefillConfig()
    parser.add_argument("--method", choices=METHOD_NAMES, default=defaults.method, help="default %(default)s")
    parser.add_argument("--anchor-len", type=int, help="anchor tokens (default: from the prompt's length)")
    parser.add_argument("--passing-len", type=int, help="KV pairs that each block passes on (default: likewise)")
    add_reduce_options(parser)
    add_sparse_options(parser)
    parser.add_argument("--kv", choices=KV_PLACEMENTS, default=defaults.kv, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="auto", help="default auto: the model's")
    parser.add_argument("--draft-model", metavar="PATH", help="a draft model, of which account is taken")
    parser.add_argument("--keep-ratio", type=float, help="the share of visual tokens that it sees (default 0.1)")
    parser.add_argument(
        "--device-memory", type=float, metavar="GB", help="what each process may take (default: what is free here)"
    )
    options = parser.parse_args(arguments)
    if options.keep_ratio is not None and options.draft_model is None:
        parser.error("--keep-ratio needs --draft-model")
    try:
        prefill_config(options)
    except ValueError as error:
        parser.error(str(error))
    if options.device_memory is not None and not options.device_memory > 0:
        parser.error(f"--device-memory must be a positive number of GB, not {options.device_memory}")
    return options


def prefill_config(options: argparse.Namespace) -> PrefillConfig:
    """Make the settings of prefill; ValueError where a value is out of range."""
    return PrefillConfig(
        method=options.method,
        anchor_len=options.anchor_len,
        passing_len=options.passing_len,
        kv=options.kv,
        sparse=sparse_config(options),
        reduce=reduce_config(options),
    )


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Print the plan, and return the exit status."""
    options = parse_arguments(arguments, prog)
    # Only now what takes seconds to import.
    from apbv import plan

    try:
        draft = options.draft_model
        planned = plan(
            options.model,
            frames=options.frames,
            resolution=options.resolution,
            audio_seconds=options.audio_seconds,
            tokens=options.tokens,
            hosts=options.hosts,
            tensor_parallel=options.tensor_parallel,
            prefill=prefill_config(options),
            speculate=draft and SpeculativeConfig(draft_model=draft, keep_ratio=options.keep_ratio),
            dtype=options.dtype,
            device_memory=options.device_memory and round(options.device_memory * 1e9),
        )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(planned)
    return 0 if planned.fits else 1


if __name__ == "__main__":
    exit_with(main)
