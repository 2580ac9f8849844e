"""Cancels requests before their first token: between chunks of the tower, and between layers."""

from collections.abc import Callable

from torch import Tensor

from ..errors import RequestCancelled
from ..hosts import HostGroup
from ..model.attention import LayerAttention

Stop = Callable[[], bool]


def require_going_on(hosts: HostGroup, stop: Stop | None) -> None:
    """Call ``stop`` on host 0; if it returns true, cancel on all hosts at this point; collective.

    Args:
        stop: called on host 0; None on all hosts: no cancelling, and no communication.

    Raises:
        RequestCancelled: on every host.
    """
    if stop is None:
        return
    error = None
    is_cancelled = False
    try:
        if hosts.is_leader:
            is_cancelled = bool(stop())
    except Exception as caught:  # of any kind: it is the caller's function
        error = caught
        is_cancelled = True
    if hosts.broadcast_ints([int(is_cancelled)], 1)[0]:
        raise RequestCancelled from error


def asking_before_each(attention: LayerAttention, hosts: HostGroup, stop: Stop) -> LayerAttention:
    """Wrap an attention so that it checks for cancellation before each layer."""

    def asking(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        require_going_on(hosts, stop)
        return attention(q, k, v, scale, layer)

    return asking
