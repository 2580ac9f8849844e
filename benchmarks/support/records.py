"""Keeps the records of what was measured as files of JSON lines, reads them, and shows them."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from apbv import HostGroup
from apbv.stats import append_json_lines, provenance

Table = Callable[[list[dict]], str]
Plot = Callable[[list[dict], Path], None]


def made_by(script: str) -> dict:
    """Return how a record is made now: the command, the date, versions, and a checkout's commit.

    Args:
        script: the benchmark's file name.
    """
    return {"command": " ".join([f"benchmarks/{script}", *sys.argv[1:]]), **provenance()}


def keep_records(records: Iterable[dict], script: str, path: Path | None) -> list[dict]:
    """Say in each record how it was made, and append it to a file of JSON lines as soon as it is there.

    Args:
        records: what is measured while they are asked for.
        script: the benchmark's file name.
        path: the file; None: there is none.

    Raises:
        ValueError: the file cannot be written.
    """
    made = []
    for record in records:
        made.append({**record, **made_by(script)})
        if path is not None:
            append_json_lines(path, made[-1:])
    return made


def read_records(paths: Iterable[Path]) -> list[dict]:
    """Read the records of files of JSON lines."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def show(options: argparse.Namespace, records: list[dict], table: Table, plot: Plot | None = None) -> None:
    """Print a table of records, and plot them where ``--plot`` is given.

    Raises:
        ValueError: the plot cannot be written.
    """
    print(table(records), flush=True)
    if plot is not None and options.plot:
        plot(records, options.plot)


def write(options: argparse.Namespace, records: list[dict], table: Table, plot: Plot | None = None) -> None:
    """Print a table of records, append them where ``--json`` is given, and plot them where ``--plot`` is.

    Raises:
        ValueError: a file cannot be written.
    """
    print(table(records), flush=True)
    if options.json:
        append_json_lines(options.json, records)
    if plot is not None and options.plot:
        plot(records, options.plot)


def write_by_host_0(
    hosts: HostGroup, options: argparse.Namespace, records: list[dict], table: Table, plot: Plot | None = None
) -> None:
    """Have host 0 :func:`write` its records; collective.

    Raises:
        ValueError: a file cannot be written, on host 0.
        HostError: likewise, on the others.
    """
    with hosts.local_stage("writing the figures"):
        if hosts.rank == 0:
            write(options, records, table, plot)
