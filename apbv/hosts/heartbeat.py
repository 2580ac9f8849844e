"""Heartbeats in a group's key-value store.

They distinguish a slow process from an unresponsive one.

A process sends heartbeats while it works in a stage, but not while it waits: if all processes wait
for each other, or for one that is stopped, cut off, or elsewhere, there are none. All heartbeats of
a group go to one counter, whose cost does not depend on the number of processes, and which needs no
existing key.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .threads import ENDING_SECONDS

_COUNT_KEY = "apbv/beats"
_WORK_KEY = "apbv/work"
BEAT_SECONDS = 1.0


class Heartbeat:
    """Sends this process's heartbeats, from a thread that starts with the first stage.

    Args:
        store: a torch.distributed store that all processes of the group share.
        name: of this process.
        timeout: seconds without a heartbeat after which the others give up.
        longest: seconds after which a stretch of work between two collectives sends no more
            heartbeats: otherwise a process that hangs would block the others for ever.
    """

    def __init__(self, store: dist.Store, name: str, timeout: float, longest: float):
        self._store = store
        self._name = name
        self.longest = longest
        self._interval = min(BEAT_SECONDS, timeout / 4)
        self._stages: list[str] = []  # nested, the innermost last
        self._working_since: float | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], None] = lambda: None
        # Replaced, and not changed: the thread goes through it.
        self._looks: list[weakref.WeakMethod] = []

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None:
            return
        arguments = weakref.ref(self), self._stopped, self._interval
        self._thread = threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True)
        self._thread.start()
        # Also at exit: a thread inside the store aborts the process when the interpreter ends.
        self._end = weakref.finalize(self, _end, self._thread, self._stopped)

    @contextmanager
    def working(self, stage: str) -> Iterator[None]:
        """Context for work that others may wait for."""
        self.start()
        before = self._working_since
        self._working_since = time.monotonic()
        self._stages.append(stage)
        try:
            yield
        finally:
            self._stages.pop()
            self._working_since = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context for a wait for other processes, during which this one sends no heartbeats."""
        self._working_since = None
        try:
            yield
        finally:
            self._working_since = time.monotonic() if self._stages else None

    def also(self, look: Callable[[], None]) -> None:
        """Also call a method in the thread, before each heartbeat, while its object lives."""
        self._looks = [
            *(known for known in self._looks if known() is not None),
            weakref.WeakMethod(look),
        ]

    def heard(self) -> tuple[int, str]:
        """Return the number of heartbeats of the group, and the last one's text.

        This blocks while the store does not answer.
        """
        count = self._store.add(_COUNT_KEY, 0)
        return count, self._store.get(_WORK_KEY).decode(errors="replace") if count else ""

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._end()

    def look(self) -> None:
        """Call the methods given to :meth:`also`."""
        for known in self._looks:
            if (look := known()) is not None:
                look()

    def beat(self) -> None:
        """Write to the store what this process works on, if anything."""
        stages = self._stages[-1:]
        since = self._working_since
        if not stages or since is None:
            return
        seconds = time.monotonic() - since
        if seconds < self.longest:
            # In this order: a counted heartbeat then always has a text.
            self._store.set(
                _WORK_KEY, f"{self._name} has worked on {stages[0]} for {seconds:.0f} s"
            )
            self._store.add(_COUNT_KEY, 1)


class Patience:
    """Timeout of one wait: it ends after ``timeout`` seconds without a heartbeat of any process.

    Attributes:
        last_heard: the text of the last heartbeat during this wait.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._began = self._heard = time.monotonic()
        self._count: int | None = None
        self.last_heard = ""

    def hear(self, count: int, work: str) -> None:
        """Process the result of :meth:`Heartbeat.heard`.

        Heartbeats from before this wait do not count.
        """
        if self._count not in (None, count):
            self._heard = time.monotonic()
            self.last_heard = work
        self._count = count

    @property
    def seconds(self) -> float:
        """The duration of this wait so far, in seconds."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the wait has timed out."""
        return time.monotonic() - self._heard > self._timeout


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(ENDING_SECONDS)


def _beat(heart: "weakref.ref[Heartbeat]", stopped: threading.Event, interval: float) -> None:
    """Send heartbeats in a thread until the object, or the store's host, is gone."""
    while not stopped.wait(interval):
        alive = heart()
        if alive is None:
            return
        try:
            alive.look()
            alive.beat()
        except RuntimeError:
            return
        del alive
