"""Lets a request be cancelled before its first token: between chunks of the tower, and between layers."""

from collections.abc import Callable

from torch import Tensor

from ..hosts import AgreedError, HostGroup
from ..model.attention import LayerAttention

Stop = Callable[[], bool]


class RequestCancelled(AgreedError):
    """``stop`` ended a request before its first token; the next one can follow."""

    def __init__(self):
        super().__init__("the request was cancelled before its first token")


class Cancelling:
    """Asks on host 0 whether a prompt's prefill is to end, and lets all hosts know at the same point.

    Args:
        stop: asked on host 0; None on all hosts: nobody cancels.
    """

    def __init__(self, hosts: HostGroup, stop: Stop | None):
        self._hosts, self._stop = hosts, stop

    def here(self) -> None:
        """Ask on host 0, between collectives that tell the others of a host's errors.

        Raises:
            RequestCancelled: on host 0.
        """
        if self._stop is not None and self._hosts.is_leader and self._stop():
            raise RequestCancelled

    def together(self) -> None:
        """Ask on host 0, and tell all hosts; collective.

        Raises:
            RequestCancelled: on every host.
        """
        if self._stop is None:
            return
        error = None
        try:
            self.here()
        except Exception as caught:  # of whatever kind: it is the caller's function
            error = caught
        if self._hosts.broadcast_ints([error is not None], 1)[0]:
            raise RequestCancelled from error

    def before_each(self, attention: LayerAttention) -> LayerAttention:
        """Return an attention that asks before each layer's."""
        if self._stop is None:
            return attention

        def asking(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
            self.together()
            return attention(q, k, v, scale, layer)

        return asking
