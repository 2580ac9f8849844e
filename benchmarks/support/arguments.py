"""The command-line options that several benchmarks share."""

import argparse
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

from apbv.launch.options import PREFILL, add_settings, positive

from . import clips

DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # by device
DTYPES = ("float32", "bfloat16", "float16")
COUNT = positive(int)


def _plot_path(text: str) -> Path:
    """Parse --plot and check for matplotlib before anything is measured."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib")
    return Path(text)


_TEMPORARY = Path(tempfile.gettempdir(), "apbv-demo-clips")
_SHARED = {
    "model": {"default": "demo", "help": "demo, a directory or a hub id"},
    "tokens": {"type": COUNT, "nargs": "+", "help": "prompt lengths"},
    "frames": {"type": COUNT, "help": "frames of a video (default %(default)s)"},
    "tasks": {"nargs": "+", "choices": clips.TASKS, "help": "tasks on the demo's clips"},
    "keep_ratio": {"type": float, "nargs": "+", "default": [0.1], "help": "share of visual tokens (default 0.1)"},
    "seed": {"type": int, "default": 0},
    "json": {"type": Path, "metavar": "FILE", "help": "append the results as JSON lines"},
    "plot": {"type": _plot_path, "metavar": "PNG", "help": "plot the results; needs matplotlib"},
    "table": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "only print results from these files"},
    "rounds": {"type": COUNT, "help": "interleaved repetitions of each measurement"},
    "warmup": {"type": int, "help": "warm-up rounds, not measured"},
    "pinned": {"action": "store_true", "help": "pin each host to cores of its own, one per thread"},
    "dtype": {"choices": DTYPES, "help": "weight dtype (default: bfloat16 on a GPU)"},
    "timeout": {"type": float, "help": "seconds to wait for a host (default %(default)g)"},
    "max_new_tokens": {"type": COUNT, "help": "longest answer (default %(default)s tokens)"},
    # Prompts, and simulated hosts.
    "query_len": {"type": COUNT, "default": 32, "help": "question tokens (default 32)"},
    "hosts": {"type": COUNT, "nargs": "+", "help": "numbers of simulated hosts (default %(default)s)"},
    "bandwidth": {"type": float, "default": 200e9, "help": "of simulated links, bytes/s (default: NVLink's)"},
    "latency": {"type": float, "default": 10e-6, "help": "of simulated links, seconds"},
    # The demo's clips.
    "clips": {"type": COUNT, "help": "number of clips"},
    "shots": {"type": COUNT, "help": "shots per clip"},
    "split": {"choices": clips.SPLITS, "default": "test"},
    "grid": {"type": int, "choices": clips.GRIDS, "default": 2, "help": "tokens per side of a frame (default 2)"},
    "folder": {"type": Path, "default": _TEMPORARY, "help": "directory for the clips"},
}


def presets_of(benchmark: str) -> dict[str, dict]:
    """Read a benchmark's presets, by name."""
    path = Path(__file__).with_name("presets.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))[benchmark]


def add_shared(parser: argparse._ActionsContainer, *names: str, **defaults) -> None:
    """Add options that are described here, those with a default by keyword."""
    for name in (*names, *defaults):
        own = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **_SHARED[name] | own)


def add_clip_options(parser: argparse._ActionsContainer, clips: int, shots: int) -> None:
    """Add the options that define an exam, with the default number and length of its clips."""
    add_shared(parser, "split", "grid", "folder", clips=clips, shots=shots)


def add_prefill_settings(parser: argparse._ActionsContainer, *fields: str) -> None:
    """Add options that are fields of :class:`apbv.PrefillConfig`."""
    add_settings(parser, [each for each in PREFILL if each.field in fields], with_defaults=True)


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add options that define a target, its prefill and its draft; see :func:`.drafting.build_ways`."""
    add_shared(parser, "model")
    parser.add_argument("--draft-model", help="demo, a directory or a hub id (demo: the bundled draft)")
    parser.add_argument("--scale", type=COUNT, default=1, help="copies of each target layer (Qwen2.5-VL)")
    add_prefill_settings(parser, "method", "kv")
