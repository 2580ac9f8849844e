"""Gives the benchmarks' plots readable ticks, and legends that hide nothing."""

from collections.abc import Iterable
from pathlib import Path


def import_pyplot():
    """Import matplotlib.pyplot, set up to need no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def short(number: int) -> str:
    """Format a count, in units of 1,024 or 1,048,576 where these divide it: 128k."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)


def mark_values(axis, values: Iterable[int]) -> None:
    """Put an axis's ticks at the measured values, on a logarithmic scale where these are positive."""
    ticks = sorted(set(values))
    if len(ticks) > 1 and ticks[0] > 0:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(ticks, [short(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def mark_factors(axis) -> None:
    """Make an axis logarithmic and label its powers of two as factors: 8 ×."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(_locator(base=2))
    axis.set_major_formatter(lambda value, _: f"{value:g} ×")
    axis.set_ticks([], minor=True)


def _locator(base: int):
    from matplotlib.ticker import LogLocator

    return LogLocator(base=base)


def legend_beside(axes) -> None:
    """Put the legend to the right of the axes."""
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, handlelength=3, fontsize=8, frameon=False
    )


def legend_above(axes) -> None:
    """Put the legend above the axes."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)


def save(figure, path: Path) -> None:
    """Write a figure as a PNG, with everything beside its axes, and close it.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    finally:
        import_pyplot().close(figure)
