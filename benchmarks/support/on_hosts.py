"""Runs a job on real or simulated hosts, whichever are asked for."""

from collections.abc import Callable
from typing import TypeVar

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers import PreTrainedModel

from apbv import HostGroup

from support.simulated import share_weights, simulate

T = TypeVar("T")


def run_on(
    num_hosts: int, hosts: HostGroup, model: PreTrainedModel, job: Callable[[HostGroup, PreTrainedModel], T]
) -> T:
    """Run a job on so many hosts: the real ones, or simulated ones where there is only one.

    Args:
        num_hosts: the number of hosts.
        hosts: the real ones.
        model: the model, which every host gets as an object of its own with shared weights.
        job: function of a host and its model.

    Returns:
        What the job returned, on simulated hosts that of host 0.

    Raises:
        ValueError: several hosts were started, but another number is asked for.
    """
    if num_hosts == hosts.size:
        return job(hosts, share_weights(model))
    if hosts.size > 1:
        raise ValueError(f"{num_hosts} hosts were asked for, but {hosts.size} were started")
    # Copied before the threads start, so that each of them works on its own model.
    models = [share_weights(model) for _ in range(num_hosts)]
    return simulate(num_hosts, lambda host: job(host, models[host.rank]), device=hosts.device)[0]
