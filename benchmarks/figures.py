"""What the benchmarks' figures have in common: readable ticks, and legends that hide nothing."""

from collections.abc import Iterable
from pathlib import Path


def import_pyplot():
    """matplotlib.pyplot, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def short(number: int) -> str:
    """A count, in units of 1,024 or 1,048,576 where that leaves nothing out: 128k."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if number and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)


def mark_values(axis, values: Iterable[int]) -> None:
    """Give an axis the ticks at which something was measured, evenly spread where they double."""
    ticks = sorted(set(values))
    if len(ticks) > 1 and ticks[0] > 0:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(ticks, [short(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def mark_factors(axis) -> None:
    """Write the powers of two of a logarithmic axis out: 8 ×."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(_locator(base=2))
    axis.set_major_formatter(lambda value, _: f"{value:g} ×")
    axis.set_ticks([], minor=True)


def _locator(base: int):
    from matplotlib.ticker import LogLocator

    return LogLocator(base=base)


def legend_beside(axes) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, handlelength=3, fontsize=8, frameon=False
    )


def legend_above(axes) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)


def save(figure, path: Path) -> None:
    """With all that was written beside the axes."""
    figure.savefig(path, dpi=150, bbox_inches="tight")
    import_pyplot().close(figure)
