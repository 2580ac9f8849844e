"""The torch.distributed groups of a process: how they are made, and how they are left."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from .exchange import HostError, in_thread
from .failure_watch import POLL_SECONDS, WORK_LIMIT
from .polled_group import POLLED

_LEAVING_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that a process exchanges data in.

    Attributes:
        data: the same member of every host; None where there is one host.
        control: all processes, over gloo: statuses and tokens are host memory, and neither wait for nor stall the
            GPU there. None for a process that is alone.
        members: the processes of this host; None without tensor parallelism.
    """

    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    members: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, timeout: float) -> "ProcessGroups":
        """Take a group whose every process is a host; collective over its members."""
        control = group
        if device.type == "cuda" and "gloo" not in dist.get_backend_config(group):
            control = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=_exchange_limit(timeout),
                use_local_synchronization=True,
            )
        return cls(group, control)

    def joined(self, tensor_parallel: int, device: torch.device, timeout: float) -> "ProcessGroups":
        """Make each T successive processes of the data group one host; collective over all of them."""
        ranks = dist.get_process_group_ranks(self.data)
        backend = dist.get_backend_config(self.data)
        host, member = divmod(dist.get_rank(self.data), tensor_parallel)
        options = {"timeout": _exchange_limit(timeout), "use_local_synchronization": True}
        data = None
        if len(ranks) > tensor_parallel:
            data = dist.new_group(ranks[member::tensor_parallel], backend=backend, **options)
        members = dist.new_group(
            ranks[host * tensor_parallel : (host + 1) * tensor_parallel],
            # What transformers exchanges on a CPU is waited for in Python; with NCCL nobody waits on the CPU.
            backend=POLLED if device.type == "cpu" else backend,
            **options,
        )
        return ProcessGroups(data, self.control, members)

    def of_some(self, hosts: Sequence[int]) -> dist.ProcessGroup:
        """Make a data group of some hosts; collective over them. What nobody waits for there may take a day."""
        ranks = dist.get_process_group_ranks(self.data)
        return dist.new_group(
            [ranks[host] for host in hosts],
            backend=dist.get_backend_config(self.data),
            timeout=timedelta(days=1),
            use_local_synchronization=True,
        )


def level_group_counts(gather: Callable[[Tensor], Tensor]) -> None:
    """Let every process have made the same number of groups.

    A group that only its members make is named after its ranks and the number of groups its maker has; where
    these differ the members would wait for each other under different names.

    Args:
        gather: gathers a tensor of the same shape from every process, to ``[N, *shape]``.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    for _ in range(int(gather(torch.tensor([count])).max()) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def join_world(device: torch.device, timeout: float) -> bool:
    """Initialise torch.distributed from the environment that torchrun sets; False where the caller has done so.

    Raises:
        HostError: the hosts do not meet within the timeout, in seconds.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timeout + 2 * POLL_SECONDS

    def meet() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=limit))

    # In a thread: gloo waits five times as long for hosts that are there, but cannot be connected to.
    meeting = in_thread(meet)
    try:
        if not wait_for_futures([meeting], limit + POLL_SECONDS).done:
            raise RuntimeError("a host cannot be connected to")
        meeting.result()
    except RuntimeError as error:
        raise HostError(
            f"the hosts did not meet within {timeout:g} s: {error} (nodes reach each other by the network "
            "interface that GLOO_SOCKET_IFNAME names, or else by the address of a node's own name)"
        ) from error
    _set_pg_timeout(_exchange_limit(timeout), dist.group.WORLD)
    return True


def leave_world(timeout: float) -> None:
    """Destroy all process groups; hosts that do not answer are waited for only this many seconds, at most ten."""
    left = threading.Event()
    threading.Thread(target=_destroy_groups, args=(left,), daemon=True).start()
    left.wait(min(timeout, _LEAVING_SECONDS))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def choose_device(wanted: str | torch.device | None, local_rank: int | None = None) -> torch.device:
    """Return the device that is wanted, or else this process's GPU, or the CPU where there is no GPU.

    Args:
        wanted: None: none in particular.
        local_rank: this process's number on its machine; None: as torchrun's LOCAL_RANK says, or 0.

    Raises:
        HostError: there are fewer GPUs than processes.
    """
    if wanted is not None:
        return torch.device(wanted)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise HostError(
            f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
            "start at most one process per GPU, or pass device='cpu'"
        )
    return torch.device("cuda", local_rank)


def fair_share_of_cores() -> int:
    """Return how many CPU cores this process may keep busy beside the other processes on its machine; at least 1.

    They are the cores that the operating system lets this process run on, divided by the number of processes that
    torchrun started on this machine (its LOCAL_WORLD_SIZE); without torchrun all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:  # macOS and Windows have no such limit, or do not tell
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def require_whole_hosts(num_processes: int, tensor_parallel: int) -> None:
    """Refuse processes that do not make whole hosts.

    Raises:
        ValueError: their number is not a multiple of T.
    """
    if tensor_parallel < 1 or num_processes % tensor_parallel:
        raise ValueError(
            f"{num_processes} process(es) cannot form hosts of {tensor_parallel} each: with tensor parallelism T, "
            "start T times as many processes as hosts"
        )


def _destroy_groups(left: threading.Event) -> None:
    """Destroy all process groups, but keep their objects for as long as the process lives.

    A group's destructor waits for its exchanges, and one with a host that has stopped never ends. At exit, where
    else the last reference goes, that would keep the process.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    left.set()
    threading.Event().wait()
    del groups


def _exchange_limit(timeout: float) -> timedelta:
    """Bound what an exchange takes by itself: longer than FailureWatch waits, which can say what happened."""
    return timedelta(seconds=(WORK_LIMIT + 2) * timeout + 2 * POLL_SECONDS)
