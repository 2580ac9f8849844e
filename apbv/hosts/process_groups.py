"""The torch.distributed groups of a process: how they are made, and how they are left."""

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
# What was begun over gloo and is not waited for, such as a message to a draft host while a server is idle.
_UNAWAITED = timedelta(days=1)


class Place(NamedTuple):
    """Where a process computes.

    Attributes:
        device: as :func:`.devices.device_identity` names it.
        has_nccl: whether its group may exchange GPU memory over NCCL.
    """

    device: str
    has_nccl: bool


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that a process exchanges data in.

    Attributes:
        data: the same member of every host; None if there is one host.
        control: all processes, over gloo: statuses and tokens are CPU memory, and neither wait for nor stall the
            GPU there. None for a process that is alone.
        members: the processes of this host; None without tensor parallelism.
        nccl: those of them that carry GPU memory.
        is_staged: whether the data group carries CPU memory only, through which other data has to go.
    """

    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    members: dist.ProcessGroup | None = None
    nccl: tuple[dist.ProcessGroup, ...] = ()
    is_staged: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> "ProcessGroups":
        """Take a group for statuses alone, with every process a host; collective over its members."""
        if "gloo" not in dist.get_backend_config(group):
            group = _new_group(dist.get_process_group_ranks(group), "gloo", _exchange_limit(timeout))
        return cls(group, group)

    def connected(
        self, group: dist.ProcessGroup, places: Sequence[Place], tensor_parallel: int, timeout: float
    ) -> "ProcessGroups":
        """Make the groups for the data, with each T successive processes one host; collective over all of them.

        It may take as long as the slowest process.

        Args:
            group: the group whose statuses these exchange.
            places: of all processes.
            tensor_parallel: T.

        Raises:
            ValueError: the members of a host share a GPU.
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
            # What transformers exchanges on a CPU is waited for in Python; with NCCL nobody waits on the CPU.
            members = _new_group(ranks[same_host], POLLED if on_cpu else "nccl", limit)
        nccl = () if on_cpu else (None if is_staged else data, members)
        nccl = tuple(found for found in nccl if found is not None)
        return ProcessGroups(data, self.control, members, nccl, is_staged)

    def _data_group(self, group, ranks: list[int], on_cpu: bool, is_staged: bool, limit: timedelta):
        """Return the caller's own group where it will do; else make one."""
        is_whole = len(ranks) == dist.get_world_size(group)
        if on_cpu:
            return self.control if is_whole else _new_group(ranks, "gloo", limit)
        # Staged data is sent from a thread, and statuses by others: in one group their order would be by chance.
        if is_staged:
            return _new_group(ranks, "gloo", limit)
        return group if is_whole and "nccl" in dist.get_backend_config(group) else _new_group(ranks, "nccl", limit)

    def of_some(self, hosts: Sequence[int], timeout: float, has_data: bool) -> "ProcessGroups":
        """Make groups of some hosts; collective over them. What nobody waits for there may take a day."""
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
        """Return what gives up the groups over NCCL; None if there are none."""
        return Communicators(self.nccl) if self.nccl else None

    def connect(self, device: torch.device) -> None:
        """Build the communicators by a first exchange, for which the first request then does not wait.

        It blocks until the other processes do likewise.
        """
        with torch.cuda.device(device):
            for group in self.nccl:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.cuda.synchronize(device)


def _can_use_nccl(places: Sequence[Place]) -> bool:
    """Return whether NCCL can connect processes: it rejects two on one GPU. One alone needs no connection."""
    devices = [place.device for place in places]
    return len(places) == 1 or (all(place.has_nccl for place in places) and not sharing(devices))


def _new_group(ranks: Sequence[int], backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Make a group of its own members alone, with communicators of its own."""
    options = {"backend": backend, "timeout": limit, "use_local_synchronization": True}
    if backend == "nccl":
        # So that a small exchange does not queue behind a long attention kernel. It wants the limit twice.
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["pg_options"]._timeout = limit
    # Where the caller bound all processes to their devices, torch would split the new communicator from theirs.
    # Then all have to take part, not only the members, who would wait for the others for ever.
    world = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), **options)
    finally:
        world.bound_device_id = device


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


def join_world(timeout: float) -> bool:
    """Initialise torch.distributed from the environment that torchrun sets; False if the caller has done so.

    All processes then exchange CPU memory; what carries GPU memory is made when it is known who has which GPU.

    Raises:
        HostError: the hosts do not meet within the timeout, in seconds.
    """
    if dist.is_initialized():
        return False
    # NCCL's watchdog shall abort exchanges that fail or take too long, but not this process. torch reads this as
    # it makes a group; a user's own choice stands.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    limit = timeout + 2 * POLL_SECONDS
    # In a thread: gloo waits five times as long for hosts that are there, but cannot be connected to.
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
    """Destroy all process groups; hosts that do not answer are waited for only this many seconds, at most ten."""
    left = threading.Event()
    threading.Thread(target=_destroy_groups, args=(left,), daemon=True).start()
    left.wait(min(timeout, _LEAVING_SECONDS))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def require_whole_hosts(num_processes: int, tensor_parallel: int) -> None:
    """Reject processes that do not make whole hosts.

    Raises:
        ValueError: their number is not a multiple of T.
    """
    if tensor_parallel < 1 or num_processes % tensor_parallel:
        raise ValueError(
            f"{num_processes} process(es) cannot form hosts of {tensor_parallel} each: with --tensor-parallel T, "
            "start T processes per host"
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
