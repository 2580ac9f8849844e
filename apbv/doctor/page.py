"""The page that is printed as checks end, and the same as a JSON object."""

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

from ..hosts import HostGroup
from ..stats import device_name, provenance
from .examination import FAILED, SKIPPED, HostResult, Result

WIDTH = 100
_NAME_WIDTH = 24
_MOST_CHARACTERS = 400  # of a detail: some libraries' errors are pages by themselves
_HEADINGS = {
    "machine": "The machine",
    "backends": "Back ends of attention",
    "kernels": "Operators: the worst error, as a share of what the dtype allows",
    "hosts": "What hosts exchange",
    "demo": "The demo model's answers",
}


class Page:
    """Is written check by check, so that something can be read while the rest is computed.

    Args:
        hosts: the hosts that are examined.
        file: where it goes; None: nowhere.
    """

    def __init__(self, hosts: HostGroup, file: TextIO | None):
        self._hosts, self._file = hosts, file
        self._part: str | None = None
        what = provenance()
        number = f"{hosts.size} host{'s' if hosts.size > 1 else ''}"
        commit = f", commit {what['git_sha'][:9]}" if what["git_sha"] else ""
        self._write(
            f"apbv {what['versions']['apbv']}{commit}: {number}, {device_name(hosts.device)}, {what['date']}"
        )

    def add(self, result: Result) -> None:
        """Write what became of a check."""
        if result.part != self._part:
            self._part = result.part
            self._write(f"\n{_HEADINGS[result.part]}")
        for verdict, detail in _told(result, self._hosts):
            start = f"  {verdict.status:<8} {result.check.name:<{_NAME_WIDTH}} "
            detail = textwrap.shorten(detail, _MOST_CHARACTERS, placeholder=" …")
            text = textwrap.fill(detail, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
            self._write(text or start.rstrip())

    def end(self, results: list[Result]) -> None:
        """Write the sum."""
        failed = [result for result in results if result.status == FAILED]
        skipped = sum(result.status == SKIPPED for result in results)
        num_ok = len(results) - len(failed) - skipped
        self._write(f"\n{num_ok} ok, {skipped} skipped, {len(failed)} failed")
        for result in failed:
            hosts = [self._hosts.name_of(i) for i, each in enumerate(result.verdicts) if each.status == FAILED]
            self._write(f"  failed: {result.check.name} ({result.part}) on {', '.join(hosts)}")

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()


def record(results: list[Result], hosts: HostGroup, options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was found, JSON-ready."""
    return {
        "benchmark": "doctor",
        "hosts": hosts.size,
        "device": device_name(hosts.device),
        "parts": list(options.parts),
        "healthy": all(result.status != FAILED for result in results),
        "checks": [
            {
                "part": result.part,
                "name": result.check.name,
                "status": result.status,
                "on_hosts": [asdict(verdict) for verdict in result.verdicts],
            }
            for result in results
        ],
        **provenance(),
    }


def _told(result: Result, hosts: HostGroup) -> Iterator[tuple[HostResult, str]]:
    """Yield what the page says of a check: what host 0 found, and what others found that matters.

    With the name of whom it is about, where it does not hold for all.
    """
    verdicts = result.verdicts
    groups: dict[tuple[str, str], list[int]] = {}
    for host, verdict in enumerate(verdicts):
        is_like_first = verdict.status == verdicts[0].status != FAILED and not result.check.is_per_host
        detail = verdicts[0].detail if is_like_first else verdict.detail
        groups.setdefault((verdict.status, detail), []).append(host)
    for (_, detail), members in groups.items():
        verdict = verdicts[members[0]]
        names = ", ".join(hosts.name_of(host) for host in members)
        yield verdict, detail if len(groups) == 1 else f"{names}: {detail}"
