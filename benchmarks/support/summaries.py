"""Summarises samples and counts of correct answers."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


def grouped(records: Iterable[dict], *names: str) -> dict[tuple, list[dict]]:
    """Return the records by their values of some fields, in the order in which these first come."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        values = tuple(record[name] for name in names)
        groups.setdefault(values, []).append(record)
    return groups


def sum_counts(counts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """Add up how many of all answers were right, by task."""
    sums: dict[str, tuple[int, int]] = {}
    for by_task in counts:
        for task, (right, total) in by_task.items():
            right_before, total_before = sums.get(task, (0, 0))
            sums[task] = (right_before + right, total_before + total)
    return sums


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Compute p50, p90 and p99, interpolated linearly."""
    return {f"p{share}": float(np.percentile(samples, share)) for share in (50, 90, 99)}


def wilson(right: int, total: int) -> tuple[float, float]:
    """Compute the 95 % confidence interval of a share (Wilson's score interval)."""
    z = 1.96
    share = right / total
    spread = z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def percent_cell(right: int, total: int) -> str:
    """Format a share and its interval in percent, such as ``95.0 (89-98)``; "" without answers."""
    if not total:
        return ""
    low, high = wilson(right, total)
    return f"{100 * right / total:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def mean_cell(samples: Sequence[float], form: str) -> str:
    """Format a mean and half its 95 % confidence interval, such as ``0.042 ± 0.010``.

    The interval is Student's t; one sample has none.

    Args:
        form: the format of the mean, such as ``+.3f``.
    """
    mean = format(statistics.fmean(samples), form)
    if len(samples) < 2:
        return mean
    half = student_t(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    unsigned = form.removeprefix("+")
    return f"{mean} ± {format(half, unsigned)}"


def student_t(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t by its degrees of freedom.

    From 3 on it is the series of Abramowitz and Stegun, 26.7.5, within 1 %.
    """
    if freedom == 1:
        return 12.706
    if freedom == 2:
        return 4.303
    z = 1.96
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
