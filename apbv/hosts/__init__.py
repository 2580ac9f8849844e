"""Who computes: the group of hosts, what they exchange, and how a failure of one reaches the others."""

from .group import AgreedError, Exchange, HostError, HostGroup, in_thread, run_on_hosts

__all__ = ["AgreedError", "Exchange", "HostError", "HostGroup", "in_thread", "run_on_hosts"]
