"""Results that arrive later: of an exchange between hosts, a copy from a GPU, or a call."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A result that arrives later.

    Args:
        finish: blocks until the result is there and returns it; called once.
        ready: whether ``finish`` would return, or raise, at once.
    """

    _result: T  # once ``_finish`` is None

    def __init__(self, finish: Callable[[], T], ready: Callable[[], bool] = lambda: True):
        self._finish: Callable[[], T] | None = finish
        self._ready = ready

    def ready(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._finish is None or self._ready()

    def wait(self) -> T:
        """Block until the result is there, and return it.

        The result of an exchange of GPU memory is there once it is ordered before later kernels.

        Raises:
            HostError: of an exchange: a host failed, ended, or neither answered nor worked for the
                group's timeout.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def then(self, function: Callable[[T], U]) -> "Pending[U]":
        """Return the function's value of this result, which arrives with it."""
        return Pending(lambda: function(self.wait()), self.ready)
