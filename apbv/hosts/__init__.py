"""The group of hosts that compute together.

These modules define what hosts exchange, and how a failure of one reaches the others.

Only this package imports torch.distributed.
"""

from typing import Any

from ..pending import Pending
from ..reporting import warn_renamed
from .devices import Moment, fair_share_of_cores
from .group import HostGroup, HostLinks, run_on_hosts
from .threads import in_thread

__all__ = [
    "HostGroup",
    "HostLinks",
    "Moment",
    "Pending",
    "fair_share_of_cores",
    "in_thread",
    "run_on_hosts",
]


def __getattr__(name: str) -> Any:
    """Return the object of a former name, with a warning."""
    if name == "Exchange":
        warn_renamed("apbv.hosts.Exchange", "apbv.hosts.Pending")
        return Pending
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
