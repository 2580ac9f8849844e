"""This module holds the command-line options that several benchmarks share."""

import argparse
import sys
from pathlib import Path

from apbv.demo import clips
from apbv.stats import append_json_lines, provenance

DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # by device
DTYPES = ("float32", "bfloat16", "float16")


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")


def add_plot_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--plot PNG``."""
    parser.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")


def add_clip_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--grid`` and ``--folder``, which say what clips look like and where their files are kept."""
    parser.add_argument("--grid", type=int, choices=clips.GRIDS, default=2, help="tokens per side of a frame")
    parser.add_argument(
        "--folder", type=Path, help="where the clips' files are kept (default: a temporary folder)"
    )


def command_line(script: str) -> str:
    """Return the command that runs now, for a benchmark's records.

    Args:
        script: the benchmark's file name.
    """
    return " ".join([f"benchmarks/{script}", *sys.argv[1:]])


def kept(record: dict, script: str, path: Path | None) -> dict:
    """Say in a record how it was made, append it to a file of JSON lines, if one is given, and return it.

    Args:
        script: the benchmark's file name.
    """
    record = {**record, "command": command_line(script), **provenance()}
    if path is not None:
        append_json_lines(path, [record])
    return record
