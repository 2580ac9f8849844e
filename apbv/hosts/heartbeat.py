"""Signs of work in a group's key-value store, so that who waits can tell a slow process from a silent one.

A process beats while it works in a stage, and not while it waits itself: so where all wait for each other, or for
one that is stopped, cut off, or elsewhere, nobody beats. All beats of a group go to one counter, which costs the
same for any number of processes, and need no key to exist.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .exchange import ENDING_SECONDS

_COUNT_KEY = "apbv/beats"
_WORK_KEY = "apbv/work"
_BEAT_SECONDS = 1.0


class Heartbeat:
    """Gives this process's signs of work, from a thread that begins with the first stage.

    Args:
        store: a torch.distributed store that all processes of the group share.
        name: of this process.
        timeout: seconds of silence after which the others give it up.
        longest: seconds after which a stretch of work, between two exchanges, is no sign of work any more: a
            process that hangs would else keep the others for ever.
    """

    def __init__(self, store, name: str, timeout: float, longest: float):
        self._store, self._name, self._longest = store, name, longest
        self._interval = min(_BEAT_SECONDS, timeout / 4)
        self._stages: list[str] = []  # nested, the innermost last
        self._working_since: float | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], None] = lambda: None
        self._looks: list[weakref.WeakMethod] = []  # replaced, and not changed: the thread goes through it

    @contextmanager
    def working(self, stage: str) -> Iterator[None]:
        """Enclose work that others may wait for."""
        if self._thread is None:
            arguments = weakref.ref(self), self._stopped, self._interval
            self._thread = threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True)
            self._thread.start()
            # At exit, too: a thread that is inside the store when the interpreter ends aborts the process.
            self._end = weakref.finalize(self, _end, self._thread, self._stopped)
        before, self._working_since = self._working_since, time.monotonic()
        self._stages.append(stage)
        try:
            yield
        finally:
            self._stages.pop()
            self._working_since = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enclose a wait for other processes, during which this one does not count as working."""
        self._working_since = None
        try:
            yield
        finally:
            self._working_since = time.monotonic() if self._stages else None

    def also(self, look: Callable[[], None]) -> None:
        """Call an object's method in the thread, too, before each beat, for as long as the object lives."""
        self._looks = [*(known for known in self._looks if known() is not None), weakref.WeakMethod(look)]

    def heard(self) -> tuple[int, str]:
        """Return the number of all beats of the group, and what the last one said.

        This blocks while the store does not answer.
        """
        count = self._store.add(_COUNT_KEY, 0)
        return count, self._store.get(_WORK_KEY).decode(errors="replace") if count else ""

    def stop(self) -> None:
        """Give no more signs of work."""
        self._end()

    def look(self) -> None:
        """Call what :meth:`also` was given."""
        for known in self._looks:
            if (look := known()) is not None:
                look()

    def beat(self) -> None:
        """Say in the store what this process works on, if it does."""
        stages, since = self._stages[-1:], self._working_since
        if not stages or since is None:
            return
        seconds = time.monotonic() - since
        if seconds < self._longest:
            # In this order: where there is a beat there is something that it says.
            self._store.set(_WORK_KEY, f"{self._name} has worked on {stages[0]} for {seconds:.0f} s")
            self._store.add(_COUNT_KEY, 1)


class Patience:
    """Decides how long one wait goes on: until nobody has worked for ``timeout`` seconds.

    Attributes:
        last_heard: what a beat during this wait said.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._began = self._heard = time.monotonic()
        self._count: int | None = None
        self.last_heard = ""

    def hear(self, count: int, work: str) -> None:
        """Take in what :meth:`Heartbeat.heard` says. What was said before this wait is no news."""
        if self._count not in (None, count):
            self._heard, self.last_heard = time.monotonic(), work
        self._count = count

    @property
    def seconds(self) -> float:
        """The seconds that this wait has gone on for."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether nobody has worked for too long."""
        return time.monotonic() - self._heard > self._timeout


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(ENDING_SECONDS)


def _beat(heart: "weakref.ref[Heartbeat]", stopped: threading.Event, interval: float) -> None:
    """Beat in a thread until the heart is gone, or the store's host is, which others notice by themselves."""
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
