"""The parts of an examination by name."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..hosts import HostGroup
from . import answers, backends, exchanges, machine, operators, speed
from .checks import Check, CheckFailed, Finding

_CHECKS: dict[str, Callable[[HostGroup, bool], Iterable[Check]]] = {
    "machine": machine.checks,
    "backends": backends.checks,
    "kernels": operators.checks,
    "hosts": exchanges.checks,
    "demo": answers.checks,
    "speed": speed.checks,
}


def checks_of(
    names: Sequence[str], hosts: HostGroup, is_quick: bool, is_connected: bool = True
) -> dict[str, Callable[[], Iterable[Check]]]:
    """Return what lists the checks of each part.

    Args:
        hosts: the hosts that are examined: on one alone, or on a CPU, there is less to check.
        is_quick: whether to leave out what takes long.
        is_connected: False: this host is alone because it could not be connected with the others, which fails.
    """
    found = {name: partial(_CHECKS[name], hosts, is_quick) for name in names}
    return found if is_connected else {**found, "hosts": lambda: [Check("connecting", _not_connected)]}


def _not_connected(host: HostGroup) -> Finding:
    raise CheckFailed("the hosts could not be connected, as the error above says; this is host 0 by itself")
