"""What can be waited for beside the exchanges of a process group: calls in threads, and a GPU's work.

Each has the two methods of torch.distributed's ``Work`` that :class:`.failure_watch.FailureWatch` uses, so that
all waiting goes the same way.
"""

import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from typing import Any, Protocol

import torch

_SPINNING_SECONDS = 0.002  # a step of decoding often ends sooner than a sleeping thread wakes up
_NAP_SECONDS = 5e-5


class Pending(Protocol):
    """Something under way, such as a ``torch.distributed.Work``."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it is complete; RuntimeError: it failed, or is not complete in time."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""


class PendingCall:
    """A call in a thread, such as one begun by :func:`.exchange.in_thread`."""

    def __init__(self, future: Future):
        self._future = future

    def wait(self, timeout: timedelta = timedelta.max) -> Any:
        """Block until the call has returned, and return its result.

        Raises:
            RuntimeError: it has not returned in time.
            Exception: what the call raised.
        """
        seconds = None if timeout == timedelta.max else timeout.total_seconds()
        if not wait_for_futures([self._future], seconds).done:
            raise RuntimeError("the call has not returned yet")
        return self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


class PendingEvent:
    """A GPU's way to a CUDA event, which is asked for and not waited for: a wait in CUDA cannot be interrupted."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Block until the GPU has come to the event.

        Raises:
            RuntimeError: it has not come in time, or has failed.
        """
        began = time.monotonic()
        while not self._event.query():
            seconds = time.monotonic() - began
            if seconds > timeout.total_seconds():
                raise RuntimeError("the GPU is not done yet")
            time.sleep(0.0 if seconds < _SPINNING_SECONDS else _NAP_SECONDS)

    def is_completed(self) -> bool:
        return self._event.query()
