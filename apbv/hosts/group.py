"""HostGroup: rank, size, device and process groups as one argument.

How hosts wait for each other, and how a failure of one reaches the others: see :mod:`.failure_watch`.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import Collectives, as_tensor, gather_bytes, raise_together
from .exchange import Exchange, HostError
from .failure_watch import GRACE_SECONDS, POLL_SECONDS, WORK_LIMIT, FailureWatch
from .heartbeat import Heartbeat
from .polled_group import PolledGroup
from .process_groups import (
    ProcessGroups,
    choose_device,
    join_world,
    leave_world,
    level_group_counts,
    rank_and_size,
    require_whole_hosts,
)


class HostGroup:
    """The hosts that prefill together: one per full replica of the model.

    A host is one process, or with tensor parallelism T processes, its *members*: process h * T + t of all is
    member t of host h, and holds its share of every layer. Each of them has a HostGroup, on which the members of a
    host do the same; data goes to the members of the same t on the other hosts, while statuses, chosen tokens and
    failures concern all processes.

    Build it with :meth:`from_env`, :meth:`from_process_group` or :meth:`single`.

    Attributes:
        rank: this host's index h in 0 .. size-1.
        size: H.
        tensor_parallel_rank: which member of its host this process is, t in 0 .. tensor_parallel_size-1.
        tensor_parallel_size: T.
        device: where this process computes.
        timeout: seconds to wait for other processes of which none works, before giving up.
        bytes_received: payload that this process received from other hosts since the group was built; what
            transformers exchanges between the members of a host is not counted.
        has_own_process: whether no other host computes in this process, so that threads may work beside it.
    """

    has_own_process = True

    def __init__(
        self,
        groups: ProcessGroups | None = None,
        *,
        device: torch.device,
        timeout: float,
        owns_group: bool = False,
        heartbeat: Heartbeat | None = None,
        waits_for_work: bool = True,
    ):
        """Wrap process groups that exist.

        Args:
            groups: None for a process that is alone.
            owns_group: whether :meth:`close` destroys all process groups.
            heartbeat: one that another group of this process has already; None: a new one.
            waits_for_work: see :meth:`subgroup`.
        """
        groups = groups or ProcessGroups()
        self._groups, self._owns_group = groups, owns_group
        self.rank, self.size = rank_and_size(groups.data)
        self.tensor_parallel_rank, self.tensor_parallel_size = rank_and_size(groups.members)
        self.device = device
        self.timeout = timeout
        self.bytes_received = 0
        store = None if groups.control is None else groups.control.get_group_store()
        if store is not None and heartbeat is None:
            heartbeat = Heartbeat(store, self.name, timeout, WORK_LIMIT * timeout)
        self._watch = FailureWatch(self.name, timeout, store, heartbeat, waits_for_work)
        self._data = Collectives(groups.data, self._watch)
        self._control = Collectives(groups.control, self._watch)
        if isinstance(groups.members, PolledGroup):
            groups.members.wait_for = self._watch.wait

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> "HostGroup":
        """Return one host, this process, without a process group."""
        return cls(device=choose_device(device, local_rank=0), timeout=0.0)

    @classmethod
    def from_env(
        cls, device: str | torch.device | None = None, timeout: float = 300.0, *, tensor_parallel: int = 1
    ) -> "HostGroup":
        """Join the hosts that torchrun started; a process that torchrun did not start is a single host.

        Args:
            device: this process's device. None: the GPU of LOCAL_RANK, or the CPU where there is none.
            timeout: seconds to wait for another process; of one that works, ten times as many.
            tensor_parallel: T, processes of a host.

        Raises:
            ValueError: the number of processes is not a multiple of T.
            HostError: more processes than GPUs were started on this machine, or the hosts do not meet.
        """
        require_whole_hosts(int(os.environ.get("WORLD_SIZE", 1)), tensor_parallel)
        if "RANK" not in os.environ:
            return cls.single(device)
        device = choose_device(device)
        options = {"tensor_parallel": tensor_parallel, "owns_group": join_world(device, timeout)}
        return cls.from_process_group(dist.group.WORLD, device, timeout, **options)

    @classmethod
    def from_process_group(
        cls,
        group,
        device: str | torch.device | None = None,
        timeout: float = 300.0,
        *,
        tensor_parallel: int = 1,
        owns_group: bool = False,
    ) -> "HostGroup":
        """Take the members of a process group that the caller made; collective over its members.

        Args:
            group: a torch.distributed group with a gloo backend, an NCCL backend, or both. Its own timeout bounds
                every exchange, also with a process that works.
            device: this process's device; None as in :meth:`from_env`.
            timeout: seconds to wait for another process; of one that works, ten times as many.
            tensor_parallel: T; the first T processes of the group are host 0, and so on.
            owns_group: whether :meth:`close` destroys all process groups of this process.

        Raises:
            ValueError: the number of processes is not a multiple of T.
        """
        require_whole_hosts(dist.get_world_size(group), tensor_parallel)
        device = choose_device(device)
        groups = ProcessGroups.of(group, device, timeout)
        processes = cls(groups, device=device, timeout=timeout, owns_group=owns_group)
        if tensor_parallel == 1:
            return processes
        level_group_counts(processes._gather_control)
        groups = groups.joined(tensor_parallel, device, timeout)
        return cls(groups, device=device, timeout=timeout, owns_group=owns_group)

    def subgroup(
        self, members: Sequence[int], timeout: float | None = None, waits_for_work: bool = True
    ) -> "HostGroup | None":
        """Make a group of some of these hosts, which fails by itself; collective over all of them.

        What a host works on in one of these groups is a sign of work in all of them.

        It lives as long as this process's groups do: torch gives a destroyed group's name to the next one, which
        then finds the old one's addresses.

        Args:
            members: ranks in this group, ascending.
            timeout: seconds to wait for one another; by default as here. What was begun and is not waited for may
                take a day.
            waits_for_work: the timeout begins anew while any of these hosts works, as here; else it is a bound on
                the wait, whatever the other does meanwhile.

        Returns:
            The group on its members, None on the others.

        Raises:
            ValueError: the hosts are of several processes each.
        """
        if self.tensor_parallel_size > 1:
            raise ValueError("hosts of several processes cannot form subgroups")
        if len(members) > 1:
            level_group_counts(self._gather_control)
        if self.rank not in members:
            return None
        heartbeat = self._watch.heartbeat
        if len(members) == 1:
            return HostGroup(device=self.device, timeout=0.0, heartbeat=heartbeat)
        timeout = self.timeout if timeout is None else timeout
        groups = ProcessGroups.of(self._groups.of_some(members), self.device, timeout)
        return HostGroup(
            groups, device=self.device, timeout=timeout, heartbeat=heartbeat, waits_for_work=waits_for_work
        )

    @property
    def is_leader(self) -> bool:
        """Whether this is the one process that samples, drafts and prints: the first member of host 0."""
        return self.rank == 0 and self.tensor_parallel_rank == 0

    @property
    def num_processes(self) -> int:
        """H * T."""
        return self.size * self.tensor_parallel_size

    @property
    def name(self) -> str:
        """What messages call this process."""
        return self.name_of(self.rank * self.tensor_parallel_size + self.tensor_parallel_rank)

    def __repr__(self) -> str:
        members = f" x {self.tensor_parallel_size} processes" if self.tensor_parallel_size > 1 else ""
        return f"HostGroup({self.name} of {self.size}{members}, {self.device})"

    def name_of(self, process: int) -> str:
        """Return what messages call one of the H * T processes."""
        host, member = divmod(process, self.tensor_parallel_size)
        return f"host {host}" + (f", member {member}" if self.tensor_parallel_size > 1 else "")

    def tensor_parallel_mesh(self) -> DeviceMesh:
        """Return this host's members as a mesh of one dimension, ``tp``; for T > 1."""
        return DeviceMesh.from_group(self._groups.members, self.device.type, mesh_dim_names=("tp",))

    def clock(self) -> float:
        """Return the seconds since some moment; only differences mean anything."""
        return time.perf_counter()

    @property
    def is_broken(self) -> bool:
        """Whether a host failed in an exchange: this group can be used no more."""
        return self._watch.is_broken

    @property
    def process_group(self):
        """The torch.distributed group of the data, for libraries that exchange data themselves; None alone."""
        return self._groups.data

    def all_gather(self, tensor: Tensor) -> Exchange:
        """Start gathering one tensor of the same shape from every host; the result is ``[H, *shape]``."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Exchange(lambda: tensor[None])
        self.bytes_received += (self.size - 1) * tensor.nbytes
        return self._data.all_gather(tensor)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:
        """Start sending one tensor to every host and receiving one from every host.

        Args:
            tensors: H of them, of one dtype; number h goes to host h. Empty ones travel as nothing.
            shapes: H shapes; what host h sends here has shape h.

        The result is the list of H received tensors.
        """
        if self.size == 1:
            return Exchange(lambda: list(tensors))
        num_received = sum(math.prod(shape) for host, shape in enumerate(shapes) if host != self.rank)
        self.bytes_received += num_received * tensors[0].element_size()
        return self._data.all_to_all(tensors, shapes)

    def shift(self, tensor: Tensor, received_shape: Sequence[int]) -> Exchange:
        """Start sending a tensor to the next host in the ring, and receiving one from the host before.

        The result has ``received_shape`` and the tensor's dtype. It is an all-to-all in which everybody else gets
        nothing: with both back ends that is a send to, and a receive from, the neighbours only.
        """
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        nothing = tensor.new_empty(0)
        tensors = [tensor if host == following else nothing for host in range(self.size)]
        shapes = [received_shape if host == before else (0,) for host in range(self.size)]
        exchange = self.all_to_all(tensors, shapes)
        return Exchange(lambda: exchange.wait()[before], exchange.has_ended)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Send one host's tensor to every host, in place; shape and dtype are the same everywhere."""
        if self.size == 1:
            return tensor
        self._data.broadcast(tensor, source).wait()
        self.bytes_received += tensor.nbytes if self.rank != source else 0
        return tensor

    def start_broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor in host memory from one host to all; shape and dtype are the same everywhere.

        The result is the tensor. On the source it has ended when everybody takes part.
        """
        exchange = self._control.broadcast(tensor, source)

        def finish() -> Tensor:
            exchange.wait()
            self.bytes_received += tensor.nbytes if self.rank != source else 0
            return tensor

        return Exchange(finish, exchange.has_ended)

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        """Send ``count`` 64-bit integers from the leader to everybody; only the leader's ``values`` matter."""
        if self.num_processes == 1:
            return list(values)
        tensor = torch.tensor(values if self.is_leader else [0] * count, dtype=torch.int64)
        return self._control.broadcast(tensor, 0).wait().tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Send any number of bytes from the leader to everybody; only the leader's ``data`` matters."""
        if self.num_processes == 1:
            return data
        (length,) = self.broadcast_ints([len(data)] if self.is_leader else None, 1)
        if not length:
            return b""
        if not self.is_leader:
            return self.start_broadcast(torch.empty(length, dtype=torch.uint8), 0).wait().numpy().tobytes()
        self.start_broadcast(as_tensor(data), 0).wait()
        return data

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Gather the same number of floats from every process, on every process: one list per process."""
        return self._gather_control(torch.tensor(values, dtype=torch.float64)).tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """Gather JSON-ready values of any size from every process, on every process; collective."""
        return [json.loads(data) for data in gather_bytes(self._gather_control, json.dumps(value).encode())]

    def mean_over_members(self, tensor: Tensor) -> Tensor:
        """Return, on every process, the mean over host 0's members of a small fp32 tensor in host memory."""
        if self.tensor_parallel_size == 1:
            return tensor
        return self._gather_control(tensor)[: self.tensor_parallel_size].mean(dim=0)

    def barrier(self) -> None:
        """Wait until every process is here and its device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._gather_control(torch.zeros(1))

    def require_same(self, what: str, value: bytes) -> None:
        """Make sure that every process holds the same value; collective.

        Raises:
            HostError: it differs from the first one's, on every process. Going on would mix two prompts into one.
        """
        digests = self._gather_control(as_tensor(hashlib.sha256(value).digest()))
        different = [process for process, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if different:
            raise HostError(f"{what} of {self.name_of(different[0])} differs from that of {self.name_of(0)}")

    def start_gathering(self, tensor: Tensor) -> Exchange:
        """Start gathering a small tensor in host memory from every process; the result is ``[H * T, *shape]``."""
        return Exchange(lambda: tensor[None]) if self.num_processes == 1 else self._control.all_gather(tensor)

    def _gather_control(self, tensor: Tensor) -> Tensor:
        return self.start_gathering(tensor).wait()

    def working(self, stage: str) -> AbstractContextManager:
        """Return a context for long work outside a stage, so that other hosts go on waiting for this one."""
        return self._watch.working(stage)

    @contextmanager
    def local_stage(self, name: str) -> Iterator[None]:
        """Run a stage without exchanges inside; at its end all hosts raise, or none does. Every host enters it.

        A host that failed raises its own error, the others a HostError that quotes it.
        """
        error = None
        with self.working(name):
            try:
                yield
            except HostError:
                raise
            except Exception as caught:
                error = caught
            raise_together(self._gather_control, self.name_of, name, error)

    def collective_stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a stage with exchanges inside, in which a failure breaks the group.

        A host that fails tells the others, which then raise a HostError. A single host has no group to break, and
        may go on. So may hosts that all raise :class:`AgreedError`.
        """
        return self._watch.collective_stage(name, self.num_processes > 1)

    def let_others_report(self) -> None:
        """After a failure, and before this process exits, give every host time to say why it ends.

        torchrun stops the other processes of a machine as soon as one of them has failed.
        """
        if self.num_processes == 1:
            return
        if not self._watch.is_broken:
            try:
                self.barrier()
                return
            except HostError:
                pass
        time.sleep(POLL_SECONDS + GRACE_SECONDS)

    def close(self) -> None:
        """Leave the process group, where :meth:`from_env` made it; hosts that do not answer are not waited for."""
        if self._owns_group and dist.is_initialized():
            if self._watch.heartbeat is not None:
                self._watch.heartbeat.stop()
            leave_world(self.timeout)
