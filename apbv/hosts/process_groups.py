"""Creates and destroys the torch.distributed groups of a process."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .devices import sharing
from .exchange import HostError, in_thread
from .failure_watch import POLL_SECONDS, WORK_LIMIT, Communicators
from .polled_group import PolledGroup

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
        made: all groups that this process has made for these hosts; they live as long as the process.
    """

    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    members: dist.ProcessGroup | None = None
    nccl: tuple[dist.ProcessGroup, ...] = ()
    is_staged: bool = False
    made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> "ProcessGroups":
        """Use a group for statuses only, with every process a host; collective over its members."""
        if "gloo" in dist.get_backend_config(group):
            return cls(group, group)
        made = _Founder(group, [])
        control = made.group("control", dist.get_process_group_ranks(group), _GLOO, _exchange_limit(timeout))
        return cls(control, control, made=made.groups)

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
        data, members, made = None, None, _Founder(self.control, self.made)
        if len(ranks) > tensor_parallel:
            data = self._data_group(group, ranks[member::tensor_parallel], on_cpu, is_staged, limit, made)
        if tensor_parallel > 1:
            # transformers' collectives on a CPU are waited for in Python; with NCCL the CPU does not wait.
            members = made.group("members", ranks[same_host], _POLLED if on_cpu else _NCCL, limit)
        nccl = () if on_cpu else (None if is_staged else data, members)
        nccl = tuple(found for found in nccl if found is not None)
        return ProcessGroups(data, self.control, members, nccl, is_staged, self.made)

    def _data_group(
        self, group, ranks: list[int], on_cpu: bool, is_staged: bool, limit: timedelta, made: "_Founder"
    ):
        """Return the caller's own group if it is suitable; else make one."""
        is_whole = len(ranks) == dist.get_world_size(group)
        if on_cpu and is_whole:
            return self.control
        # Staged data is sent from a thread, and statuses by others: in one group their order would be random.
        if not on_cpu and not is_staged and is_whole and "nccl" in dist.get_backend_config(group):
            return group
        return made.group("data", ranks, _GLOO if on_cpu or is_staged else _NCCL, limit)

    def of_some(self, hosts: Sequence[int], timeout: float, has_data: bool) -> "ProcessGroups | None":
        """Make groups of some hosts; collective over all, of which the others, and one alone, get None.

        Operations that are not waited for may take a day.
        """
        made, every_rank = _Founder(self.control, self.made), dist.get_process_group_ranks(self.data)
        ranks = [every_rank[host] for host in hosts]
        if len(ranks) == 1 or dist.get_rank() not in ranks:
            return None
        control = made.group("control", ranks, _GLOO, _UNAWAITED)
        if not has_data or not (self.is_staged or self.nccl):
            return ProcessGroups(control, control, made=self.made)
        data = made.group("data", ranks, _GLOO if self.is_staged else _NCCL, _exchange_limit(timeout))
        return ProcessGroups(data, control, None, () if self.is_staged else (data,), self.is_staged, self.made)

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


class _Founder:
    """Makes groups of some processes of another group, in which only their members take part.

    torch lets the members of such a group meet in the store under a name that it derives from the number of groups
    in each process, which differs between processes that are in different groups. So these backends are given a
    place in the store by a number that is the same on all: how often they have come here.

    Args:
        group: the other group; creating a founder is collective over it.
        groups: to which the new groups are added.
    """

    def __init__(self, group: dist.ProcessGroup, groups: list[dist.ProcessGroup]):
        store = group.get_group_store()
        number = store.add(f"apbv/times that {dist.get_rank(group)} made groups", 1)
        self._store, self.groups = dist.PrefixStore(f"apbv/groups {number}", store), groups
        self._name = f"{group.group_desc}/{number}"

    def group(self, name: str, ranks: Sequence[int], backend: str, limit: timedelta) -> dist.ProcessGroup:
        """Make a group with its own communicators; collective over its members.

        Args:
            name: of the group among those of this founder with the same members.
            ranks: the members, in the world.
            backend: the name of one of :data:`_BACKENDS`.
            limit: of its collectives.
        """
        name = f"{name} {'-'.join(map(str, ranks))}"
        place = dist.PrefixStore(name, self._store)
        options = {"pg_options": place, "use_local_synchronization": True, "group_desc": f"{self._name} {name}"}
        # If the caller bound all processes to their devices, torch would split the new communicator from theirs.
        # Then all would have to take part, and the members would wait for the others for ever.
        world = dist.group.WORLD
        device, world.bound_device_id = world.bound_device_id, None
        try:
            self.groups.append(dist.new_group(list(ranks), limit, backend, **options))
        finally:
            world.bound_device_id = device
        return self.groups[-1]


def _make_gloo(asked, place: dist.Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(place, asked.group_rank, asked.group_size)
    gloo = dist.ProcessGroupGloo(place, asked.group_rank, asked.group_size, asked.timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _make_nccl(asked, place: dist.Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(place, asked.group_rank, asked.group_size)
    # So that a small collective does not queue behind a long attention kernel.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = asked.timeout
    options.global_ranks_in_group, options.group_name = asked.global_ranks_in_group, asked.group_id
    nccl = dist.ProcessGroupNCCL(place, asked.group_rank, asked.group_size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    return group


def _make_polled(asked, place: dist.Store) -> dist.ProcessGroup:
    return PolledGroup(place, asked.group_rank, asked.group_size, asked.timeout, asked.group_id)


# torch's backends, and one of transformers' collectives, whose processes meet where a founder says.
_GLOO, _NCCL, _POLLED = "apbv_gloo", "apbv_nccl", "apbv_polled"
_BACKENDS = {_GLOO: (_make_gloo, "cpu"), _NCCL: (_make_nccl, "cuda"), _POLLED: (_make_polled, "cpu")}
for _name, (_make, _device) in _BACKENDS.items():
    dist.Backend.register_backend(_name, _make, extended_api=True, devices=[_device])


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
    # Its name until torch 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(_exchange_limit(timeout), dist.group.WORLD)
    return True


def leave_world(timeout: float, groups: Sequence[dist.ProcessGroup]) -> None:
    """Destroy all process groups; wait for unresponsive hosts only this many seconds, at most ten.

    Args:
        groups: those besides the world's.
    """
    left = threading.Event()
    threading.Thread(target=_destroy_groups, args=(left, [dist.group.WORLD, *groups]), daemon=True).start()
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


def _destroy_groups(left: threading.Event, groups: list[dist.ProcessGroup]) -> None:
    """Destroy all process groups, but keep their objects while the process lives.

    A group's destructor waits for its collectives, which never complete if a host has stopped. At exit, when the
    last reference goes, that would block the process.
    """
    dist.destroy_process_group()
    left.set()
    threading.Event().wait()
    del groups


def _exchange_limit(timeout: float) -> timedelta:
    """Return the limit of a collective itself: longer than FailureWatch waits, which can report the reason."""
    return timedelta(seconds=(WORK_LIMIT + 2) * timeout + 2 * POLL_SECONDS)
