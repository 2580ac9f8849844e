"""Waiting for other processes, and hearing why one of them will not come.

How a failure reaches everybody. A stage is either *local* (no data travels in it: reading a video, tokenising)
or *collective* (hosts exchange data inside it). A local stage ends with a small exchange of statuses, so that all
hosts raise, or none does, and the group stays usable. A host that fails inside a collective stage cannot join the
exchanges that the others wait for, so it posts its error in the group's key-value store, and whoever waits looks
there. After that the group is broken and must be built anew. A host that dies closes its connections, which wakes
the others too. Where the network falls silent nothing wakes anybody, and the store does not answer either: so it
is asked in a thread, and nobody waits for that thread longer than for the exchange.

How long one host waits for another. A host that works in a stage says so in the store (see :mod:`.heartbeat`),
and whoever waits then waits on; it gives up once nobody has worked for the group's timeout: a host that is
stopped, cut off, or outside every stage is silent. A single stretch of work counts for ten timeouts, so that a
host that hangs ends the others, too. NCCL's exchanges are not waited for in Python: its own limit holds, which is
above that.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from .exchange import AgreedError, HostError, describe_error, in_thread
from .heartbeat import Heartbeat, Patience

POLL_SECONDS = 1.0  # between two looks at what an exchange, or the store, has to say
GRACE_SECONDS = 2.0  # for a failure to be posted, or to be found
WORK_LIMIT = 10.0  # times the timeout: how long a stretch of work counts as a sign of work

_FAILURE_KEY = "apbv/failure"


class FailureWatch:
    """Starts a group's exchanges and waits for them; posts this process's failures and finds those of others.

    Args:
        name: what messages call this process.
        timeout: seconds to wait for processes of which none works.
        store: the key-value store that the processes of the group share; None where this process is alone.
        heartbeat: this process's signs of work; None where nobody can see them.
        waits_for_work: whether the timeout begins anew while any process works; else it bounds the whole wait.

    Attributes:
        is_broken: whether a process failed in an exchange; the group can then be used no more.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        store=None,
        heartbeat: Heartbeat | None = None,
        waits_for_work: bool = True,
    ):
        self.is_broken = False
        self.heartbeat = heartbeat
        self._name, self._timeout = name, timeout
        self._store = store
        self._waits_for_work = waits_for_work
        self._question: Future | None = None  # to the store, as yet unanswered

    def working(self, stage: str) -> AbstractContextManager:
        """Return a context for work in which this process gives signs of work."""
        return nullcontext() if self.heartbeat is None else self.heartbeat.working(stage)

    @contextmanager
    def collective_stage(self, stage: str, has_others: bool) -> Iterator[None]:
        """Run a stage with exchanges inside; see :meth:`HostGroup.collective_stage`.

        Args:
            stage: its name.
            has_others: whether the group has other processes, for whom it breaks when this one fails.
        """
        if self.is_broken:
            raise HostError(f"cannot start {stage}: this host group broke in an earlier request")
        try:
            with self.working(stage):
                yield
        except AgreedError:
            raise
        except HostError:
            self.is_broken = True
            raise
        except BaseException as error:
            self.is_broken = has_others
            if has_others:
                self.post(stage, error)
            raise

    def start(self, call: Callable):
        """Start an exchange: ``call`` is an asynchronous collective, whose ``Work`` is returned.

        Raises:
            HostError: the group is broken, or breaks now.
        """
        if self.is_broken:
            raise HostError("this host group broke in an earlier exchange")
        try:
            return call()
        except RuntimeError as error:
            raise self._reason_for(error) from error

    def wait(self, work, on_gpu: bool = False) -> None:
        """Wait until an exchange is complete.

        Args:
            work: what :meth:`start` returned.
            on_gpu: whether its tensors are on a GPU, which then waits by itself.

        Raises:
            HostError: a process failed, ended, or neither answered nor worked for the timeout.
        """
        if on_gpu:
            work.wait()
            return
        patience = Patience(self._timeout)
        with self.heartbeat.waiting():
            while True:
                try:
                    work.wait(timedelta(seconds=POLL_SECONDS))
                    return
                except RuntimeError:
                    if work.is_completed():
                        return self._finish(work)
                    if failure := self._posted_failure(patience if self._waits_for_work else None):
                        raise failure from None
                    if patience.is_over:
                        raise self._give_up(patience) from None

    def post(self, stage: str, error: BaseException) -> None:
        """Tell the others that this process failed in a stage."""
        text = f"{self._name} failed in {stage}: {describe_error(error)}"
        # Where the store's host is gone, or out of reach, the others notice that by themselves.
        wait_for_futures([in_thread(lambda: self._store.set(_FAILURE_KEY, text))], GRACE_SECONDS)

    def _finish(self, work) -> None:
        """Raise a completed exchange's error, if it has one.

        The wait before may have failed with that error, or only have run out of time just before the exchange
        completed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._reason_for(error) from error

    def _give_up(self, patience: Patience) -> HostError:
        self.is_broken = True
        text = f"{self._name} waited more than {self._timeout:g} s for another host"
        if patience.last_heard:
            text += f", {patience.seconds:.0f} s in all; the last sign of work was: {patience.last_heard}"
        if self._question is not None:
            text += "; the hosts' key-value store does not answer either: the network may be cut"
        return HostError(text)

    def _posted_failure(self, patience: Patience | None = None) -> HostError | None:
        """Return the failure that the store holds, if any.

        Where the store does not answer at once, the question stands, and a later call looks for its answer.

        Args:
            patience: hears who works.
        """
        question = self._question
        if question is None:
            question = self._question = in_thread(self._ask_store)
            wait_for_futures([question], POLL_SECONDS)
        if not question.done():
            return None
        self._question = None
        try:
            text, *beats = question.result()
            if patience is not None:
                patience.hear(*beats)
        except RuntimeError:
            text = "lost contact with the hosts' key-value store: the process that held it has ended"
        if text is None:
            return None
        self.is_broken = True
        return HostError(text)

    def _ask_store(self) -> tuple[str | None, int, str]:
        """Return a posted failure, and what :meth:`Heartbeat.heard` says."""
        store = self._store
        failure = store.get(_FAILURE_KEY).decode(errors="replace") if store.check([_FAILURE_KEY]) else None
        return failure, *self.heartbeat.heard()

    def _reason_for(self, error: RuntimeError) -> HostError:
        """Say why an exchange failed outright: quote the process that posted a reason, or say that one ended."""
        self.is_broken = True
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if failure := self._posted_failure():
                return failure
            time.sleep(0.05)
        return HostError(f"another host ended, or did not answer in time (seen by {self._name}): {error}")
