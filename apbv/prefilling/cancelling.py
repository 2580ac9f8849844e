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


def require_going_on(hosts: HostGroup, stop: Stop | None) -> None:
    """Ask on host 0 whether a prompt's prefill is to end, and let all hosts know at the same point; collective.

    Args:
        stop: asked on host 0; None on all hosts: nobody cancels, and nothing is exchanged.

    Raises:
        RequestCancelled: on every host.
    """
    if stop is None:
        return
    error, ends = None, False
    try:
        ends = hosts.is_leader and bool(stop())
    except Exception as caught:  # of whatever kind: it is the caller's function
        error, ends = caught, True
    if hosts.broadcast_ints([ends], 1)[0]:
        raise RequestCancelled from error


def asking_before_each(attention: LayerAttention, hosts: HostGroup, stop: Stop) -> LayerAttention:
    """Return an attention that asks before each layer's whether the prefill is to end."""

    def asking(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        require_going_on(hosts, stop)
        return attention(q, k, v, scale, layer)

    return asking
