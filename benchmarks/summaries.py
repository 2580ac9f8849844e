"""This module summarises samples and counts of correct answers."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_records(paths: Iterable[Path]) -> list[dict]:
    """Read the records of files of JSON lines."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Compute p50, p90 and p99, interpolated linearly."""
    if len(samples) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), samples[0])
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {f"p{share}": cuts[share - 1] for share in (50, 90, 99)}


def wilson(right: int, total: int) -> tuple[float, float]:
    """Compute the 95 % confidence interval of a share (Wilson's score interval)."""
    z = 1.96
    share, spread = right / total, z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def share_cell(right: int, total: int) -> str:
    """Format a share and its interval: ``0.95 (0.89-0.98)``."""
    low, high = wilson(right, total)
    return f"{right / total:.2f} ({low:.2f}-{high:.2f})"


def percent_cell(right: int, total: int) -> str:
    """Format a share and its interval in percent: ``95.0 (89-98)``."""
    low, high = wilson(right, total)
    return f"{100 * right / total:.1f} ({100 * low:.0f}-{100 * high:.0f})"
