"""Cancels requests before their first token: between chunks of the tower, and between layers."""

from collections.abc import Callable

from ..errors import RequestCancelled
from ..hosts import HostGroup
from ..model.forward import LayerRows, LayerStep

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


class CancelBetweenLayers(LayerStep):
    """Asks before each layer whether to cancel; see :func:`require_going_on`."""

    def __init__(self, hosts: HostGroup, stop: Stop):
        self._hosts = hosts
        self._stop = stop

    def before(self, layer: int, rows: LayerRows) -> None:
        require_going_on(self._hosts, self._stop)
