"""Reads the benchmarks' command-line options, which options.toml describes, and their presets."""

import argparse
import re
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apbv.compat.versions import how_to_install
from apbv.config import REUSE_MODES
from apbv.launch.options import PREFILL, OptionParser, add_settings, positive
from apbv.testing import clips

DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # by device
COUNT = positive(int)


def _plot_path(text: str) -> Path:
    """Parse --plot and check for matplotlib before anything is measured."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"needs matplotlib: {how_to_install('plot')}")
    return Path(text)


def _template(text: str) -> str:
    """Parse a prompt's template, whose line breaks are written as backslash and n."""
    if "{question}" not in text:
        raise argparse.ArgumentTypeError("must contain {question}, and may contain {options}")
    return text.replace("\\n", "\n")


def _shard(text: str) -> tuple[int, int]:
    """Parse I/N, the I-th of N parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match:
        number = int(match[1])
        count = int(match[2])
        if 1 <= number <= count:
            return number, count
    raise argparse.ArgumentTypeError(f"expected I/N with 1 ≤ I ≤ N, such as 1/4, not {text!r}")


def _count_or_all(text: str) -> int | None:
    """Parse a count; "all" is None."""
    return None if text == "all" else COUNT(text)


def _count_or_auto(text: str) -> int | str:
    """Parse a count, or "auto", which stays."""
    return text if text == "auto" else COUNT(text)


def _file_or_none(text: str) -> str | None:
    """Parse a file's name; "none" is None."""
    return None if text == "none" else text


# What options.toml calls the types of options.
_TYPES = {
    "int": int,
    "float": float,
    "path": Path,
    "count": COUNT,
    "plot": _plot_path,
    "template": _template,
    "positive": positive(float),
    "share": positive(float, 1.0),
    "I/N": _shard,
    "N|all": _count_or_all,
    "N|auto": _count_or_auto,
    "FILE|none": _file_or_none,
}
# What can be chosen from, by the option's name.
_CHOICES = {
    "tasks": clips.TASKS,
    "split": clips.SPLITS,
    "grid": clips.GRIDS,
    "needles": clips.NEEDLES,
    "reuse": ("off", *REUSE_MODES),
}


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
    all_choices = dict(_CHOICES)
    if choices is not None:
        all_choices.update(choices)
    for name, option in _with_others(benchmark).items():
        if name == "settings":
            settings = [setting for setting in PREFILL if setting.field in option]
            add_settings(parser, settings, with_defaults=True)
        else:
            _add(parser, name, option, all_choices)


def _with_others(benchmark: str) -> dict[str, Any]:
    """Return a table's options, with the options of the tables that it is like."""
    table = dict(_TABLES[benchmark])
    options: dict[str, Any] = {}
    for other in table.pop("like", []):
        options.update(_with_others(other))
    options.update(table)
    return options


def _add(
    parser: argparse._ActionsContainer, name: str, option: Any, choices: Mapping[str, Collection]
) -> None:
    """Add an option; options.toml says at its top how one is described."""
    if option == {}:
        arguments = dict(_TABLES["shared"][name])
    elif isinstance(option, dict):
        arguments = dict(option)
    else:
        arguments = dict(_TABLES["shared"][name])
        arguments["default"] = option
    if name in choices:
        arguments["choices"] = choices[name]
    if arguments.pop("all", False):
        arguments["default"] = list(arguments["choices"])
    if "type" in arguments:
        arguments["type"] = _TYPES[arguments["type"]]
    parser.add_argument(f"--{name}", **arguments)
