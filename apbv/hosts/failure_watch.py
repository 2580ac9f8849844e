"""Waits for other processes, and reports why one of them failed.

Failure propagation. A stage is either *local* (no communication: reading a video, tokenising) or
*collective* (hosts exchange data inside it). A local stage ends with a small exchange of statuses,
so that all hosts raise, or none does, and the group stays usable. A host that fails inside a
collective stage cannot join the collectives that the others wait for, so it posts its error in the
group's key-value store, which waiting hosts poll. The group is then broken and must be rebuilt. A
host that dies closes its connections, which also wakes the others. If the network goes down,
nothing wakes them, and the store does not answer either; it is therefore queried in a thread, and
the wait for that thread is no longer than for the collective.

Timeouts. A host that works in a stage sends heartbeats to the store (see :mod:`.heartbeat`), and
waiting hosts keep waiting; they give up once no host has sent one for the group's timeout: a host
that is stopped, cut off, or outside every stage sends none. A single stretch of work counts for at
most ten timeouts, so that a host that hangs ends the others, too.

The GPU waits for NCCL collectives in its streams: the CPU keeps queueing work, and blocks only when
it needs a result. There it polls the GPU and the store. If it blocks elsewhere (in a library, or
because the GPU's queue is full) the heartbeat thread polls. Collectives that cannot complete are
aborted, so that the GPU finishes its queue, with arbitrary numbers, and no wait remains.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import ApbvError, ErrorReport, HostError, as_kind
from .heartbeat import Heartbeat, Patience
from .threads import in_thread

T = TypeVar("T")

POLL_SECONDS = 1.0  # between two polls of a collective, or of the store
GRACE_SECONDS = 2.0  # for a failure to be posted, or to be found
WORK_LIMIT = 10.0  # times the timeout: how long a stretch of work counts as a sign of work

_SPINNING_SECONDS = 0.002  # a step of decoding often ends sooner than a sleeping thread wakes up
_NAP_SECONDS = 5e-5

_FAILURE_KEY = "apbv/failure"
_LOST_STORE = "lost contact with the hosts' key-value store: the process that held it has ended"


class Communicators:
    """NCCL communicators of the process groups that carry GPU memory.

    Args:
        groups: the groups, each with an NCCL backend.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        self._backends = [group._get_backend(torch.device("cuda")) for group in groups]

    def error(self) -> str:
        """Return the NCCL watchdog's error; an empty string if there is none."""
        for backend in self._backends:
            # A backend may lack it; the group's timeout then reveals the failure.
            get_error = getattr(backend, "get_error", None)
            if get_error is None:
                continue
            error = get_error().name
            if error != "SUCCESS":
                return f"NCCL reports {error}"
        return ""

    def abort(self, seconds: float) -> None:
        """Abort collectives in flight, on the GPU too; wait for that at most ``seconds``."""
        # Side by side: each may wait for the other, where a GPU has kernels of both.
        wait_for_futures([in_thread(backend.abort) for backend in self._backends], seconds)


class Awaited(Protocol):
    """What a :class:`FailureWatch` waits for, such as a ``dist.Work``."""

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        ...

    def wait(self, timeout: timedelta = ...) -> object:
        """Block until it is complete; without a timeout, for as long as it takes.

        Raises:
            RuntimeError: it failed, or is not complete in time.
        """
        ...


class PendingCall:
    """A call in a thread, to be waited for."""

    def __init__(self, future: Future):
        self.is_completed = future.done
        self._future = future

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Block until the call has returned; an error of the call is raised again.

        Raises:
            RuntimeError: it has not returned in time.
        """
        seconds = None if timeout == timedelta.max else timeout.total_seconds()
        if not wait_for_futures([self._future], seconds).done:
            raise RuntimeError("the call has not returned yet")
        self._future.result()


class PendingEvent:
    """A CUDA event that is polled instead of waited for: a wait in CUDA cannot be interrupted."""

    def __init__(self, event: torch.cuda.Event):
        self.is_completed = event.query

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Block until the GPU has come to the event.

        Raises:
            RuntimeError: it has not come to it in time, or has failed.
        """
        began = time.monotonic()
        while not self.is_completed():
            seconds = time.monotonic() - began
            if seconds > timeout.total_seconds():
                raise RuntimeError("the GPU is not done yet")
            time.sleep(0.0 if seconds < _SPINNING_SECONDS else _NAP_SECONDS)


