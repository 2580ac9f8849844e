"""Lets a request be cancelled before its first token: between chunks of the tower, and between layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..hosts import AgreedError, Exchange, HostGroup
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
        self._error: Exception | None = None
        self._asked: Exchange | None = None  # before the layer before

    def here(self) -> None:
        """Ask on host 0, between collectives that tell the others of a host's errors.

        Raises:
            RequestCancelled: on host 0.
        """
        if self._stop is not None and self._hosts.is_leader and self._stop():
            raise RequestCancelled

    def before_layer(self) -> None:
        """Ask before a layer, and end what was cancelled before the layer before; collective, on all hosts alike.

        So no host waits for an answer: it came while the layer was computed.

        Raises:
            RequestCancelled: on every host.
        """
        if self._stop is None:
            return
        try:
            self.here()
        except Exception as error:  # of whatever kind: it is the caller's function
            self._error = error
        is_over = torch.tensor([self._error is not None], dtype=torch.uint8)
        asked, self._asked = self._asked, self._hosts.start_broadcast(is_over, 0)
        self._end_if(asked)

    def after_layers(self) -> None:
        """End what was cancelled before the last layer; collective, on all hosts alike.

        Raises:
            RequestCancelled: on every host.
        """
        asked, self._asked = self._asked, None
        self._end_if(asked)

    def before_each(self, attention: LayerAttention) -> LayerAttention:
        """Return an attention that asks before each layer's."""
        if self._stop is None:
            return attention

        def asking(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
            self.before_layer()
            return attention(q, k, v, scale, layer)

        return asking

    def _end_if(self, asked: Exchange | None) -> None:
        if asked is None or not asked.wait()[0]:
            return
        if self._asked is not None:
            self._asked.wait()  # of which nothing may be left for the next request
        raise RequestCancelled from self._error


@contextmanager
def own_error() -> Iterator[None]:
    """Raise what ``stop`` raised where it was asked, in place of what all hosts raised for it."""
    try:
        yield
    except RequestCancelled as cancelled:
        if cancelled.__cause__ is None:
            raise
        raise cancelled.__cause__ from None
