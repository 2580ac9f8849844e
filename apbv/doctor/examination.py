"""Checks, what they find, and how all are run on all hosts, even if some fail, crash or hang."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..hosts import HostGroup, in_thread

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


class CheckFailed(Exception):
    """Something does not work here; the message says what."""


class CheckSkipped(Exception):
    """A check means nothing here; the message says why. A collective check raises it on all hosts or on none."""


@dataclass(frozen=True)
class Finding:
    """What a check found where nothing is wrong.

    Attributes:
        detail: in words, for the page.
        figures: in numbers, JSON-ready.
    """

    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Examines one thing on every host.

    Attributes:
        name: unique within its part.
        run: examines the group that it gets; raises whatever it likes.
        is_collective: whether hosts exchange data in it: then a failure of one is told to the others.
        is_per_host: whether the page shows what every host found, where that differs; else what host 0 found.
        must_agree: whether hosts that find different things cannot work together.
    """

    name: str
    run: Callable[[HostGroup], Finding]
    is_collective: bool = False
    is_per_host: bool = False
    must_agree: bool = False


@dataclass(frozen=True)
class HostResult:
    """What became of a check on one host.

    Attributes:
        status: ``"ok"``, ``"failed"`` or ``"skipped"``.
        detail: what was found, or why it failed or was skipped.
        figures: see :class:`Finding`.
        seconds: how long it took.
        is_stuck: whether it still runs: it was given up.
    """

    status: str
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    is_stuck: bool = False


def carry_out(check: Check, hosts: HostGroup, limit: float) -> HostResult:
    """Run a check on this host, in a thread that is given up after ``limit`` seconds; never raises what it does.

    Args:
        hosts: the group that is examined.
    """
    began = time.monotonic()

    def verdict(status: str, detail: str, **more: Any) -> HostResult:
        return HostResult(status, detail, seconds=time.monotonic() - began, **more)

    thread = in_thread(lambda: _examine(check, hosts))
    try:
        error = thread.exception(timeout=limit)
    except StillRunning:
        return verdict(FAILED, f"not done after {limit:g} s", is_stuck=True)
    if isinstance(error, CheckSkipped | CheckFailed):
        return verdict(SKIPPED if isinstance(error, CheckSkipped) else FAILED, str(error))
    if error is not None:
        return verdict(FAILED, one_line(error))
    return verdict(OK, thread.result().detail, figures=thread.result().figures)


def one_line(error: BaseException) -> str:
    """Return an error's type, and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__


@torch.no_grad()
def _examine(check: Check, hosts: HostGroup) -> Finding:
    """Run a check until all that it has put on the GPU is done: an error there is this check's, not the next's."""
    if hosts.device.type == "cuda":
        torch.cuda.set_device(hosts.device)  # which is each thread's own
    if check.is_collective:
        with hosts.collective_stage(check.name):
            finding = check.run(hosts)
    else:
        finding = check.run(hosts)
    if hosts.device.type == "cuda":
        torch.cuda.synchronize(hosts.device)
    return finding


@dataclass(frozen=True)
class Result:
    """What became of a check on all hosts; the same on every host.

    Attributes:
        part: the part that the check belongs to.
        verdicts: one per host.
    """

    part: str
    check: Check
    verdicts: list[HostResult]

    @property
    def status(self) -> str:
        """``"failed"`` where it failed on one host, ``"skipped"`` where it was skipped on all."""
        found = {verdict.status for verdict in self.verdicts}
        return next(status for status in (FAILED, OK, SKIPPED) if status in found)


class Examination:
    """Runs checks on all hosts of a group; every method is collective.

    What is examined is a group of the same hosts beside the one given here, over which they tell one another what
    they found. So a check that breaks its group takes nothing else with it: the next one gets a new group. Where
    none can be made, as on a GPU that an error has left unusable, what was found so far is still told.

    Args:
        hosts: the hosts, of one process each.
        limit: seconds after which a check is given up.

    Attributes:
        has_stuck: whether something was given up that may still run on some host.
    """

    def __init__(self, hosts: HostGroup, limit: float):
        self._hosts, self._limit = hosts, limit
        self._examined = self._new_group()
        self._stuck: str | None = None

    @property
    def has_stuck(self) -> bool:
        return self._stuck is not None

    def run(self, parts: Mapping[str, Iterable[Check]], tell: Callable[[Result], None]) -> list[Result]:
        """Run all checks of some parts.

        Args:
            parts: by name, their checks; the same ones on every host.
            tell: called on every host with each result as soon as it is known.
        """
        results = []
        for part, checks in parts.items():
            for check in checks:
                results.append(Result(part, check, self._verdicts(check)))
                tell(results[-1])
        return results

    def _verdicts(self, check: Check) -> list[HostResult]:
        """Carry out a check on all hosts, or none: behind one that still runs nothing can be trusted."""
        if self._stuck is not None:
            return [HostResult(SKIPPED, self._stuck)] * self._hosts.size
        with self._hosts.working(check.name):
            mine = carry_out(check, self._examined, self._limit)
        told = self._hosts.gather_json([asdict(mine), self._examined.is_broken])
        verdicts = [HostResult(**fields) for fields, _ in told]
        if any(verdict.is_stuck for verdict in verdicts):
            self._stuck = f"{check.name!r} has not ended"
        elif any(is_broken for _, is_broken in told):
            self._replace_group(check.name)
        return _compared(verdicts) if check.must_agree else verdicts

    def _replace_group(self, broken_by: str) -> None:
        """Examine a new group from now on, or nothing any more where a host cannot make it."""
        obstacle = None
        try:
            self._examined = self._new_group()
        except Exception as error:  # whatever a GPU says that has failed before
            obstacle = one_line(error)
        for host, reason in enumerate(self._hosts.gather_json(obstacle)):
            if reason is not None and self._stuck is None:
                name = self._hosts.name_of(host)
                self._stuck = f"behind {broken_by!r} the hosts were not connected anew ({name}: {reason})"

    def _new_group(self) -> HostGroup:
        return self._hosts.subgroup(range(self._hosts.size))


def _compared(verdicts: list[HostResult]) -> list[HostResult]:
    """Fail the hosts that found something else than host 0."""
    first = verdicts[0].detail
    return [
        verdict
        if verdict.status != OK or verdict.detail == first
        else replace(verdict, status=FAILED, detail=f"{verdict.detail}, where host 0 has {first}")
        for verdict in verdicts
    ]
