"""Keeps what was measured as JSON lines, and shows it as a table or a plot."""

import argparse
import json
import os
import statistics
import string
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from apbv import HostGroup
from apbv.allocator import keep_freed_memory
from apbv.hosts import run_on_hosts
from apbv.hosts.devices import choose_device
from apbv.stats import append_json_lines, device_name, provenance

from .arguments import read_toml
from .processes import pin_host
from .summaries import percent_cell

# By its header what a column shows of a record: a format, such as "{ttft_ms[p50]:.1f}", or a
# function.
Columns = Mapping[str, str | Callable[[dict], object]]
# By label the (x, y) of the points of a curve.
Curves = Mapping[str, Sequence[tuple[float, float]]]


def made_by() -> dict:
    """Return how a record is made now: the command, the device, the date, versions, and a
    checkout's commit."""
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    where = {"device": device_name(choose_device()), "threads": torch.get_num_threads()}
    return {"command": command, **where, **provenance()}


def fields_of(source: object, *names: str) -> dict:
    """Return some of an object's attributes, or of a mapping's entries, for a record."""
    return {
        name: source[name] if isinstance(source, Mapping) else getattr(source, name)
        for name in names
    }


def keep(records: Iterable[dict], path: Path | None) -> list[dict]:
    """Add its provenance to each record, and append it to a JSONL file at once.

    Raises:
        ValueError: the file cannot be written.
    """
    made = []
    for record in records:
        made.append({**record, **made_by()})
        if path is not None:
            append_json_lines(path, made[-1:])
    return made


def read_records(paths: Iterable[Path]) -> list[dict]:
    """Read the records of files of JSON lines, without a last line that was cut off.

    Raises:
        ValueError: a file cannot be read, or holds something else.
    """
    found = []
    for path in paths:
        try:
            text = path.read_bytes()
            found += [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the records {path}: {error}") from error
    return found


def read_known(path: Path) -> list[dict]:
    """Read the records of a file that will be extended, and take off a last line that was cut off.

    Raises:
        ValueError: see :func:`read_records`.
    """
    if not path.exists() or not path.stat().st_size:
        return []
    known = read_records([path])
    if not known:
        raise ValueError(f"{path} holds no records; take another file")
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return known


def measure_what_is_left(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, HostGroup, list[dict]], Iterable[dict]],
    show: Callable[[argparse.Namespace, list[dict]], None],
) -> int:
    """Measure what the file of ``--json`` does not have, on all hosts, show all of it, and return
    the exit status.

    Or measure nothing, and show the files of ``--table``.

    Args:
        measure: makes the records that are missing beside known ones, which host 0 alone is given.
        show: prints them, on host 0.
    """
    if options.table:
        show(options, read_records(options.table))
        return 0

    def run(hosts: HostGroup) -> None:
        path = options.json if hosts.rank == 0 else None
        known = read_known(path) if path is not None else []
        records = known + keep(measure(options, hosts, known), path)
        if hosts.rank == 0:
            show(options, records)

    return run_on_hosts(run)


def report(
    options: argparse.Namespace,
    records: Iterable[dict],
    columns: Columns,
    hosts: HostGroup | None = None,
) -> list[dict]:
    """Measure records, keep them where ``--json`` is given, and print their table; on host 0.

    Args:
        records: equal on all hosts, or only there on host 0.
    """
    is_first = hosts is None or hosts.rank == 0
    made = keep(records, options.json if is_first else None)
    if is_first:
        print(table(made, columns), flush=True)
    return made


def measure_on_hosts(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, HostGroup], Iterable[dict]],
    columns: Columns,
) -> int:
    """Measure on the hosts that torchrun started, report it, and return the exit status.

    Args:
        options: also ``timeout`` and ``pinned``, if the benchmark has them.
        measure: yields the records, on host 0.
    """
    keep_freed_memory()
    if getattr(options, "pinned", False):  # before there are threads
        pin_host(int(os.environ.get("LOCAL_RANK", 0)), torch.get_num_threads())
    waiting = {"timeout": options.timeout} if "timeout" in options else {}
    return run_on_hosts(
        lambda hosts: report(options, measure(options, hosts), columns, hosts), **waiting
    )


# What tables.toml lets a column compute of a value.
_COMPUTED = {
    "sum": sum,
    "mean": statistics.mean,
    "len": len,
    "percent": lambda counts: percent_cell(*counts),
}
_COMPUTED |= {"mega": lambda value: value / 1e6, "mebi": lambda value: value / 2**20}
_COMPUTED |= {"mark": lambda value: "yes" if value else ""}


class _Cells(string.Formatter):
    def format_field(self, value, spec: str) -> str:
        if value is None:
            raise TypeError("no value to format")
        for word in spec.split():
            value = _COMPUTED[word](value) if word in _COMPUTED else format(value, word)
        return str(value)


def columns_of(name: str) -> Columns:
    """Read the columns of a table of tables.toml."""
    return read_toml(Path(__file__).with_name("tables.toml"))[name]


def table(records: Iterable[dict], columns: Columns) -> str:
    """Format records as a Markdown table; a cell without a value is a dash."""

    def cell(record: dict, column) -> object:
        try:
            return (
                _Cells().vformat(column, (), record) if isinstance(column, str) else column(record)
            )
        except TypeError:
            return "–"

    return markdown_table(
        columns, [[cell(record, column) for column in columns.values()] for record in records]
    )


def markdown_table(header: Collection, rows: Iterable[Sequence], align: str = "---:") -> str:
    """Format rows of cells under a header as a Markdown table."""
    lines = [header, [align] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def plot(path: Path, panels: Mapping[str, Curves], ylabel: str, yscale: str = "linear") -> None:
    """Plot curves side by side as a PNG, in panels that are called by what their x is.

    The points are also the PNG's text ``Description``, as JSON: a test can compare them with the
    records.

    Args:
        yscale: matplotlib's name of the y axis's scale.

    Raises:
        ValueError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    drawn = {}  # by label one of its curves, for the legend
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 5.5 * len(panels), 5), sharey=True, squeeze=False
    )
    for axis, (xlabel, curves) in zip(axes[0], panels.items(), strict=True):
        for label, points in curves.items():
            number = labels.index(label)
            style = {"color": f"C{number % 10}", "marker": "osD^vX"[number // 10 % 6]}
            (drawn[label],) = axis.plot(*zip(*sorted(points), strict=True), **style)
        axis.set_xlabel(xlabel)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(ylabel)
    axes[0][0].set_yscale(yscale)  # the panels share the axis
    lines = [drawn[label] for label in labels]
    axes[0][-1].legend(
        lines,
        labels,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        fontsize=8,
        frameon=False,
    )
    try:
        figure.savefig(
            path, dpi=150, bbox_inches="tight", metadata={"Description": json.dumps(panels)}
        )
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)
