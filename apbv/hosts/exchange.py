"""Data exchanges in flight, and the errors raised if one cannot complete."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# At exit, for a thread inside a store whose host is out of reach, which answers late or never.
ENDING_SECONDS = 5.0


class Exchange:
    """A data exchange in flight.

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

    def then(self, function: Callable[[Any], Any]) -> "Exchange":
        """Return this exchange with the function's value of its result."""
        return Exchange(lambda: function(self.wait()), self.has_ended)


def in_thread(call: Callable[[], Any]) -> Future:
    """Start a call that may never return; at exit the interpreter waits for it only a few seconds.

    It waits at all because a thread that is inside C++ when the interpreter ends aborts the
    process, be it in torch's store or freeing what the call held after its result is there.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    weakref.finalize(thread, _wait_for, weakref.ref(thread))
    thread.start()
    return future


def _wait_for(thread: weakref.ref[threading.Thread]) -> None:
    if (alive := thread()) is not None:
        alive.join(ENDING_SECONDS)
