"""HostGroup: rank, size, device and process groups in one object.

Timeouts and failure propagation are described in :mod:`.failure_watch`.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ApbvError, HostError, InvalidConfigError, as_kind, exit_status_of
from ..pending import Pending
from ..reporting import report_error, report_fault, warn_caller
from .agreement import Agreement, StageReport, describe_difference
from .collectives import Collectives, LocalCollectives, StagedCollectives
from .devices import Moment, choose_device, device_identity, record_event, sharing
from .failure_watch import GRACE_SECONDS, POLL_SECONDS, WORK_LIMIT, FailureWatch, PendingCall
from .heartbeat import Heartbeat
from .polled_group import PolledGroup
from .process_groups import (
    Place,
    ProcessGroups,
    join_world,
    leave_world,
    rank_and_size,
    require_whole_hosts,
)
from .threads import in_thread


@dataclass(frozen=True)
class HostLinks:
    """A host's rank, and how it reaches other hosts without process groups.

    For simulations and tests: :class:`apbv.testing.simulated.SimulatedHost` has such links.

    Attributes:
        rank: this host's index h in 0 .. size-1.
        size: H.
        watch: posts this host's failures, and detects those of others. None: failures reach nobody.
        collectives: exchanges tensors, on devices and in CPU memory. None: a subclass of
            :class:`HostGroup` overrides the methods that exchange any, or there are no exchanges.
    """

    rank: int
    size: int
    watch: FailureWatch | None = None
    collectives: Collectives | LocalCollectives | None = None


class HostGroup:
    """The hosts (sequence-parallel ranks) that prefill together: one per full replica of the model.

    A host is one process, or with tensor parallelism T processes, its *members* (TP ranks): process
    h * T + t of all is TP rank t of host h, and holds its shard of every layer. Each of them has a
    HostGroup, on which the TP ranks of a host make the same calls; data goes to the same TP rank of
    the other hosts, while statuses, chosen tokens and failures concern all processes.

    Build it with :meth:`from_env`, :meth:`from_process_group` or :meth:`single`. A subclass that
    exchanges data in a way of its own passes :class:`HostLinks` to the constructor.

    Attributes:
        rank: this host's index h in 0 .. size-1.
        size: H.
        tensor_parallel_rank: this process's TP rank t in 0 .. tensor_parallel_size-1.
        tensor_parallel_size: T.
        num_processes: H * T.
        is_leader: whether this is the one process that samples, drafts and prints: TP rank 0 of
            host 0.
        name: this process's name in messages.
        device: where this process computes.
        timeout: seconds to wait for other processes without a heartbeat, before giving up.
        bytes_received: payload that this process received from other hosts since the group was
            built; what transformers exchanges between TP ranks is not counted.
        groups: the process groups that it exchanges data over.
        watch: posts this process's failures, and detects those of others.
        has_own_process: whether no other host computes in this process, so that it may use threads.
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
        numbers: Sequence[int] | None = None,
        links: HostLinks | None = None,
    ):
        """Wrap process groups that exist, or links that need none.

        Args:
            groups: None for a process that is alone, or has ``links``.
            owns_group: whether :meth:`close` destroys all process groups.
            heartbeat: an existing one of another group of this process; None: a new one.
            waits_for_work: see :meth:`subgroup`.
            numbers: the hosts' numbers in messages; None: their ranks.
            links: how this host reaches others without process groups; None: it does not.
        """
        groups = groups or ProcessGroups()
        if links is None:
            self.rank, self.size = rank_and_size(groups.data)
        else:
            self.rank = links.rank
            self.size = links.size
        self.tensor_parallel_rank, self.tensor_parallel_size = rank_and_size(groups.members)
        self.num_processes = self.size * self.tensor_parallel_size
        self.is_leader = self.rank == 0 and self.tensor_parallel_rank == 0
        self._numbers = numbers
        self.groups = groups
        self._owns_group = owns_group
        process = self.rank * self.tensor_parallel_size + self.tensor_parallel_rank
        self.name = self.name_of(process)
        self.device = device
        self.timeout = timeout
        self.bytes_received = 0
        store = None if groups.control is None else groups.control.get_group_store()
        if store is not None and heartbeat is None:
            heartbeat = Heartbeat(store, self.name, timeout, WORK_LIMIT * timeout)
        self.watch = FailureWatch(
            self.name, timeout, store, heartbeat, waits_for_work, groups.communicators()
        )
        self._data: Collectives | LocalCollectives = LocalCollectives()
        self._control: Collectives | LocalCollectives = LocalCollectives()
        if links is not None:
            self.watch = links.watch or self.watch
            self._data = self._control = links.collectives or LocalCollectives()
        if groups.data is not None and self.size > 1:
            kind = StagedCollectives if groups.is_staged else Collectives
            self._data = kind(groups.data, self.watch)
        if groups.control is not None and self.num_processes > 1:
            self._control = Collectives(groups.control, self.watch)
        if isinstance(groups.members, PolledGroup):
            groups.members.wait_for = self.watch.wait

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> "HostGroup":
        """Return one host, this process, without a process group.

        Args:
            device: this process's device; None: the current GPU, or the CPU where there is none.

        Raises:
            InvalidConfigError: the device does not exist.
        """
        return cls(device=choose_device(device), timeout=0.0)

    @classmethod
    def from_env(
        cls,
        device: str | torch.device | None = None,
        timeout: float = 300.0,
        *,
        tensor_parallel: int = 1,
    ) -> "HostGroup":
        """Join the hosts that torchrun started.

        A process that torchrun did not start is a single host.

        If processes share a GPU, their collectives are staged through CPU memory.

        Args:
            device: this process's device. ``"cuda"``: a GPU of this machine, by LOCAL_RANK; where
                there are more processes than GPUs they take turns. None: the same, or the CPU if
                there is no GPU.
            timeout: seconds to wait for an unresponsive process; ten times as long for one that
                sends heartbeats.
            tensor_parallel: T, processes per host.

        Raises:
            InvalidConfigError: the number of processes is not a multiple of T, or the device does
                not exist.
            HostError: the rendezvous times out, or another host lacks such a device.
        """
        require_whole_hosts(int(os.environ.get("WORLD_SIZE", 1)), tensor_parallel)
        if "RANK" not in os.environ:
            return cls.single(device)
        owns_group = join_world(timeout)
        return cls.from_process_group(
            dist.group.WORLD,
            device,
            timeout,
            tensor_parallel=tensor_parallel,
            owns_group=owns_group,
        )

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
        """Build the group from an existing process group; collective over its members.

        Args:
            group: a torch.distributed group with a gloo backend, an NCCL backend, or both. Its own
                timeout bounds every collective, even if a process sends heartbeats. With gloo
                alone, GPU tensors are staged through CPU memory.
            device: this process's device; None as in :meth:`from_env`, but without LOCAL_RANK the
                current GPU.
            timeout: seconds to wait for an unresponsive process; ten times as long for one that
                sends heartbeats.
            tensor_parallel: T; the first T processes of the group are host 0, and so on.
            owns_group: whether :meth:`close` destroys all process groups of this process, and GPUs
                may exchange data over NCCL although the group does not.

        Raises:
            InvalidConfigError: the number of processes is not a multiple of T, TP ranks of a host
                share a GPU, or the device does not exist.
            HostError: another process failed.
        """
        require_whole_hosts(dist.get_world_size(group), tensor_parallel)
        groups = ProcessGroups.of(group, timeout)
        processes = cls(groups, device=torch.device("cpu"), timeout=timeout, owns_group=owns_group)
        try:
            with processes.local_stage("choosing a device") as agreement:
                agreement.settings("the number of processes", {"tensor_parallel": tensor_parallel})
                chosen = choose_device(device)
                if chosen.type == "cuda" and owns_group:
                    torch.cuda.set_device(chosen)
                # The caller's group already has the backends that the caller chose.
                has_nccl = "nccl" in dist.get_backend_config(group)
                may_use_nccl = has_nccl or (owns_group and dist.is_nccl_available())
                mine = Place(device_identity(chosen), chosen.type == "cuda" and may_use_nccl)
            places = [Place(*place) for place in processes.gather_json(mine)]
            hosts = cls(
                groups.connected(group, places, tensor_parallel, timeout),
                device=chosen,
                timeout=timeout,
                owns_group=owns_group,
                heartbeat=processes.watch.heartbeat if tensor_parallel == 1 else None,
            )
            hosts._connect()
        except Exception:
            processes.close()
            raise
        shared = sharing([place.device for place in places])
        if shared and device in (None, "cuda") and hosts.is_leader:
            *some, last = shared[0]
            warn_caller(
                f"processes {', '.join(map(str, some))} and {last} share a GPU: there are more "
                "than GPUs"
            )
        return hosts

    def _connect(self) -> None:
        """Build the groups for GPU data; collective."""
        if self.groups.nccl:
            with self.working("connecting the GPUs"):
                self.watch.wait(PendingCall(in_thread(partial(self.groups.connect, self.device))))

    def subgroup(
        self,
        members: Sequence[int],
        timeout: float | None = None,
        waits_for_work: bool = True,
        has_data: bool = True,
    ) -> "HostGroup | None":
        """Make a group of some of these hosts, which fails independently.

        Collective over this group's hosts. Heartbeats count in this group and in all groups made
        from it, whose connections live as long as this group's.

        Args:
            members: ranks in this group, ascending.
            timeout: seconds to wait for each other; by default as here. Collectives that are not
                waited for may take a day.
            waits_for_work: heartbeats of any of these hosts restart the timeout, as here; otherwise
                it bounds the whole wait.
            has_data: whether it also exchanges tensors on devices, not only in CPU memory.

        Returns:
            The group on its members, None on the others.

        Raises:
            InvalidConfigError: the hosts have several processes each.
        """
        if self.tensor_parallel_size > 1:
            raise InvalidConfigError("subgroups are not supported with tensor parallelism")
        timeout = self.timeout if timeout is None else timeout
        groups = self.groups.of_some(members, timeout, has_data) if self.size > 1 else None
        if self.rank not in members:
            return None
        hosts = HostGroup(
            groups,
            device=self.device,
            timeout=timeout,
            heartbeat=self.watch.heartbeat,
            waits_for_work=waits_for_work,
            numbers=[
                member if self._numbers is None else self._numbers[member] for member in members
            ],
        )
        hosts._connect()
        return hosts

    def __repr__(self) -> str:
        processes = ""
        if self.tensor_parallel_size > 1:
            processes = f" x {self.tensor_parallel_size} processes"
        return f"HostGroup({self.name} of {self.size}{processes}, {self.device})"

    def tensor_parallel_mesh(self) -> DeviceMesh:
        """Return this host's TP ranks as a one-dimensional mesh, ``tp``; for T > 1."""
        members = self.groups.members
        assert members is not None  # T > 1
        return DeviceMesh.from_group(members, self.device.type, mesh_dim_names=("tp",))

    def clock(self) -> float:
        """Return the seconds since some moment; only differences mean anything."""
        return time.perf_counter()

    def moment(self, on_device: bool = True) -> Moment:
        """Note that this host is here in the code, without waiting for its GPU.

        Args:
            on_device: with a GPU, the moment is when that has done the work queued so far in the
                current stream.
        """
        is_on_gpu = on_device and self.device.type == "cuda"
        return Moment(self.clock(), record_event(self.device) if is_on_gpu else None)

    def seconds_at(self, moments: Sequence[Moment]) -> list[float]:
        """Return the times of moments by :meth:`clock`.

        It waits until the GPU has come to all of them.
        """
        events = [moment.event for moment in moments if moment.event is not None]
        if not events:
            return [moment.seconds for moment in moments]
        # For these and no more: another stream may have work for minutes.
        for event in events:
            self.wait_for_device(event)
        # The GPU's clock and this host's at one time.
        latest = record_event(self.device)
        self.wait_for_device(latest)
        now = self.clock()
        seconds = []
        for moment in moments:
            if moment.event is None:
                seconds.append(moment.seconds)
            else:
                milliseconds_ago = moment.event.elapsed_time(latest)
                seconds.append(now - milliseconds_ago / 1e3)
        return seconds

    def name_of(self, process: int) -> str:
        """Return the name of one of the H * T processes for messages."""
        host, member = divmod(process, self.tensor_parallel_size)
        if self._numbers is not None:
            host = self._numbers[host]
        if self.tensor_parallel_size > 1:
            return f"host {host}, member {member}"
        return f"host {host}"

    def start_broadcast(self, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Start sending a tensor in CPU memory from one host to all.

        The tensor must have the same shape and dtype on every host.

        The result is the tensor. On the source it completes when all hosts take part.
        """

        def count(received: Tensor) -> Tensor:
            if self.rank != source:
                self.bytes_received += received.nbytes
            return received

        return self._control.broadcast(tensor, source).then(count)

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        """Broadcast ``count`` 64-bit integers from the leader.

        Only the leader's ``values`` matter.
        """
        if self.num_processes == 1:  # every token is broadcast so
            assert values is not None  # this process is the leader
            return list(values)
        tensor = torch.tensor(values if self.is_leader else [0] * count, dtype=torch.int64)
        return self._control.broadcast(tensor, 0).wait().tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast any number of bytes from the leader; only the leader's ``data`` matters."""
        if self.is_leader:
            assert data is not None  # it is the leader's that is sent
            if self.num_processes > 1:  # whole files are broadcast so
                self.broadcast_ints([len(data)], 1)
                if data:
                    self.start_broadcast(_bytes_tensor(data), 0).wait()
            return data
        (length,) = self.broadcast_ints(None, 1)
        if not length:
            return b""
        received = torch.empty(length, dtype=torch.uint8)
        return self.start_broadcast(received, 0).wait().numpy().tobytes()

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Gather the same number of floats from every process, on every process.

        There is one list per process.
        """
        if self.num_processes == 1:
            return [list(map(float, values))]
        return self.start_gathering(torch.tensor(values, dtype=torch.float64)).wait().tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """Gather JSON-ready values of any size from every process, on every process; collective."""
        mine = _bytes_tensor(json.dumps(value).encode())
        lengths = self.start_gathering(torch.tensor([len(mine)])).wait().flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = self.start_gathering(padded).wait()
        texts = [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]
        return [json.loads(text) for text in texts]

    def mean_over_members(self, tensor: Tensor) -> Tensor:
        """Return the mean over host 0's TP ranks of a small fp32 tensor in CPU memory.

        Every process gets it.
        """
        if self.tensor_parallel_size == 1:
            return tensor
        return self.start_gathering(tensor).wait()[: self.tensor_parallel_size].mean(dim=0)

    def gather_from_members(self, tensor: Tensor) -> Tensor:
        """Gather a tensor on this process's device from this host's TP ranks; collective within it.

        Args:
            tensor: of the same shape and dtype on all of them.

        Returns:
            ``[T, *shape]``.
        """
        if self.tensor_parallel_size == 1:
            return tensor[None]
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.tensor_parallel_size)]
        dist.all_gather(gathered, tensor, group=self.groups.members)
        return torch.stack(gathered)

    def require_same(self, what: str, value: bytes) -> None:
        """Check that every process holds the same value; collective.

        Raises:
            HostError: the values differ; raised on every process. Continuing would mix two prompts.
        """
        with self.local_stage(what) as agreement:
            agreement.content(what, value)

    def require_same_on_ranks(self, what: str, value: bytes) -> None:
        """Check that every process has the value of host 0's process of its TP rank; collective.

        Raises:
            HostError: the values differ; raised on every process.
        """
        digest = hashlib.sha256(value).digest()
        every = self.start_gathering(_bytes_tensor(digest)).wait()
        for process in range(self.num_processes):
            first = process % self.tensor_parallel_size
            if not torch.equal(every[process], every[first]):
                raise HostError(
                    f"{what} of {self.name_of(process)} differs from that of {self.name_of(first)}"
                )

    def start_gathering(self, tensor: Tensor) -> Pending[Tensor]:
        """Start gathering a small tensor in CPU memory from every process.

        The result is ``[H * T, *shape]``.
        """
        return self._control.all_gather(tensor)

    def on_device(self) -> AbstractContextManager:
        """Return a context in which this host's GPU is the thread's current one.

        Without a GPU it does nothing.
        """
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def working(self, stage: str) -> AbstractContextManager:
        """Return a context for long work outside a stage, which sends heartbeats."""
        return self.watch.working(stage)

    @contextmanager
    def local_stage(self, name: str) -> Iterator[Agreement]:
        """Run a stage without collectives.

        At its end all hosts raise, or none does. Every host must enter it.

        An error of a kind (:mod:`apbv.errors`) is raised on every host, with the same class and
        message; the first host's, if several failed. After another error, a fault of this package,
        that host raises it itself, and the others a HostError that quotes it. The body adds to the
        yielded :class:`Agreement` whatever must be the same on every process.
        """
        error: Exception | None = None
        agreement = Agreement()
        with self.on_device(), self.watch.working(name):
            try:
                yield agreement
            except Exception as caught:
                error = as_kind(caught)
                if isinstance(error, ApbvError) and error.is_of_others:
                    raise
            if self.num_processes > 1:
                self._compare_reports(name, StageReport.of(error, agreement), error)
            if error is not None:
                raise error

    def _compare_reports(
        self, stage: str, report: StageReport, own_error: BaseException | None
    ) -> None:
        """Compare how a stage ended on all processes; collective.

        Args:
            stage: its name.
            report: how it ended on this process.
            own_error: the error of this process; None: it has none.

        Raises:
            ApbvError: it failed on another process, or they do not agree (then a HostError); not
                raised where this process's own error is the one that counts.
        """
        # A single exchange where all is well.
        digests = self.start_gathering(_bytes_tensor(report.digest)).wait()
        are_equal = bool((digests == digests[0]).all())
        if are_equal and report.error is None:
            return

        reports = [StageReport.from_json(each) for each in self.gather_json(report.to_json())]
        # A fault of ours is raised where it happened, with its traceback.
        if own_error is not None and not isinstance(own_error, ApbvError):
            return
        failed = [(n, other.error) for n, other in enumerate(reports) if other.error is not None]
        if failed:
            # A fault counts more than an error of a kind, which may follow from it.
            faulty = [(process, error) for process, error in failed if not error.codes]
            first_failed, first_error = (faulty or failed)[0]
            if first_error == report.error:
                return
            raise first_error.error(self.name_of(first_failed), stage) from own_error
        first = reports[0]
        for process, other in enumerate(reports):
            difference = describe_difference(
                first.values, other.values, self.name_of(0), self.name_of(process)
            )
            if difference is not None:
                raise HostError(difference)

    @property
    def is_broken(self) -> bool:
        """Whether a host failed in a collective, which makes this group unusable."""
        return self.watch.is_broken

    @property
    def process_group(self):
        """The torch.distributed data group, for libraries with their own collectives.

        None for a single host, in a subgroup, and if hosts share a GPU, because the group cannot
        access GPU data then.
        """
        return self.groups.data if self.groups.is_known else None

    def all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        """Start gathering one tensor of the same shape from every host.

        The result is ``[H, *shape]``.
        """
        tensor = tensor.contiguous()
        self.bytes_received += (self.size - 1) * tensor.nbytes
        return self._data.all_gather(tensor)

    def all_to_all(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Pending[list[Tensor]]:
        """Start sending one tensor to every host and receiving one from every host.

        Args:
            tensors: H tensors of one dtype; tensor h goes to host h. Empty ones are not sent.
            shapes: H shapes; the tensor from host h has shape h.

        The result is the list of H received tensors.
        """
        num_received = sum(
            math.prod(shape) for host, shape in enumerate(shapes) if host != self.rank
        )
        self.bytes_received += num_received * tensors[0].element_size()
        return self._data.all_to_all(tensors, shapes)

    def gather_rows(
        self, rows: Tensor, counts: Sequence[int], to: int | None = None, dim: int = 0
    ) -> Pending[list[Tensor]]:
        """Start gathering rows, whose number differs between hosts.

        Args:
            rows: this host's, along ``dim``; all else of the shape is the same everywhere.
            counts: the number of rows of every host.
            to: the host that gets them; None: all do.

        The result is the list of all hosts' rows; of empty tensors on hosts that get none.
        """
        if to is None:
            padded = rows.new_zeros(*rows.shape[:dim], max(counts), *rows.shape[dim + 1 :])
            padded.narrow(dim, 0, rows.shape[dim]).copy_(rows)

            def without_padding(gathered: Tensor) -> list[Tensor]:
                return [
                    of_host.narrow(dim, 0, count)
                    for of_host, count in zip(gathered, counts, strict=True)
                ]

            return self.all_gather(padded).then(without_padding)

        nothing = rows.new_empty(0)
        shapes = [(0,)] * self.size
        if self.rank == to:
            shapes = [(*rows.shape[:dim], count, *rows.shape[dim + 1 :]) for count in counts]
        return self.all_to_all(
            [rows if host == to else nothing for host in range(self.size)], shapes
        )

    def shift(self, tensor: Tensor, received_shape: Sequence[int]) -> Pending[Tensor]:
        """Start sending a tensor to the next host in the ring, and receiving the previous host's.

        The result has ``received_shape`` and the tensor's dtype. It is an all-to-all with empty
        tensors for all other hosts: with both backends that is a send to, and a receive from, the
        neighbours only.
        """
        following = (self.rank + 1) % self.size
        before = (self.rank - 1) % self.size
        nothing = tensor.new_empty(0)
        tensors = [tensor if host == following else nothing for host in range(self.size)]
        shapes = [received_shape if host == before else (0,) for host in range(self.size)]
        return self.all_to_all(tensors, shapes).then(lambda received: received[before])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Send one host's tensor to every host, in place.

        The tensor must have the same shape and dtype on every host.
        """
        if self.size > 1:
            self._data.broadcast(tensor, source).wait()
            if self.rank != source:
                self.bytes_received += tensor.nbytes
        return tensor

    def barrier(self) -> None:
        """Wait until every process is here and its device is idle."""
        self.settle()
        if self.device.type == "cuda":  # for work without collectives, and for other streams
            torch.cuda.synchronize(self.device)
        self.start_gathering(torch.zeros(1)).wait()

    def wait_for_device(self, event: torch.cuda.Event) -> None:
        """Wait until this process's GPU reaches an event, or raise if another host prevents that.

        A wait in CUDA for a collective that cannot complete would never end.

        Raises:
            HostError: a host failed, ended, or neither answered nor worked for the group's timeout.
        """
        if self.groups.nccl:
            self.watch.wait_for_gpu(event)
        else:
            event.synchronize()

    def settle(self) -> None:
        """Wait for this process's GPU to run all collectives queued in the current stream.

        This includes all work that was queued before them.

        Call it before the CPU reads results computed from them. Without NCCL it returns at once.

        Raises:
            HostError: as :meth:`wait_for_device`.
        """
        if self.groups.nccl:
            self.watch.wait_for_gpu(torch.cuda.current_stream(self.device).record_event())

    @contextmanager
    def collective_stage(self, name: str) -> Iterator[None]:
        """Run a stage that contains collectives, in which a failure breaks the group.

        A host that fails notifies the others, which then raise the same error, or after a fault of
        this package a HostError. A single host has no group to break, and may continue. So may
        hosts that all raise an error at the same point (:attr:`apbv.ApbvError.is_agreed`). With
        NCCL the stage ends when this GPU has finished its work, so that a failure is known before
        results are used.
        """
        with self.on_device(), self.watch.collective_stage(name, self.num_processes > 1):
            yield
            self.settle()

    def let_others_report(self) -> None:
        """Give every host time to report its error, after a failure and before this process exits.

        torchrun stops the other processes of a machine as soon as one of them has failed.
        """
        if self.num_processes == 1:
            return
        if not self.watch.is_broken:
            try:
                self.barrier()
                return
            except HostError:
                pass
        time.sleep(POLL_SECONDS + GRACE_SECONDS)

    def close(self) -> None:
        """Leave the process group if :meth:`from_env` made it.

        Unresponsive hosts are not waited for.
        """
        if self._owns_group and dist.is_initialized():
            if self.watch.heartbeat is not None:
                self.watch.heartbeat.stop()
            if not self.watch.is_broken:
                self._control.drain()
            leave_world(self.timeout, self.groups.made)


def _bytes_tensor(data: bytes) -> Tensor:
    """Copy one or more bytes to a tensor, uint8 ``[n]``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def run_on_hosts(
    body: Callable[[HostGroup], None],
    timeout: float = 300.0,
    tensor_parallel: int = 1,
    device: str | None = None,
) -> int:
    """Run a script's body on this host, and return the exit status.

    Errors of a kind (:mod:`apbv.errors`), which the user can mend, are printed as one line on every
    host. Any other is a fault of this package: its traceback is printed on the host where it
    happened.

    Args:
        body: the script, which gets the group of all hosts.
        timeout: seconds to wait for an unresponsive process.
        tensor_parallel: T, processes per host.
        device: see :meth:`HostGroup.from_env`.
    """
    hosts = None
    try:
        hosts = HostGroup.from_env(device, timeout, tensor_parallel=tensor_parallel)
        body(hosts)
    except Exception as caught:
        error = as_kind(caught)
        if isinstance(error, ApbvError):
            host = error.host or (None if hosts is None else hosts.name)
            report_error(f"error ({host}): {error}" if host else f"error: {error}")
        else:
            report_fault(error)
        if hosts is not None:
            hosts.let_others_report()
        return exit_status_of(error)
    except KeyboardInterrupt:
        hosts = None  # leaving the group would wait for collectives in flight
        raise
    finally:
        if hosts is not None:
            hosts.close()
    return 0
