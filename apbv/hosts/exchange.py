"""Exchanges under way, and the errors that say why one will never be complete."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

# At exit, for a thread inside a store whose host is out of reach, which answers late or never.
ENDING_SECONDS = 5.0


class HostError(RuntimeError):
    """Another host failed, or could not be reached; the message says which, where and why."""


class AgreedError(ValueError):
    """A request cannot be answered, and all hosts raise this at the same point, so that no group breaks."""


class Exchange:
    """A data exchange that is under way.

    Args:
        finish: blocks until the exchange is complete and returns its result; called once.
        ended: whether ``finish`` would return, or raise, at once.
    """

    def __init__(self, finish: Callable[[], Any], ended: Callable[[], bool] = lambda: True):
        self._finish: Callable[[], Any] | None = finish
        self._ended = ended
        self._result: Any = None

    def has_ended(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._finish is None or self._ended()

    def wait(self) -> Any:
        """Block until the exchange is complete (on CUDA: until it is ordered before later kernels).

        Raises:
            HostError: a host failed, ended, or neither answered nor worked for the group's timeout.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def in_thread(call: Callable[[], Any]) -> Future:
    """Begin a call that may never return; the interpreter waits a few seconds for it when it exits, no longer.

    It waits at all because a thread that is inside C++, of torch's store for instance, when the interpreter ends
    aborts the process.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    weakref.finalize(thread, wait_for_futures, [future], ENDING_SECONDS)
    thread.start()
    return future


def describe_error(error: BaseException) -> str:
    """Give an error's type and message, with the undecodable bytes of a file name escaped."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
