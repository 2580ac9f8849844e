"""Runs checks on all hosts, even if some fail, crash or hang, and writes the results as text and
JSON."""

import argparse
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as StillRunning
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TextIO

import torch

from ..hosts import HostGroup, in_thread
from ..stats import device_name, provenance

OK = "ok"
FAILED = "failed"
SKIPPED = "skipped"
WIDTH = 100
_NAME_WIDTH = 24
_MOST_CHARACTERS = 400  # of a detail: some libraries' errors are pages by themselves
# Parts in which the page shows what every host found, where it differs.
_OF_EACH_HOST = ("machine", "backends")


# A check's result in words for the page, and in JSON-ready numbers.
Found = tuple[str, dict[str, Any]]


class CheckFailed(Exception):
    """Raised if a check fails; the message says what does not work."""


class CheckSkipped(Exception):
    """Raised if a check does not apply here; the message says why. Raised on all hosts or none if
    collective."""


@dataclass(frozen=True)
class Finding:
    """Result of a check on one host.

    Attributes:
        detail: in words, for the page: what was found, or why the check failed or was skipped.
        figures: in numbers, JSON-ready.
        status: ``"ok"``, ``"failed"`` or ``"skipped"``.
        seconds: how long it took.
        is_stuck: whether it still runs: it was given up.
    """

    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    status: str = OK
    seconds: float = 0.0
    is_stuck: bool = False


@dataclass(frozen=True)
class Check:
    """One check, run on every host.

    Attributes:
        name: unique within its part.
        run: examines the group that it gets; raises whatever it likes.
        is_collective: whether hosts exchange data in it: then a failure of one is told to the
            others.
    """

    name: str
    run: Callable[[HostGroup], Found]
    is_collective: bool = False


@dataclass(frozen=True)
class Result:
    """Results of a check on all hosts, host 0 first; the same on every host."""

    part: str
    name: str
    on_hosts: list[Finding]

    @property
    def status(self) -> str:
        """``"failed"`` where it failed on one host, ``"skipped"`` where it was skipped on all."""
        found = {each.status for each in self.on_hosts}
        return next(status for status in (FAILED, OK, SKIPPED) if status in found)


def carry_out(check: Check, hosts: HostGroup, limit: float) -> Finding:
    """Run a check on this host, in a thread that is abandoned after ``limit`` seconds; never
    raises."""
    began = time.monotonic()
    is_stuck = False
    thread = in_thread(partial(_examine, check, hosts))
    try:
        error = thread.exception(timeout=limit)
    except StillRunning:
        error = CheckFailed(f"not done after {limit:g} s")
        is_stuck = True
    if error is None:
        detail, figures, status = *thread.result(), OK
    else:
        is_ours = isinstance(error, CheckFailed | CheckSkipped)
        detail = str(error) if is_ours else f"{type(error).__name__}: {error}".splitlines()[0]
        figures = {}
        status = SKIPPED if isinstance(error, CheckSkipped) else FAILED
    return Finding(detail, figures, status, time.monotonic() - began, is_stuck)


@torch.no_grad()
def _examine(check: Check, hosts: HostGroup) -> Found:
    """Run a check until its GPU work is done, so that an error there is attributed to it."""
    with hosts.on_device():
        with hosts.collective_stage(check.name) if check.is_collective else nullcontext():
            found = check.run(hosts)
        if hosts.device.type == "cuda":
            torch.cuda.synchronize(hosts.device)
    return found


