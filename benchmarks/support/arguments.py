"""Holds the command-line options that several benchmarks share."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from . import clips

DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # by device
DTYPES = ("float32", "bfloat16", "float16")


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")


def add_plot_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--plot PNG``."""
    parser.add_argument("--plot", type=_plot_path, metavar="PNG", help="draw the figures; needs matplotlib")


def _plot_path(text: str) -> Path:
    """Read where to draw to, before anything is measured that could not be drawn."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib")
    return Path(text)


def add_table_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--table FILE …``."""
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="measure nothing: show such files")


def add_folder_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--folder``, in which clips' files are kept."""
    parser.add_argument(
        "--folder", type=Path, help="where the clips' files are kept (default: a temporary folder)"
    )


def add_clip_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--grid`` and ``--folder``, which say what clips look like and where their files are kept."""
    parser.add_argument("--grid", type=int, choices=clips.GRIDS, default=2, help="tokens per side of a frame")
    add_folder_option(parser)


def add_exam_options(parser: argparse._ActionsContainer, num_clips: int, num_shots: int) -> None:
    """Add ``--clips``, ``--shots``, ``--split``, ``--grid`` and ``--folder``, which define an exam.

    Args:
        num_clips, num_shots: the defaults: how many clips there are, and how long they are.
    """
    parser.add_argument("--clips", type=int, default=num_clips)
    parser.add_argument("--shots", type=int, default=num_shots, help="length of the clips")
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    add_clip_options(parser)


def length_or_default(text: str) -> int | None:
    """Read an option's number of tokens; ``default`` is None."""
    if text == "default":
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f'expected a number from 0, or "default", not {text!r}')
    return int(text)
