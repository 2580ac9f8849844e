"""Calls in threads that may never return."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# At exit, for a thread inside a store whose host is out of reach, which answers late or never.
ENDING_SECONDS = 5.0


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Start a call that may never return; at exit the interpreter waits for it only a few seconds.

    It waits at all because a thread that is inside C++ when the interpreter ends aborts the
    process, be it in torch's store or freeing what the call held after its result is there.
    """
    future: Future[T] = Future()

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
