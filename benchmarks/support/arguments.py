"""Reads the command-line options of the benchmarks, which options.toml describes, and their
presets."""

import argparse
import re
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apbv.config import REUSE_MODES
from apbv.launch.options import PREFILL, OptionParser, add_settings, positive
from apbv.versions import how_to_install

from . import clips

DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # by device
COUNT = positive(int)


def _plot_path(text: str) -> Path:
    """Parse --plot and check for matplotlib before anything is measured."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"needs matplotlib: {how_to_install('plot')}")
    return Path(text)


def _template(text: str) -> str:
    if "{question}" not in text:
        raise argparse.ArgumentTypeError("must contain {question}, and may contain {options}")
    return text.replace("\\n", "\n")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 ≤ I ≤ N, such as 1/4, not {text!r}")
    return int(found[1]), int(found[2])


_TYPES = {
    "int": int,
    "float": float,
    "path": Path,
    "count": COUNT,
    "plot": _plot_path,
    "template": _template,
}
_TYPES |= {"positive": positive(float), "share": positive(float, 1.0), "I/N": _shard}
_TYPES |= {"N|all": lambda text: None if text == "all" else COUNT(text)}
_TYPES |= {"N|auto": lambda text: text if text == "auto" else COUNT(text)}
_TYPES |= {"FILE|none": lambda text: None if text == "none" else text}
_CHOICES = {
    "tasks": clips.TASKS,
    "split": clips.SPLITS,
    "grid": clips.GRIDS,
    "needles": clips.NEEDLES,
}
_CHOICES |= {"reuse": ("off", *REUSE_MODES)}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


_TABLES = read_toml(Path(__file__).with_name("options.toml"))
_TABLES["shared"]["folder"]["default"] = Path(tempfile.gettempdir(), "apbv-demo-clips")


def presets_of(benchmark: str) -> dict[str, dict]:
    """Read a benchmark's presets, by name."""
    return read_toml(Path(__file__).with_name("presets.toml"))[benchmark]


def parser_of(
    benchmark: str, description: str, choices: Mapping[str, Collection] | None = None
) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's options.

    Args:
        benchmark: a table of options.toml.
        description: what the benchmark is for, in its first line.
        choices: what can be chosen from, by the names of options, where that is known to the script
            alone.
    """
    parser = OptionParser(description=description.splitlines()[0])
    add_options(parser, benchmark, choices)
    return parser


def add_options(
    parser: argparse._ActionsContainer,
    benchmark: str,
    choices: Mapping[str, Collection] | None = None,
) -> None:
    """Add the options of a table of options.toml; see :func:`parser_of`."""
    for name, option in _with_others(benchmark).items():
        if name == "settings":
            add_settings(
                parser, [each for each in PREFILL if each.field in option], with_defaults=True
            )
        else:
            _add(parser, name, option, _CHOICES | (choices or {}))


def _with_others(benchmark: str) -> dict[str, Any]:
    """Return a table's options, with those of the tables that it is like."""
    own = dict(_TABLES[benchmark])
    others = own.pop("like", [])
    return {name: option for other in others for name, option in _with_others(other).items()} | own


def _add(
    parser: argparse._ActionsContainer, name: str, option: Any, choices: Mapping[str, Collection]
) -> None:
    if not isinstance(option, dict):
        option = _TABLES["shared"][name] | {"default": option}
    option = dict(option or _TABLES["shared"][name])
    if name in choices:
        option["choices"] = choices[name]
    if option.pop("all", False):
        option["default"] = list(option["choices"])
    if "type" in option:
        option["type"] = _TYPES[option["type"]]
    parser.add_argument(f"--{name}", **option)
