"""Creates and destroys the torch.distributed groups of a process."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from .devices import sharing
from .exchange import HostError, in_thread
from .failure_watch import POLL_SECONDS, WORK_LIMIT, Communicators
from .polled_group import POLLED

_LEAVING_SECONDS = 10.0
# Limit of gloo operations that are not waited for, such as a message to a draft host while a server is idle.
_UNAWAITED = timedelta(days=1)


class Place(NamedTuple):
    """Device of a process.

    Attributes:
        device: as :func:`.devices.device_identity` names it.
        has_nccl: whether its group may use NCCL for GPU memory.
    """

    device: str
    has_nccl: bool


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a process.

    Attributes:
        data: the same TP rank of every host; None if there is one host.
        control: all processes, over gloo: statuses and tokens are in CPU memory, and neither wait for nor stall
            the GPU there. None for a process that is alone.
        members: the TP ranks of this host; None without tensor parallelism.
        nccl: those of them that carry GPU memory.
        is_staged: whether the data group carries CPU memory only, so that GPU data is staged through it.
    """

    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    members: dist.ProcessGroup | None = None
    nccl: tuple[dist.ProcessGroup, ...] = ()
    is_staged: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> "ProcessGroups":
        """Use a group for statuses only, with every process a host; collective over its members."""
        if "gloo" not in dist.get_backend_config(group):
            group = _new_group(dist.get_process_group_ranks(group), "gloo", _exchange_limit(timeout))
        return cls(group, group)

    def connected(
        self, group: dist.ProcessGroup, places: Sequence[Place], tensor_parallel: int, timeout: float
    ) -> "ProcessGroups":
        """Make the data groups, with each T successive processes one host; collective over all of them.

        It takes as long as the slowest process.

        Args:
            group: the group for their statuses.
            places: of all processes.
            tensor_parallel: T.

        Raises:
            ValueError: TP ranks of a host share a GPU.
        """
        ranks, limit = dist.get_process_group_ranks(group), _exchange_limit(timeout)
        host, member = divmod(dist.get_rank(group), tensor_parallel)
        on_cpu = all(place.device == "cpu" for place in places)
        same_host = slice(host * tensor_parallel, (host + 1) * tensor_parallel)
        for first in range(0, len(ranks), tensor_parallel):
            if not on_cpu and not _can_use_nccl(places[first : first + tensor_parallel]):
                raise ValueError(
                    f"host {first // tensor_parallel} cannot run {tensor_parallel} tensor-parallel processes: "
                    "each needs its own GPU, and NCCL"
                )
        is_staged = not on_cpu and not _can_use_nccl(places)
        data = members = None
        if len(ranks) > tensor_parallel:
            data = self._data_group(group, ranks[member::tensor_parallel], on_cpu, is_staged, limit)
        if tensor_parallel > 1:
            # transformers' collectives on a CPU are waited for in Python; with NCCL the CPU does not wait.
            members = _new_group(ranks[same_host], POLLED if on_cpu else "nccl", limit)
        nccl = () if on_cpu else (None if is_staged else data, members)
        nccl = tuple(found for found in nccl if found is not None)
        return ProcessGroups(data, self.control, members, nccl, is_staged)

    def _data_group(self, group, ranks: list[int], on_cpu: bool, is_staged: bool, limit: timedelta):
        """Return the caller's own group if it is suitable; else make one."""
        is_whole = len(ranks) == dist.get_world_size(group)
        if on_cpu:
            return self.control if is_whole else _new_group(ranks, "gloo", limit)
        # Staged data is sent from a thread, and statuses by others: in one group their order would be random.
        if is_staged:
            return _new_group(ranks, "gloo", limit)
        return group if is_whole and "nccl" in dist.get_backend_config(group) else _new_group(ranks, "nccl", limit)

    def of_some(self, hosts: Sequence[int], timeout: float, has_data: bool) -> "ProcessGroups":
        """Make groups of some hosts; collective over them. Operations that are not waited for may take a day."""
        every_rank = dist.get_process_group_ranks(self.data)
        ranks = [every_rank[host] for host in hosts]
        control = _new_group(ranks, "gloo", _UNAWAITED)
        if not has_data or not (self.is_staged or self.nccl):
            return ProcessGroups(control, control)
        if self.is_staged:
            return ProcessGroups(_new_group(ranks, "gloo", _exchange_limit(timeout)), control, is_staged=True)
        data = _new_group(ranks, "nccl", _exchange_limit(timeout))
        return ProcessGroups(data, control, nccl=(data,))

    def communicators(self) -> Communicators | None:
        """Return the object that aborts the NCCL groups; None if there are none."""
        return Communicators(self.nccl) if self.nccl else None

    def connect(self, device: torch.device) -> None:
        """Build the communicators with a first collective, so that the first request does not wait for that.

        It blocks until the other processes call it, too.
        """
        with torch.cuda.device(device):
            for group in self.nccl:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.cuda.synchronize(device)


