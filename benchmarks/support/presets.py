"""Reads the presets of benchmarks, which are data: support/presets.toml."""

import tomllib
from functools import cache
from pathlib import Path


@cache
def _presets() -> dict:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def presets_of(benchmark: str) -> dict[str, dict]:
    """Return a benchmark's presets by name."""
    return _presets()[benchmark]
