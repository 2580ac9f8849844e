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
from apbv.device.allocator import keep_freed_memory
from apbv.errors import InvalidRequestError, StorageError
from apbv.hosts import run_on_hosts
from apbv.hosts.devices import choose_device
from apbv.stats import append_json_lines, device_name, provenance

from .arguments import read_toml
from .processes import pin_host
from .summaries import percent_cell

# What a column shows of a record, by the column's header: a format, such as
# "{ttft_ms[p50]:.1f}", or a function.
Columns = Mapping[str, str | Callable[[dict], object]]
# The points (x, y) of curves, by label.
Curves = Mapping[str, Sequence[tuple[float, float]]]


def made_by() -> dict:
    """Return how a record is made now.

    These are the command, the device, the date, versions, and a checkout's commit.
    """
    command = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "command": " ".join(command),
        "device": device_name(choose_device()),
        "threads": torch.get_num_threads(),
        **provenance(),
    }


def fields_of(source: object, *names: str) -> dict:
    """Return some of an object's attributes, or of a mapping's entries, for a record."""
    if isinstance(source, Mapping):
        return {name: source[name] for name in names}
    return {name: getattr(source, name) for name in names}


def keep(records: Iterable[dict], path: Path | None) -> list[dict]:
    """Add its provenance to each record, and append it to a JSONL file at once.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    complete = []
    for record in records:
        record = {**record, **made_by()}
        complete.append(record)
        if path is not None:
            append_json_lines(path, [record])
    return complete


def read_records(paths: Iterable[Path]) -> list[dict]:
    """Read the records of files of JSON lines, without a last line that was cut off.

    Raises:
        InvalidRequestError: a file cannot be read, or holds something else.
    """
    records = []
    for path in paths:
        try:
            text = path.read_bytes()
            whole_lines = text[: text.rfind(b"\n") + 1].splitlines()
            records += [json.loads(line) for line in whole_lines]
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot read the records {path}: {error}") from error
    return records


def read_known(path: Path) -> list[dict]:
    """Read the records of a file that will be extended, and remove a last line that was cut off.

    Raises:
        InvalidRequestError: see :func:`read_records`.
    """
    if not path.exists() or path.stat().st_size == 0:
        return []
    known = read_records([path])
    if not known:
        raise InvalidRequestError(f"{path} holds no records; take another file")
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return known


def measure_what_is_left(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, HostGroup, list[dict]], Iterable[dict]],
    show: Callable[[argparse.Namespace, list[dict]], None],
) -> int:
    """Measure what the file of ``--json`` does not have, and show all records; or those of --table.

    Args:
        options: also ``table``, the files whose records are shown, where nothing is measured.
        measure: makes the records that are missing beside known ones, on all hosts; host 0 alone
            gets the known ones.
        show: prints all records, on host 0.

    Returns:
        the exit status.
    """
    if options.table:
        show(options, read_records(options.table))
        return 0

    def run(hosts: HostGroup) -> None:
        path = options.json if hosts.rank == 0 else None
        known = [] if path is None else read_known(path)
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
    """Measure records, keep them where ``--json`` is given, and print their table.

    Host 0 alone keeps and prints; every host gets the records that it measured.

    Args:
        records: equal on all hosts, or on host 0 alone.
        hosts: all hosts; None: this process alone.
    """
    if hosts is not None and hosts.rank != 0:
        return keep(records, None)
    complete = keep(records, options.json)
    print(table(complete, columns), flush=True)
    return complete


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
    if getattr(options, "pinned", False):
        # Before there are threads, which would keep their cores.
        pin_host(int(os.environ.get("LOCAL_RANK", 0)), torch.get_num_threads())

    def run(hosts: HostGroup) -> None:
        report(options, measure(options, hosts), columns, hosts)

    if "timeout" in options:
        return run_on_hosts(run, timeout=options.timeout)
    return run_on_hosts(run)


def _percent(counts: tuple[int, int]) -> str:
    return percent_cell(*counts)


def _mega(value: float) -> float:
    return value / 1e6


def _mebi(value: float) -> float:
    return value / 2**20


def _mark(value: object) -> str:
    return "yes" if value else ""


# What tables.toml lets a column compute of a value.
_COMPUTED = {
    "sum": sum,
    "mean": statistics.mean,
    "len": len,
    "percent": _percent,
    "mega": _mega,
    "mebi": _mebi,
    "mark": _mark,
}


class _Cells(string.Formatter):
    """Formats fields whose specification is words: each a format, or what to compute."""

    def format_field(self, value, spec: str) -> str:
        if value is None:
            raise TypeError("no value to format")
        for word in spec.split():
            if word in _COMPUTED:
                value = _COMPUTED[word](value)
            else:
                value = format(value, word)
        return str(value)


def columns_of(name: str) -> Columns:
    """Read the columns of a table of tables.toml."""
    return read_toml(Path(__file__).with_name("tables.toml"))[name]


def table(records: Iterable[dict], columns: Columns) -> str:
    """Format records as a Markdown table; a cell without a value is a dash."""
    rows = []
    for record in records:
        rows.append([_cell(record, column) for column in columns.values()])
    return markdown_table(columns, rows)


def _cell(record: dict, column: str | Callable[[dict], object]) -> object:
    """Return the text of a record in a column."""
    try:
        if isinstance(column, str):
            return _Cells().vformat(column, (), record)
        return column(record)
    except TypeError:
        return "–"


def markdown_table(header: Collection, rows: Iterable[Sequence], align: str = "---:") -> str:
    """Format rows of cells under a header as a Markdown table."""
    lines = []
    for row in (header, [align] * len(header), *rows):
        cells = " | ".join(str(cell) for cell in row)
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def plot(path: Path, panels: Mapping[str, Curves], ylabel: str, yscale: str = "linear") -> None:
    """Plot curves side by side as a PNG.

    The points are also the PNG's text ``Description``, as JSON: a test can compare them with the
    records.

    Args:
        panels: the curves of each panel, by the label of its x axis.
        ylabel: of the y axis, which the panels share.
        yscale: matplotlib's name of the y axis's scale.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    import matplotlib

    # Write a file, and never open a window.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Labels, in the order in which they first come: equal ones look the same in all panels.
    labels: list[str] = []
    for curves in panels.values():
        for label in curves:
            if label not in labels:
                labels.append(label)

    # Curves.
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 5.5 * len(panels), 5), sharey=True, squeeze=False
    )
    line_of_label = {}
    for axis, (xlabel, curves) in zip(axes[0], panels.items(), strict=True):
        for label, points in curves.items():
            number = labels.index(label)
            color = f"C{number % 10}"
            marker = "osD^vX"[number // 10 % 6]
            points = sorted(points)
            xs = [x for x, _ in points]
            ys = [y for _, y in points]
            lines = axis.plot(xs, ys, color=color, marker=marker)
            line_of_label[label] = lines[0]
        axis.set_xlabel(xlabel)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(ylabel)
    axes[0][0].set_yscale(yscale)

    # One legend, beside the last panel.
    axes[0][-1].legend(
        [line_of_label[label] for label in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        fontsize=8,
        frameon=False,
    )

    # The file.
    try:
        figure.savefig(
            path, dpi=150, bbox_inches="tight", metadata={"Description": json.dumps(panels)}
        )
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)