def _can_use_nccl(places: Sequence[Place]) -> bool:
    """Return whether NCCL can connect processes: it rejects two on one GPU. A single one needs no connection."""
    devices = [place.device for place in places]
    return len(places) == 1 or (all(place.has_nccl for place in places) and not sharing(devices))


def _new_group(ranks: Sequence[int], backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Make a group that only its members take part in creating, with its own communicators."""
    options = {"backend": backend, "timeout": limit, "use_local_synchronization": True}
    if backend == "nccl":
        # So that a small collective does not queue behind a long attention kernel. The limit has to be given
        # twice.
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["pg_options"]._timeout = limit
    # If the caller bound all processes to their devices, torch would split the new communicator from theirs. Then
    # all would have to take part, and the members would wait for the others for ever.
    world = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), **options)
    finally:
        world.bound_device_id = device


def level_group_counts(gather: Callable[[Tensor], Tensor]) -> None:
    """Equalise the number of groups that every process has made.

    torch names a group that only its members make after its ranks and the number of groups that the process has;
    with different numbers, members would wait for each other under different names.

    Args:
        gather: gathers a tensor of the same shape from every process, to ``[N, *shape]``.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    for _ in range(int(gather(torch.tensor([count])).max()) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def join_world(timeout: float) -> bool:
    """Initialise torch.distributed from the environment that torchrun sets; False if the caller has done so.

    All processes can then exchange CPU memory; groups for GPU memory are made once the devices are known.

    Raises:
        HostError: the rendezvous takes longer than the timeout, in seconds.
    """
    if dist.is_initialized():
        return False
    # Let NCCL's watchdog abort collectives that fail or time out, but not this process. torch reads this when it
    # makes a group; the user's own setting takes precedence.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    limit = timeout + 2 * POLL_SECONDS
    # In a thread: gloo waits five times as long for hosts that exist but cannot be connected to.
    meeting = in_thread(partial(dist.init_process_group, "gloo", timeout=timedelta(seconds=limit)))
    try:
        if not wait_for_futures([meeting], limit + POLL_SECONDS).done:
            raise RuntimeError("cannot connect to a host")
        meeting.result()
    except RuntimeError as error:
        raise HostError(
            f"rendezvous timed out after {timeout:g} s: {error} (nodes connect over the network interface "
            "GLOO_SOCKET_IFNAME if set, else over the address of the node's own name)"
        ) from error
    _set_pg_timeout(_exchange_limit(timeout), dist.group.WORLD)
    return True


def leave_world(timeout: float) -> None:
    """Destroy all process groups; wait for unresponsive hosts only this many seconds, at most ten."""
    left = threading.Event()
    threading.Thread(target=_destroy_groups, args=(left,), daemon=True).start()
    left.wait(min(timeout, _LEAVING_SECONDS))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def require_whole_hosts(num_processes: int, tensor_parallel: int) -> None:
    """Reject a number of processes that does not make whole hosts.

    Raises:
        ValueError: their number is not a multiple of T.
    """
    if tensor_parallel < 1 or num_processes % tensor_parallel:
        raise ValueError(
            f"{num_processes} process(es) cannot form hosts of {tensor_parallel} each: with --tensor-parallel T, "
            "start T processes per host"
        )


def _destroy_groups(left: threading.Event) -> None:
    """Destroy all process groups, but keep their objects while the process lives.

    A group's destructor waits for its collectives, which never complete if a host has stopped. At exit, when the
    last reference goes, that would block the process.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    left.set()
    threading.Event().wait()
    del groups


def _exchange_limit(timeout: float) -> timedelta:
    """Return the limit of a collective itself: longer than FailureWatch waits, which can report the reason."""
    return timedelta(seconds=(WORK_LIMIT + 2) * timeout + 2 * POLL_SECONDS)
