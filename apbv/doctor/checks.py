"""A check, what it finds, and how it is kept from crashing or hanging the ones behind it."""

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, field
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
    """A Finding is what a check has found where nothing is wrong.

    Attributes:
        detail: in words, for the page.
        figures: in numbers, JSON-ready.
    """

    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A Check examines one thing on every host.

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
class Verdict:
    """A Verdict is what became of a check on one host; JSON-ready but for itself.

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


def carry_out(check: Check, hosts: HostGroup, limit: float) -> Verdict:
    """Run a check on this host, in a thread that is given up after ``limit`` seconds; never raises what it does.

    Args:
        hosts: the group that is examined.
    """
    began = time.monotonic()

    def verdict(status: str, detail: str, **more: Any) -> Verdict:
        return Verdict(status, detail, seconds=time.monotonic() - began, **more)

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
