"""Hosts whose data goes by way of host memory, as where several share a GPU; here between CPUs."""

from collections.abc import Callable
from functools import cache

import torch.distributed as dist

from apbv import HostGroup
from apbv.hosts.process_groups import ProcessGroups, level_group_counts


@cache
def staged_group(hosts: HostGroup) -> HostGroup:
    """The same hosts once more, and the same group at the next call; collective."""
    ranks = dist.get_process_group_ranks(hosts._groups.control)
    level_group_counts(hosts._gather_control)
    data, control = (dist.new_group(ranks, backend="gloo", use_local_synchronization=True) for _ in range(2))
    return HostGroup(ProcessGroups(data, control, is_staged=True), device=hosts.device, timeout=hosts.timeout)


def staged_job(hosts: HostGroup, job: Callable, *args):
    """The job on staged hosts."""
    return job(staged_group(hosts), *args)