class Examination:
    """Runs checks on all hosts of a group; every method is collective.

    Checks run in a separate group of the same hosts; the given group exchanges the results. A check
    that breaks its group therefore affects nothing else: the next one gets a new group. If none can
    be made, as on a GPU that an error has left unusable, the results so far are still reported.

    Args:
        hosts: the hosts, of one process each.
        limit: seconds after which a check is given up.
        file: where the page goes, line by line as checks end; None: nowhere.

    Attributes:
        stuck: why nothing more can be examined, such as a check that was given up and may still
            run; None: it can.
    """

    def __init__(self, hosts: HostGroup, limit: float, file: TextIO | None = None):
        self._hosts = hosts
        self._limit = limit
        self._file = file
        self.stuck: str | None = None
        self._examined = hosts.subgroup(range(hosts.size))

    def run(self, parts: Mapping[str, Iterable[Check]]) -> list[Result]:
        """Run all checks of some parts, which are the same on every host, and write the page."""
        what = provenance()
        size = self._hosts.size
        commit = f", commit {what['git_sha'][:9]}" if what["git_sha"] else ""
        of = (
            f"{size} host{'s' if size > 1 else ''}, {device_name(self._hosts.device)}, "
            f"{what['date']}"
        )
        self._write(f"apbv {what['versions']['apbv']}{commit}: {of}")
        results = []
        for part, checks in parts.items():
            self._write(f"\n{part.capitalize()}")
            for check in checks:
                results.append(Result(part, check.name, self._found(check)))
                self._write_result(results[-1])
        count = {
            status: sum(each.status == status for each in results)
            for status in (OK, SKIPPED, FAILED)
        }
        self._write("\n" + ", ".join(f"{number} {status}" for status, number in count.items()))
        return results

    def _found(self, check: Check) -> list[Finding]:
        """Run a check on all hosts, or on none if an earlier check still runs."""
        if self.stuck is not None:
            return [Finding(self.stuck, status=SKIPPED)] * self._hosts.size
        with self._hosts.working(check.name):
            mine = carry_out(check, self._examined, self._limit)
        told = self._hosts.gather_json([asdict(mine), self._examined.is_broken])
        found = [Finding(**fields) for fields, _ in told]
        if any(each.is_stuck for each in found):
            self.stuck = f"{check.name!r} has not ended"
        elif any(is_broken for _, is_broken in told):
            self._replace_group(check.name)
        return found

    def _replace_group(self, broken_by: str) -> None:
        """Examine a new group from now on, or nothing any more where a host cannot make it."""
        obstacle = None
        try:
            self._examined = self._hosts.subgroup(range(self._hosts.size))
        except Exception as error:  # whatever a GPU says that has failed before
            obstacle = f"{type(error).__name__}: {error}".splitlines()[0]
        obstacles = self._hosts.gather_json(obstacle)
        if reason := next(filter(None, obstacles), None):
            self.stuck = f"behind {broken_by!r} the hosts were not connected anew ({reason})"

    def _write_result(self, result: Result) -> None:
        """Write host 0's result, and relevant results of other hosts with their names."""
        first = result.on_hosts[0]
        groups = {}
        for host, found in enumerate(result.on_hosts):
            is_like_first = (
                found.status == first.status != FAILED and result.part not in _OF_EACH_HOST
            )
            detail = first.detail if is_like_first else found.detail
            groups.setdefault((found.status, detail), []).append(self._hosts.name_of(host))
        for (status, detail), names in groups.items():
            start = f"  {status:<8} {result.name:<{_NAME_WIDTH}} "
            text = detail if len(groups) == 1 else f"{', '.join(names)}: {detail}"
            text = textwrap.shorten(text, _MOST_CHARACTERS, placeholder=" …")
            text = textwrap.fill(
                text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
            )
            self._write(text or start.rstrip())

    def _write(self, text: str) -> None:
        if self._file is not None:
            print(text, file=self._file, flush=True)


def record(results: list[Result], hosts: HostGroup, options: argparse.Namespace) -> dict[str, Any]:
    """Return all results, JSON-ready."""
    return {
        "benchmark": "doctor",
        "hosts": hosts.size,
        "device": device_name(hosts.device),
        "parts": options.parts,
        "healthy": all(result.status != FAILED for result in results),
        "checks": [{**asdict(result), "status": result.status} for result in results],
        **provenance(),
    }
