"""The group of hosts that compute together.

These modules define what hosts exchange, and how a failure of one reaches the others.

Only this package imports torch.distributed.
"""

from .devices import Moment, fair_share_of_cores
from .exchange import Exchange, in_thread
from .group import HostGroup, run_on_hosts

__all__ = [
    "Exchange",
    "HostGroup",
    "Moment",
    "fair_share_of_cores",
    "in_thread",
    "run_on_hosts",
]
