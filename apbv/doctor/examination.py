"""Runs checks on all hosts, even if some fail, crash or hang, and writes the results."""

import argparse
import textwrap
import time
from collections import Counter
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
_MAX_CHARACTERS = 400  # of a detail: some libraries' errors are pages by themselves
# Parts in which the page shows each host's result if it differs from host 0's. In others it shows
# only failures and other statuses.
_OF_EACH_HOST = ("machine", "backends")

# A check's result in words for the page, and in JSON-ready numbers.
Found = tuple[str, dict[str, Any]]


class CheckFailed(Exception):
    """Raised if a check fails; the message says what does not work."""


class CheckSkipped(Exception):
    """Raised if a check does not apply here; the message says why.

    A collective check raises it on all hosts or on none.
    """


@dataclass(frozen=True)
class Finding:
    """Result of a check on one host.

    Attributes:
        detail: the result in words, for the page, or why the check failed or was skipped.
        figures: the result in numbers, JSON-ready.
        status: ``"ok"``, ``"failed"`` or ``"skipped"``.
        seconds: how long the check took.
        is_stuck: whether the check was given up, and still runs.
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
        run: examines the group that it gets; it may raise any exception.
        is_collective: whether hosts exchange data in it: then all hosts learn of a failure of one.
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
        statuses = [finding.status for finding in self.on_hosts]
        if FAILED in statuses:
            return FAILED
        return OK if OK in statuses else SKIPPED


def carry_out(check: Check, hosts: HostGroup, limit: float) -> Finding:
    """Run a check on this host, in a thread; never raises.

    Args:
        limit: seconds after which the thread is abandoned.
    """
    began = time.monotonic()
    thread = in_thread(partial(_examine, check, hosts))
    is_stuck = False
    try:
        error = thread.exception(timeout=limit)
    except StillRunning:
        error = CheckFailed(f"not done after {limit:g} s")
        is_stuck = True
    seconds = time.monotonic() - began
    if error is None:
        detail, figures = thread.result()
        return Finding(detail, figures, seconds=seconds)
    if isinstance(error, CheckSkipped):
        return Finding(str(error), status=SKIPPED, seconds=seconds)
    detail = str(error) if isinstance(error, CheckFailed) else _first_line(error)
    return Finding(detail, status=FAILED, seconds=seconds, is_stuck=is_stuck)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error and its type."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@torch.no_grad()
def _examine(check: Check, hosts: HostGroup) -> Found:
    """Run a check until its GPU work is done, so that an error there is attributed to it."""
    stage = hosts.collective_stage(check.name) if check.is_collective else nullcontext()
    with hosts.on_device():
        with stage:
            result = check.run(hosts)
        if hosts.device.type == "cuda":
            torch.cuda.synchronize(hosts.device)
    return result


def _anew(hosts: HostGroup) -> HostGroup:
    """Make a new group of all hosts; collective."""
    group = hosts.subgroup(range(hosts.size))
    assert group is not None, "this host is one of them"
    return group


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
        self._examined = _anew(hosts)

    def run(self, parts: Mapping[str, Iterable[Check]]) -> list[Result]:
        """Run all checks of some parts, which are the same on every host, and write the page."""
        self._write_heading()
        results = []
        for part, checks in parts.items():
            self._write(f"\n{part.capitalize()}")
            for check in checks:
                result = Result(part, check.name, self._run_on_all(check))
                results.append(result)
                self._write_result(result)
        counts = Counter(result.status for result in results)
        summary = [f"{counts[status]} {status}" for status in (OK, SKIPPED, FAILED)]
        self._write("\n" + ", ".join(summary))
        return results

    def _write_heading(self) -> None:
        """Write the version, hosts, device and date."""
        about = provenance()
        title = f"apbv {about['versions']['apbv']}"
        if about["git_sha"]:
            title += f", commit {about['git_sha'][:9]}"
        num_hosts = "1 host" if self._hosts.size == 1 else f"{self._hosts.size} hosts"
        self._write(f"{title}: {num_hosts}, {device_name(self._hosts.device)}, {about['date']}")

    def _run_on_all(self, check: Check) -> list[Finding]:
        """Run a check on all hosts, or on none if an earlier check still runs."""
        if self.stuck is not None:
            return [Finding(self.stuck, status=SKIPPED)] * self._hosts.size
        with self._hosts.working(check.name):
            finding = carry_out(check, self._examined, self._limit)
        reports = self._hosts.gather_json([asdict(finding), self._examined.is_broken])
        findings = [Finding(**fields) for fields, _ in reports]
        if any(host_finding.is_stuck for host_finding in findings):
            self.stuck = f"{check.name!r} has not ended"
        elif any(is_broken for _, is_broken in reports):
            self._replace_group(check.name)
        return findings

    def _replace_group(self, broken_by: str) -> None:
        """Examine a new group from now on, or nothing any more where a host cannot make it."""
        obstacle = None
        try:
            self._examined = _anew(self._hosts)
        except Exception as error:  # a GPU that has failed before may raise any error
            obstacle = _first_line(error)
        obstacles = self._hosts.gather_json(obstacle)
        reasons = [reason for reason in obstacles if reason is not None]
        if reasons:
            self.stuck = f"behind {broken_by!r} the hosts were not connected anew ({reasons[0]})"

    def _write_result(self, result: Result) -> None:
        """Write host 0's result, and relevant results of other hosts with their names."""
        first = result.on_hosts[0]
        # The hosts' names, by the status and detail to show.
        groups: dict[tuple[str, str], list[str]] = {}
        for host, finding in enumerate(result.on_hosts):
            detail = finding.detail
            shows_each = finding.status == FAILED or result.part in _OF_EACH_HOST
            if finding.status == first.status and not shows_each:
                detail = first.detail
            groups.setdefault((finding.status, detail), []).append(self._hosts.name_of(host))
        for (status, detail), names in groups.items():
            start = f"  {status:<8} {result.name:<{_NAME_WIDTH}} "
            text = detail if len(groups) == 1 else f"{', '.join(names)}: {detail}"
            text = textwrap.shorten(text, _MAX_CHARACTERS, placeholder=" …")
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