@dataclass(frozen=True)
class _Posted:
    """A failure as it stands in the store, as JSON.

    Attributes:
        report: the error.
        host: the name of the process that posts it.
        stage: the stage in which it failed.
    """

    report: ErrorReport
    host: str
    stage: str

    def to_text(self) -> str:
        """Return the text for the store, for :meth:`from_text` on another process."""
        return json.dumps([self.report.to_json(), self.host, self.stage])

    @classmethod
    def from_text(cls, text: str) -> "_Posted":
        """Return the failure that :meth:`to_text` made a text."""
        report, host, stage = json.loads(text)
        return cls(ErrorReport.from_json(report), host, stage)


class FailureWatch:
    """Starts a group's collectives and waits for them.

    Posts this process's failures and detects those of others.

    Args:
        name: this process's name in messages.
        timeout: seconds to wait without a heartbeat.
        store: the key-value store that the processes of the group share; None if this process is
            alone.
        heartbeat: this process's heartbeats; None if no other process can see them.
        waits_for_work: whether the timeout begins anew while any process works; else it bounds the
            whole wait.
        communicators: those of NCCL, for exchanges that a GPU waits for; None: there are none.

    Attributes:
        is_broken: whether a process failed in a collective; the group is then unusable.
        waits_for_work: whether the timeout begins anew while any process works.
        working: returns a context for a named stage in which this process sends heartbeats.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        store: dist.Store | None = None,
        heartbeat: Heartbeat | None = None,
        waits_for_work: bool = True,
        communicators: Communicators | None = None,
    ):
        self.is_broken = False
        self.heartbeat = heartbeat
        self.working = nullcontext if heartbeat is None else heartbeat.working
        self._name = name
        self._timeout = timeout
        self._store = store
        self.waits_for_work = waits_for_work
        self._communicators = communicators
        self._question: Future | None = None  # to the store, as yet unanswered
        self._stages = 0  # with exchanges, nested
        self._noticed: ApbvError | None = None  # by the heartbeat's thread
        self._breaking = threading.Lock()
        if communicators is not None:
            self._heart.also(self.look)

    @property
    def _heart(self) -> Heartbeat:
        assert self.heartbeat is not None  # whoever waits for others has one
        return self.heartbeat

    @property
    def _shared_store(self) -> dist.Store:
        assert self._store is not None  # there are other processes
        return self._store

    @contextmanager
    def collective_stage(self, stage: str, has_others: bool) -> Iterator[None]:
        """Run a stage that contains collectives; see :meth:`HostGroup.collective_stage`.

        Args:
            stage: its name.
            has_others: whether the group has other processes, for whom it breaks when this one
                fails.
        """
        if self.is_broken:
            raise HostError(
                f"cannot start {stage}: the host group failed in an earlier request; restart it"
            )
        self._stages += 1
        try:
            with self.working(stage):
                yield
        except BaseException as caught:
            error = as_kind(caught)
            if isinstance(error, ApbvError):
                if error.is_agreed:
                    raise
                if error.is_of_others:
                    self._break()
                    raise
            # The GPU's results after an abort are invalid and may cause any error.
            if self._noticed is not None and isinstance(error, Exception):
                raise self._noticed from error
            if has_others:
                self.post(stage, error)
                self._break()
            if error is caught:
                raise
            raise error from caught
        finally:
            self._stages -= 1

    def start(self, call: Callable[[], T]) -> T:
        """Start a collective by an asynchronous call, and return the call's ``Work``.

        Raises:
            HostError: the group is broken, or breaks now.
        """
        self.require_whole()
        try:
            return call()
        except RuntimeError as error:
            raise self._reason_for(error) from error

    def wait(self, work: Awaited) -> None:
        """Wait until something that depends on other processes is complete.

        Args:
            work: a collective in CPU memory, as :meth:`start` returned it, a call or an event.

        Raises:
            HostError: a process failed, ended, or neither answered nor worked for the timeout.
        """
        patience = Patience(self._timeout)
        with self._heart.waiting():
            while True:
                try:
                    work.wait(timedelta(seconds=POLL_SECONDS))
                    return
                except RuntimeError:
                    if work.is_completed():
                        return self._finish(work)
                    self._require_sound()
                    if failure := self._posted_failure(patience if self.waits_for_work else None):
                        raise failure from None
                    if patience.is_over:
                        raise self._give_up(patience) from None

    def wait_for_gpu(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has reached an event.

        Before that the GPU may wait for collectives of GPU memory.

        Raises:
            HostError: as :meth:`wait`; the GPU's results are then invalid.
        """
        self.wait(PendingEvent(event))
        self._require_sound()

    def order(self, work: dist.Work) -> None:
        """Order the GPU's further work after a collective of GPU memory, without blocking the CPU.

        Raises:
            HostError: the group is broken, or breaks now.
        """
        self.start(work.wait)

    def look(self) -> None:
        """Abort collectives that cannot complete; called every second in the heartbeat thread."""
        if self.is_broken or not self._stages:
            return
        try:
            failure = self.read_failure()
        except RuntimeError:
            failure = HostError(_LOST_STORE)
        if failure is not None:
            self._noticed = failure
            self._break()

    def require_whole(self) -> None:
        """Raise if the group is broken.

        Raises:
            HostError: it is.
        """
        if self.is_broken:
            raise self._noticed or HostError(
                "the host group failed in an earlier collective; restart it"
            )

    def _require_sound(self) -> None:
        """Raise if the group broke meanwhile, or NCCL's watchdog reports an error."""
        self.require_whole()
        if self._communicators is not None and (error := self._communicators.error()):
            raise self._reason_for(error)

    def _break(self) -> None:
        """Mark this group as broken, and abort its collectives."""
        with self._breaking:
            was_broken = self.is_broken
            self.is_broken = True
            if self._communicators is not None and not was_broken:
                self._communicators.abort(GRACE_SECONDS)

    def post(self, stage: str, error: BaseException) -> None:
        """Post to the others that this process failed in a stage."""
        self._tell(_Posted(ErrorReport.of(error), self._name, stage))

    def _tell(self, posted: "_Posted") -> None:
        text = posted.to_text()
        # If the store's host is gone or unreachable, the others notice that themselves.
        wait_for_futures(
            [in_thread(lambda: self._shared_store.set(_FAILURE_KEY, text))], GRACE_SECONDS
        )

    def _finish(self, work: Awaited) -> None:
        """Raise a completed collective's error, if it has one.

        The wait before may have failed with that error, or only have run out of time just before
        the exchange completed.
        """
        try:
            work.wait()
        except HostError:
            raise
        except RuntimeError as error:
            raise self._reason_for(error) from error

    def _give_up(self, patience: Patience) -> HostError:
        self._break()
        text = f"{self._name} waited more than {self._timeout:g} s for another host"
        if patience.last_heard:
            text += (
                f", {patience.seconds:.0f} s in all; the last sign of work was: "
                f"{patience.last_heard}"
            )
        if self._question is not None:
            text += "; the hosts' key-value store does not answer either: the network may be cut"
        return HostError(text)

    def _posted_failure(self, patience: Patience | None = None) -> ApbvError | None:
        """Return the failure that the store holds, if any.

        If the store does not answer at once, a later call reads its answer.

        Args:
            patience: gets the heartbeats.
        """
        question = self._question
        if question is None:
            question = self._question = in_thread(
                lambda: (self.read_failure(), *self._heart.heard())
            )
            wait_for_futures([question], POLL_SECONDS)
        if not question.done():
            return None
        self._question = None
        try:
            failure, *beats = question.result()
            if patience is not None:
                patience.hear(*beats)
        except RuntimeError:
            failure = HostError(_LOST_STORE)
        if failure is not None:
            self._break()
        return failure

    def read_failure(self) -> ApbvError | None:
        """Return the error that a process posted; None: there is none.

        This blocks while the store does not answer.
        """
        if not self._shared_store.check([_FAILURE_KEY]):
            return None
        posted = _Posted.from_text(self._shared_store.get(_FAILURE_KEY).decode(errors="replace"))
        return posted.report.error(posted.host, posted.stage)

    def _reason_for(self, error: RuntimeError | str) -> ApbvError:
        """Return why a collective failed: the posted reason of a process, or that one ended."""
        self._break()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if failure := self._posted_failure():
                return failure
            time.sleep(0.05)
        lost = HostError(
            f"another host ended, or did not answer in time (seen by {self._name}): {error}"
        )
        # Those who wait for this process need not have seen it.
        self._tell(_Posted(ErrorReport.of(lost), self._name, "an exchange"))
        return lost
