"""Hosts whose data goes by way of host memory, as where several share a GPU; here between CPUs."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from apbv import HostGroup


@cache
def staged_group(hosts: HostGroup) -> HostGroup:
    """The same hosts once more, and the same group at the next call; collective."""
    groups = replace(hosts.groups, is_staged=True).of_some(
        range(hosts.size), hosts.timeout, has_data=True
    )
    return HostGroup(groups, device=hosts.device, timeout=hosts.timeout)


def staged_job(hosts: HostGroup, job: Callable, *args):
    """The job on staged hosts."""
    return job(staged_group(hosts), *args)
