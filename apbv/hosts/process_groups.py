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

from ..errors import HostError, InvalidConfigError
from .devices import sharing
from .failure_watch import POLL_SECONDS, WORK_LIMIT, Communicators
from .polled_group import PolledGroup
from .threads import in_thread

_LEAVING_SECONDS = 10.0
# Limit of gloo operations that are not waited for, such as a message to a draft host while a server
# is idle.
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
        control: all processes, over gloo: statuses and tokens are in CPU memory, and neither wait
            for nor stall the GPU there. None for a process that is alone.
        members: the TP ranks of this host; None without tensor parallelism.
        nccl: those of them that carry GPU memory.
        is_staged: whether the data group carries CPU memory only, so that GPU data is staged
            through it.
        is_known: whether torch knows the data group, so that other libraries can use it.
        made: all groups that this process has made for these hosts.
    """

    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    members: dist.ProcessGroup | None = None
    nccl: tuple[dist.ProcessGroup, ...] = ()
    is_staged: bool = False
    is_known: bool = True
    made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> "ProcessGroups":
        """Use a group for statuses only, with every process a host; collective over its members."""
        if "gloo" in dist.get_backend_config(group):
            return cls(group, group)
        founder = _Founder(group, [])
        control = founder.found("control", range(group.size()), _GLOO, _exchange_limit(timeout))
        return cls(control, control, made=founder.groups)

    def connected(
        self,
        group: dist.ProcessGroup,
        places: Sequence[Place],
        tensor_parallel: int,
        timeout: float,
    ) -> "ProcessGroups":
        """Make the data groups, with each T successive processes one host.

        Collective over all processes; it takes as long as the slowest.

        Args:
            group: the group for their statuses.
            places: of all processes.
            tensor_parallel: T.

        Raises:
            InvalidConfigError: TP ranks of a host share a GPU.
        """
        limit = _exchange_limit(timeout)
        on_cpu = all(place.device == "cpu" for place in places)
        can_use_nccl = not on_cpu and nccl_can_connect(places)
        for first in range(0, group.size(), tensor_parallel):
            if not on_cpu and not nccl_can_connect(places[first : first + tensor_parallel]):
                raise InvalidConfigError(
                    f"host {first // tensor_parallel} cannot run {tensor_parallel} tensor-parallel "
                    "processes: each needs its own GPU, and NCCL"
                )
        founder = self._founder()
        data = self._data_group(founder, group, on_cpu, can_use_nccl, tensor_parallel, limit)
        members = None
        if tensor_parallel > 1:
            # transformers' collectives on a CPU are waited for in Python; with NCCL the CPU does
            # not wait.
            first = group.rank() // tensor_parallel * tensor_parallel
            same_host = range(first, first + tensor_parallel)
            backend = _POLLED if on_cpu else _NCCL
            members = founder.found("members", same_host, backend, limit, known_in=group)

        nccl = []
        if can_use_nccl and data is not None:
            nccl.append(data)
        if not on_cpu and members is not None:
            nccl.append(members)
        is_staged = not on_cpu and not can_use_nccl
        return ProcessGroups(
            data,
            self.control,
            members,
            tuple(nccl),
            is_staged=is_staged,
            is_known=not is_staged,
            made=self.made,
        )

    def _data_group(
        self,
        founder: "_Founder",
        group: dist.ProcessGroup,
        on_cpu: bool,
        can_use_nccl: bool,
        tensor_parallel: int,
        limit: timedelta,
    ) -> dist.ProcessGroup | None:
        """Return the group of the processes with this TP rank on all hosts; None for one host."""
        size = group.size()
        if size == tensor_parallel:
            return None
        if tensor_parallel == 1:
            if on_cpu:
                return self.control
            if can_use_nccl and "nccl" in dist.get_backend_config(group):
                return group
        same_member = range(group.rank() % tensor_parallel, size, tensor_parallel)
        if can_use_nccl:
            return founder.found("data", same_member, _NCCL, limit, known_in=group)
        # Not the control group: staged data is sent from a thread, and statuses by others.
        return founder.found("data", same_member, _GLOO, limit)

    def of_some(
        self, hosts: Sequence[int], timeout: float, has_data: bool
    ) -> "ProcessGroups | None":
        """Make groups of some hosts.

        Collective over all hosts. Hosts that are not in the group, and a group of one, get None.

        Operations that are not waited for may take a day.
        """
        founder = self._founder()
        if len(hosts) == 1 or founder.rank not in hosts:
            return None
        control = founder.found("control", hosts, _GLOO, _UNAWAITED)
        if not has_data or not (self.is_staged or self.nccl):
            return ProcessGroups(control, control, is_known=False, made=self.made)
        data = founder.found(
            "data", hosts, _GLOO if self.is_staged else _NCCL, _exchange_limit(timeout)
        )
        nccl = () if self.is_staged else (data,)
        return ProcessGroups(
            data, control, None, nccl, self.is_staged, is_known=False, made=self.made
        )

    def _founder(self) -> "_Founder":
        assert self.control is not None  # there are other processes
        return _Founder(self.control, self.made)

    def communicators(self) -> Communicators | None:
        """Return the object that aborts the NCCL groups; None if there are none."""
        return Communicators(self.nccl) if self.nccl else None

    def connect(self, device: torch.device) -> None:
        """Build the communicators with a first collective.

        So the first request does not wait for them.

        It blocks until the other processes call it, too.
        """
        with torch.cuda.device(device):
            for group in self.nccl:
                group.allreduce([torch.zeros(1, device=device)]).wait()
                torch.cuda.synchronize(device)


def nccl_can_connect(places: Sequence[Place]) -> bool:
    """Return whether NCCL can connect processes: it rejects two on one GPU.

    A single process needs no connection.
    """
    if len(places) == 1:
        return True
    have_nccl = all(place.has_nccl for place in places)
    return have_nccl and not sharing([place.device for place in places])


class _Founder:
    """Makes groups of some processes of another group, in which only their members take part.

    torch lets such members meet in the store under the number of groups that a process has made.
    That differs between processes in different groups, and each more of this kind would make it
    differ for the caller's later groups. So members meet under a number of this class. torch knows
    a group only where other libraries use it.

    Args:
        group: the other group; creating a founder is collective over it.
        groups: to which the new groups are added, so that they live as long as these hosts: the
            destructor of a group waits for its collectives.

    Attributes:
        rank: of this process in the other group.
    """

    def __init__(self, group: dist.ProcessGroup, groups: list[dist.ProcessGroup]):
        store = group.get_group_store()
        self.rank = group.rank()
        # The same on all processes: how often they have come here.
        number = store.add(f"apbv/times that {self.rank} made groups", 1)
        self._store = dist.PrefixStore(f"apbv/groups {number}", store)
        self.groups = groups
        self._name = f"{group.group_desc}/{number}"

    def found(
        self,
        name: str,
        members: Sequence[int],
        backend: str,
        limit: timedelta,
        known_in: dist.ProcessGroup | None = None,
    ) -> dist.ProcessGroup:
        """Make a group with its own communicators; collective over its members.

        Args:
            name: of the group among those of this founder with the same members.
            members: ranks in the other group.
            backend: :data:`_GLOO`, :data:`_NCCL` or :data:`_POLLED`.
            limit: of its collectives.
            known_in: the other group, as torch knows it, if torch has to know this one; else None.
        """
        name = f"{name} {'-'.join(map(str, members))}"
        place = dist.PrefixStore(name, self._store)
        description = f"{self._name} {name}"
        if known_in is None:
            made = _make(backend, place, members.index(self.rank), len(members), limit, description)
            made._set_group_desc(description)
        else:
            ranks = dist.get_process_group_ranks(known_in)
            # If the caller bound all processes to their devices, torch would split the new
            # communicator from theirs. Then all would have to take part, and the members would wait
            # for the others for ever.
            world = dist.group.WORLD
            assert world is not None  # torch knows this group, and so the world's
            device = world.bound_device_id
            world.bound_device_id = None
            try:
                made = dist.new_group(
                    [ranks[member] for member in members],
                    limit,
                    backend,
                    pg_options=place,
                    use_local_synchronization=True,
                    group_desc=description,
                )
            finally:
                world.bound_device_id = device
        self.groups.append(made)
        return made


def _make(
    backend: str, place: dist.Store, rank: int, size: int, limit: timedelta, name: str
) -> dist.ProcessGroup:
    if backend == _POLLED:
        return PolledGroup(place, rank, size, limit, name)
    made: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if backend == _GLOO:
        device = "cpu"
        kind = dist.ProcessGroup.BackendType.GLOO
        made = dist.ProcessGroupGloo(place, rank, size, limit)
    else:
        # So that a small collective does not queue behind a long attention kernel.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = limit
        options.group_name = distributed_c10d.GroupName(name)
        device = "cuda"
        kind = dist.ProcessGroup.BackendType.NCCL
        made = dist.ProcessGroupNCCL(place, rank, size, options)
    group = dist.ProcessGroup(place, rank, size)
    group._set_default_backend(kind)  # which torch 2.15 asks for
    group._register_backend(torch.device(device), kind, made)
    return group


def _make_known(backend: str, asked, place: dist.Store) -> dist.ProcessGroup:
    """Make a group for ``dist.new_group``, which adds it to those that torch knows."""
    return _make(backend, place, asked.group_rank, asked.group_size, asked.timeout, asked.group_id)


# torch's backends, and one for transformers' collectives.
_GLOO = "apbv_gloo"
_NCCL = "apbv_nccl"
_POLLED = "apbv_polled"
for _name, _device in ((_NCCL, "cuda"), (_POLLED, "cpu")):
    dist.Backend.register_backend(
        _name, partial(_make_known, _name), extended_api=True, devices=[_device]
    )


def join_world(timeout: float) -> bool:
    """Initialise torch.distributed from the environment that torchrun sets.

    All processes can then exchange CPU memory; groups for GPU memory are made once the devices are
    known.

    Returns:
        False if the caller had initialised it already, else True.

    Raises:
        HostError: the rendezvous takes longer than the timeout, in seconds.
    """
    if dist.is_initialized():
        return False
    # Let NCCL's watchdog abort collectives that fail or time out, but not this process. torch reads
    # this when it makes a group; the user's own setting takes precedence.
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
            f"rendezvous timed out after {timeout:g} s: {error} (nodes connect over the network "
            "interface GLOO_SOCKET_IFNAME if set, else over the address of the node's own name)"
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
    threading.Thread(
        target=_destroy_groups, args=(left, [dist.group.WORLD, *groups]), daemon=True
    ).start()
    left.wait(min(timeout, _LEAVING_SECONDS))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size; (0, 1) without a group."""
    return (0, 1) if group is None else (group.rank(), group.size())


def require_whole_hosts(num_processes: int, tensor_parallel: int) -> None:
    """Reject a number of processes that does not make whole hosts.

    Raises:
        InvalidConfigError: their number is not a multiple of T.
    """
    if tensor_parallel < 1 or num_processes % tensor_parallel:
        raise InvalidConfigError(
            f"{num_processes} process(es) cannot form hosts of {tensor_parallel} each: with "
            "--tensor-parallel T, start T processes per host"
        )


def _destroy_groups(left: threading.Event, groups: list[dist.ProcessGroup]) -> None:
    """Destroy all process groups, but keep their objects while the process lives.

    A group's destructor waits for its collectives, which never complete if a host has stopped. At
    exit, when the last reference goes, that would block the process.
    """
    dist.destroy_process_group()
    left.set()
    threading.Event().wait()
    del groups


def _exchange_limit(timeout: float) -> timedelta:
    """Return the limit of a collective itself.

    It is longer than FailureWatch waits, which can report the reason.
    """
    return timedelta(seconds=(WORK_LIMIT + 2) * timeout + 2 * POLL_SECONDS)
