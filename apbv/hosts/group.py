"""HostGroup: rank, size, device and process group as one argument. Only this file and polled_group.py import
torch.distributed.

How a failure reaches everybody. A stage is either *local* (no data travels in it: reading a video,
tokenising) or *collective* (hosts exchange data inside it). A local stage ends with a small exchange of
statuses, so that all hosts raise, or none does, and the group stays usable. A host that fails inside a
collective stage cannot join the exchanges that the others wait for, so it posts its error in the group's
key-value store; whoever waits looks there. After that the group is broken and must be built anew. A host
that dies closes its connections, which wakes the others too. Where the network falls silent nothing wakes
anybody, and the store does not answer either: so it is asked in a thread, and nobody waits for that longer
than for the exchange.

How long one host waits for another. A host that works in a stage says so in the store (see :mod:`.heartbeat`),
and whoever waits then waits on; it gives up once nobody has worked for the group's timeout: a host that is
stopped, cut off, or outside every stage is silent. A single stretch of work counts for ten timeouts, so that a
host that hangs ends the others, too. NCCL's exchanges are not waited for in Python: its own limit holds, which is
above that.

A host may be several processes, one per GPU, that share its language model (tensor parallelism). Each of them
exchanges data with its like in the other hosts; statuses, chosen tokens and failures concern all processes.
"""

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from .heartbeat import Heartbeat, Patience
from .polled_group import POLLED, PolledGroup

_FAILURE_KEY = "apbv/failure"
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 2.0
_CLOSING_SECONDS = 10.0
_LONGEST_WORK = 10.0  # times the timeout: a stretch of work that is believed


class HostError(RuntimeError):
    """Another host failed, or could not be reached; the message says which, where and why."""


class AgreedError(ValueError):
    """A request that cannot be answered. All hosts raise this at the same point: it breaks no group."""


class Exchange:
    """A data exchange that is under way.

    Args:
        finish: blocks until the exchange is complete and returns its result; called once.
        ended: whether ``finish`` would return, or raise, at once.
    """

    def __init__(self, finish: Callable[[], Any], ended: Callable[[], bool] = lambda: True):
        self._finish: Callable[[], Any] | None = finish
        self._ended = ended
        self._result: Any = None

    def has_ended(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._finish is None or self._ended()

    def wait(self) -> Any:
        """Block until the exchange is complete (on CUDA: until it is ordered before later kernels).

        Raises:
            HostError: a host failed, ended, or neither answered nor worked for the group's timeout.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class HostGroup:
    """The hosts that prefill together: one per full replica of the model.

    A host is one process, or with tensor parallelism T processes, its *members*: process h * T + t of all is
    member t of host h, and holds its share of every layer. Each of them has a HostGroup, on which the members of a
    host do the same; data goes to the members of the same t on the other hosts.

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
    """

    def __init__(
        self,
        *,
        device: torch.device,
        data_group=None,
        control_group=None,
        member_group=None,
        timeout: float,
        owns_group: bool,
    ):
        self.device = device
        self.timeout = timeout
        self.bytes_received = 0
        self._data_group = data_group
        self._control_group = control_group
        self._member_group = member_group
        self._owns_group = owns_group
        self._broken = False
        self._question: Future | None = None  # to the key-value store, as yet unanswered
        self._waits_for_work = True
        self.rank = dist.get_rank(data_group) if data_group is not None else 0
        self.size = dist.get_world_size(data_group) if data_group is not None else 1
        self.tensor_parallel_rank = dist.get_rank(member_group) if member_group is not None else 0
        self.tensor_parallel_size = dist.get_world_size(member_group) if member_group is not None else 1
        if isinstance(member_group, PolledGroup):
            member_group.wait_for = self._wait
        self._heart: Heartbeat | None = None
        if control_group is not None:
            store = control_group.get_group_store()
            self._heart = Heartbeat(store, self.name, timeout, _LONGEST_WORK * timeout)

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> "HostGroup":
        """One host, this process, without a process group."""
        return cls(device=torch.device(device or _default_device(0)), timeout=0.0, owns_group=False)

    @classmethod
    def from_env(
        cls, device: str | torch.device | None = None, timeout: float = 300.0, *, tensor_parallel: int = 1
    ) -> "HostGroup":
        """The hosts that torchrun started; a single host where it did not start this process.

        Args:
            device: this process's device. None: the GPU of LOCAL_RANK, or the CPU where there is none.
            timeout: seconds to wait for another process; of one that works, ten times as many.
            tensor_parallel: T, processes of a host.

        Raises:
            ValueError: the processes are not a multiple of T.
            HostError: more processes than GPUs were started on this machine, or the hosts do not meet.
        """
        _require_whole_hosts(int(os.environ.get("WORLD_SIZE", 1)), tensor_parallel)
        if "RANK" not in os.environ:
            return cls.single(device)
        device = torch.device(device or _default_device(int(os.environ.get("LOCAL_RANK", 0))))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        owns_group = not dist.is_initialized()
        if owns_group:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            limit = timeout + 2 * _POLL_SECONDS

            def meet() -> None:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                dist.init_process_group(backend, timeout=timedelta(seconds=limit))

            # In a thread: gloo waits five times as long for hosts that are there, but cannot be connected to.
            meeting = in_thread(meet)
            try:
                if not wait_for_futures([meeting], limit + _POLL_SECONDS).done:
                    raise RuntimeError("a host cannot be connected to")
                meeting.result()
            except RuntimeError as error:
                raise HostError(
                    f"the hosts did not meet within {timeout:g} s: {error} (nodes reach each other by the network "
                    "interface that GLOO_SOCKET_IFNAME names, or else by the address of a node's own name)"
                ) from error
            _set_pg_timeout(_backend_limit(timeout), dist.group.WORLD)
        return cls.from_process_group(
            dist.group.WORLD, device, timeout, tensor_parallel=tensor_parallel, owns_group=owns_group
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
        """The members of a process group that the caller made; collective over its members.

        Args:
            group: a torch.distributed group with a gloo backend, an NCCL backend, or both. Its own timeout bounds
                every exchange, also with a process that works.
            device: this process's device; None as in :meth:`from_env`.
            timeout: seconds to wait for another process; of one that works, ten times as many.
            tensor_parallel: T; the first T processes of the group are host 0, and so on.

        Raises:
            ValueError: the processes are not a multiple of T.
        """
        _require_whole_hosts(dist.get_world_size(group), tensor_parallel)
        device = torch.device(device or _default_device(int(os.environ.get("LOCAL_RANK", 0))))
        control_group = group
        if device.type == "cuda" and "gloo" not in dist.get_backend_config(group):
            # Statuses and tokens are host memory: over gloo they neither wait for nor stall the GPU.
            control_group = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=_backend_limit(timeout),
                use_local_synchronization=True,
            )
        everybody = cls(
            device=device,
            data_group=group,
            control_group=control_group,
            timeout=timeout,
            owns_group=owns_group,
        )
        return everybody if tensor_parallel == 1 else everybody._joined(tensor_parallel)

    def _joined(self, tensor_parallel: int) -> "HostGroup":
        """These processes with T of them to a host; collective over all of them."""
        self._level_group_counts()
        ranks = dist.get_process_group_ranks(self._data_group)
        host, member = divmod(self.rank, tensor_parallel)
        backend = dist.get_backend_config(self._data_group)
        options = {"timeout": _backend_limit(self.timeout), "use_local_synchronization": True}
        data_group = None
        if len(ranks) > tensor_parallel:
            data_group = dist.new_group(ranks[member::tensor_parallel], backend=backend, **options)
        member_group = dist.new_group(
            ranks[host * tensor_parallel : (host + 1) * tensor_parallel],
            # What transformers exchanges on a CPU is waited for in Python; with NCCL nobody waits on the CPU.
            backend=POLLED if self.device.type == "cpu" else backend,
            **options,
        )
        return HostGroup(
            device=self.device,
            data_group=data_group,
            control_group=self._control_group,
            member_group=member_group,
            timeout=self.timeout,
            owns_group=self._owns_group,
        )

    def subgroup(
        self, members: Sequence[int], timeout: float | None = None, waits_for_work: bool = True
    ) -> "HostGroup | None":
        """A group of some of these hosts, which fails by itself; collective over all of them.

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
        timeout = self.timeout if timeout is None else timeout
        if len(members) > 1:
            self._level_group_counts()
        if self.rank not in members:
            return None
        if len(members) == 1:
            alone = HostGroup.single(self.device)
            alone._heart = self._heart
            return alone
        ranks = dist.get_process_group_ranks(self._data_group)
        group = dist.new_group(
            [ranks[member] for member in members],
            backend=dist.get_backend_config(self._data_group),
            timeout=timedelta(days=1),
            use_local_synchronization=True,
        )
        some = HostGroup.from_process_group(group, self.device, timeout)
        some._heart, some._waits_for_work = self._heart, waits_for_work
        return some

    def _level_group_counts(self) -> None:
        """Let every host have made the same number of groups.

        A group that only its members make is named after its ranks and the number of groups its maker has; where
        these differ the members would wait for each other under different names.
        """
        count = len(dist.distributed_c10d._world.pg_names)
        counts = [int(others[0]) for others in self.gather_floats([count])]
        for _ in range(max(counts) - count):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

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
        """What messages call one of the H * T processes."""
        host, member = divmod(process, self.tensor_parallel_size)
        return f"host {host}" + (f", member {member}" if self.tensor_parallel_size > 1 else "")

    def tensor_parallel_mesh(self) -> DeviceMesh:
        """This host's members as a mesh of one dimension, ``tp``; for T > 1."""
        return DeviceMesh.from_group(self._member_group, self.device.type, mesh_dim_names=("tp",))

    def clock(self) -> float:
        """Seconds since some moment; only differences mean anything."""
        return time.perf_counter()

    @property
    def is_broken(self) -> bool:
        """Whether a host failed in an exchange: this group can be used no more."""
        return self._broken

    @property
    def process_group(self):
        """The torch.distributed group of the data, for libraries that exchange data themselves; None alone."""
        return self._data_group

    # ---- data ----

    def all_gather(self, tensor: Tensor) -> Exchange:
        """Start gathering one tensor of the same shape from every host; the result is ``[H, *shape]``."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return Exchange(lambda: tensor[None])
        result = tensor.new_empty(self.size, *tensor.shape)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = self._start(
            lambda: gather(result.flatten(), tensor.flatten(), group=self._data_group, async_op=True)
        )
        self.bytes_received += (self.size - 1) * tensor.nbytes

        def finish() -> Tensor:
            self._wait(work, tensor.is_cuda)
            return result

        return Exchange(finish, work.is_completed)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:
        """Start sending one tensor to every host and receiving one from every host.

        Args:
            parts: H tensors of one dtype; part h goes to host h. Empty parts travel as nothing.
            shapes: H shapes; what host h sends here has shape h.

        The result is the list of H received tensors.
        """
        if self.size == 1:
            return Exchange(lambda: list(parts))
        dtype, device = parts[0].dtype, parts[0].device
        width = parts[0].element_size()
        counts = [math.prod(shape) for shape in shapes]
        # Bytes, because not every back end knows every dtype.
        sent = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        received = torch.empty(sum(counts) * width, dtype=torch.uint8, device=device)
        work = self._start(
            lambda: dist.all_to_all_single(
                received,
                sent,
                [count * width for count in counts],
                [part.numel() * width for part in parts],
                group=self._data_group,
                async_op=True,
            )
        )
        self.bytes_received += (sum(counts) - counts[self.rank]) * width

        def finish(sent=sent) -> list[Tensor]:  # holds what is being sent alive until it is sent
            self._wait(work, device.type == "cuda")
            pieces = received.view(dtype).split(counts)
            return [piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]

        return Exchange(finish, work.is_completed)

    def shift(self, tensor: Tensor, received_shape: Sequence[int]) -> Exchange:
        """Start sending a tensor to the next host in the ring, and receiving one from the host before.

        The result has ``received_shape`` and the tensor's dtype. An all-to-all in which everybody else gets
        nothing: with both back ends that is a send to, and a receive from, the neighbours only.
        """
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        nothing = tensor.new_empty(0)
        parts = [tensor if host == following else nothing for host in range(self.size)]
        shapes = [received_shape if host == before else (0,) for host in range(self.size)]
        exchange = self.all_to_all(parts, shapes)
        return Exchange(lambda: exchange.wait()[before], exchange.has_ended)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One host's tensor, in place on every host; shape and dtype are the same everywhere."""
        if self.size == 1:
            return tensor
        work = self._start(lambda: dist.broadcast(tensor, group=self._data_group, group_src=source, async_op=True))
        self._wait(work, tensor.is_cuda)
        self.bytes_received += tensor.nbytes if self.rank != source else 0
        return tensor

    # ---- small integers and statuses ----

    def start_broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor in host memory from one host to all; shape and dtype are the same everywhere.

        The result is the tensor. On the source it has ended when everybody takes part.
        """
        work = self._start(
            lambda: dist.broadcast(tensor, group=self._control_group, group_src=source, async_op=True)
        )

        def finish() -> Tensor:
            self._wait(work)
            self.bytes_received += tensor.nbytes if self.rank != source else 0
            return tensor

        return Exchange(finish, work.is_completed)

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        """``count`` 64-bit integers from the leader to everybody; ``values`` matters on the leader only."""
        if self.num_processes == 1:
            return list(values)
        tensor = torch.tensor(values if self.is_leader else [0] * count, dtype=torch.int64)
        work = self._start(lambda: dist.broadcast(tensor, group=self._control_group, group_src=0, async_op=True))
        self._wait(work)
        return tensor.tolist()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Any number of bytes from the leader to everybody; ``data`` matters on the leader only."""
        if self.num_processes == 1:
            return data
        (length,) = self.broadcast_ints([len(data)] if self.is_leader else None, 1)
        if not length:
            return b""
        if not self.is_leader:
            return self.start_broadcast(torch.empty(length, dtype=torch.uint8), 0).wait().numpy().tobytes()
        self.start_broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0).wait()
        return data

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """The same number of floats from every process, on every process: one list per process."""
        return self._gather_control(torch.tensor(values, dtype=torch.float64)).tolist()

    def gather_json(self, value: Any) -> list[Any]:
        """JSON-ready values of any size, from every process; collective."""
        return [json.loads(encoded) for encoded in self._gather_bytes(json.dumps(value).encode())]

    def mean_over_members(self, tensor: Tensor) -> Tensor:
        """The mean of a small fp32 tensor in host memory over the members of host 0, on every process."""
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
        digest = torch.frombuffer(bytearray(hashlib.sha256(value).digest()), dtype=torch.uint8)
        digests = self._gather_control(digest)
        different = [place for place, theirs in enumerate(digests) if not torch.equal(theirs, digests[0])]
        if different:
            raise HostError(f"{what} of {self.name_of(different[0])} differs from that of {self.name_of(0)}")

    def working(self, stage: str) -> AbstractContextManager:
        """A context for long work outside a stage, so that other hosts go on waiting for this one."""
        return nullcontext() if self._heart is None else self._heart.working(stage)

    @contextmanager
    def local_stage(self, name: str) -> Iterator[None]:
        """A stage without exchanges inside; at its end all hosts raise, or none does. Every host enters it.

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
            self._agree(name, error)

    @contextmanager
    def collective_stage(self, name: str) -> Iterator[None]:
        """A stage with exchanges inside; a host that fails in it tells the others and breaks the group.

        A single host has no group to break, and may go on. So may hosts that all raise :class:`AgreedError`.
        """
        if self._broken:
            raise HostError(f"cannot start {name}: this host group broke in an earlier request")
        try:
            with self.working(name):
                yield
        except AgreedError:
            raise
        except HostError:
            self._broken = True
            raise
        except BaseException as error:
            self._broken = self.num_processes > 1
            self._post_failure(name, error)
            raise

    def let_others_report(self) -> None:
        """After a failure, and before this process exits: time for every host to say why it ends.

        torchrun stops the other processes of a machine as soon as one of them has failed.
        """
        if self.num_processes == 1:
            return
        if not self._broken:
            try:
                self.barrier()
                return
            except HostError:
                pass
        time.sleep(_POLL_SECONDS + _GRACE_SECONDS)

    def close(self) -> None:
        """Leave the process group, where :meth:`from_env` made it; hosts that do not answer are not waited for."""
        if self._owns_group and dist.is_initialized():
            if self._heart is not None:
                self._heart.stop()
            left = threading.Event()
            threading.Thread(target=_leave_groups, args=(left,), daemon=True).start()
            left.wait(min(self.timeout, _CLOSING_SECONDS))

    # ---- inside ----

    def _gather_control(self, tensor: Tensor) -> Tensor:
        if self.num_processes == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        self._wait(self._start(lambda: dist.all_gather(parts, tensor, group=self._control_group, async_op=True)))
        return torch.stack(parts)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        lengths = self._gather_control(torch.tensor([len(mine)])).flatten().tolist()
        if not any(lengths):
            return [b""] * self.num_processes
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._gather_control(padded)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def _agree(self, name: str, error: Exception | None) -> None:
        # Also an error without words is not the same as none.
        messages = self._gather_bytes(b"" if error is None else b"!" + _described(error).encode()[:4096])
        if error is not None:
            raise error
        for place, message in enumerate(messages):
            if message:
                text = message[1:].decode(errors="replace")
                raise HostError(f"{self.name_of(place)} failed in {name}: {text}")

    def _start(self, call):
        if self._broken:
            raise HostError("this host group broke in an earlier exchange")
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work, on_gpu: bool = False) -> None:
        if on_gpu:
            work.wait()
            return
        patience = Patience(self.timeout)
        with self._heart.waiting():
            while True:
                try:
                    work.wait(timedelta(seconds=_POLL_SECONDS))
                    return
                except RuntimeError:
                    if work.is_completed():
                        return self._finish(work)
                    if failure := self._posted_failure(patience if self._waits_for_work else None):
                        raise failure from None
                    if patience.is_over:
                        raise self._given_up(patience) from None

    def _given_up(self, patience: Patience) -> HostError:
        self._broken = True
        text = f"{self.name} waited more than {self.timeout:g} s for another host"
        if patience.last_heard:
            text += f", {patience.seconds:.0f} s in all; the last sign of work was: {patience.last_heard}"
        if self._question is not None:
            text += "; the hosts' key-value store does not answer either: the network may be cut"
        return HostError(text)

    def _finish(self, work) -> None:
        """The outcome of a completed exchange.

        The wait before may have failed with it, or only have run out of time just before it completed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _post_failure(self, name: str, error: BaseException) -> None:
        if self.num_processes == 1:
            return
        text = f"{self.name} failed in {name}: {_described(error)}"
        store = self._control_group.get_group_store()
        # Where the store's host is gone, or out of reach, the others notice that by themselves.
        wait_for_futures([in_thread(lambda: store.set(_FAILURE_KEY, text))], _GRACE_SECONDS)

    def _posted_failure(self, patience: Patience | None = None) -> HostError | None:
        """What the store says; where it does not answer at once, a later call does not ask again.

        Args:
            patience: hears who works.
        """
        question = self._question
        if question is None:
            question = self._question = in_thread(self._ask_store)
            wait_for_futures([question], _POLL_SECONDS)
        if not question.done():
            return None
        self._question = None
        try:
            text, *beats = question.result()
            if patience is not None:
                patience.hear(*beats)
        except RuntimeError:
            text = "lost contact with the hosts' key-value store: the process that held it has ended"
        if text is None:
            return None
        self._broken = True
        return HostError(text)

    def _ask_store(self) -> tuple[str | None, int, str]:
        """A posted failure, and the beats of those that work."""
        store = self._control_group.get_group_store()
        failure = store.get(_FAILURE_KEY).decode(errors="replace") if store.check([_FAILURE_KEY]) else None
        return failure, *self._heart.heard()

    def _lost(self, error: RuntimeError) -> HostError:
        """An exchange failed outright: quote the host that posted a reason, or say that one has ended."""
        self._broken = True
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            if failure := self._posted_failure():
                return failure
            time.sleep(0.05)
        return HostError(f"another host ended, or did not answer in time (seen by {self.name}): {error}")


def run_on_hosts(body: Callable[[HostGroup], None], timeout: float = 300.0, tensor_parallel: int = 1) -> int:
    """Run a script's body on this host of those that torchrun started; the exit status.

    An error that the user can mend is one line on every host, not a traceback.
    """
    hosts = None
    try:
        hosts = HostGroup.from_env(timeout=timeout, tensor_parallel=tensor_parallel)
        body(hosts)
    except (ValueError, HostError) as error:
        host = "" if hosts is None else f" ({hosts.name})"
        sys.stderr.write(f"error{host}: {error}\n")  # one write: hosts share the terminal
        if hosts is not None:
            hosts.let_others_report()
        return 1
    except KeyboardInterrupt:
        hosts = None  # leaving the group would wait for exchanges that are under way
        raise
    finally:
        if hosts is not None:
            hosts.close()
    return 0


def in_thread(call: Callable[[], Any]) -> Future:
    """Begin a call that may never return; the interpreter does not wait for it when it exits."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _leave_groups(left: threading.Event) -> None:
    """Destroy all process groups, but keep their objects for as long as the process lives.

    A group's destructor waits for its exchanges, and one with a host that has stopped never ends. At exit, where
    else the last reference goes, that would keep the process.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    left.set()
    threading.Event().wait()
    del groups


def _backend_limit(timeout: float) -> timedelta:
    """What an exchange may take by itself: longer than ``_wait`` does, which can say what happened."""
    return timedelta(seconds=(_LONGEST_WORK + 2) * timeout + 2 * _POLL_SECONDS)


def _require_whole_hosts(num_processes: int, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or num_processes % tensor_parallel:
        raise ValueError(
            f"{num_processes} process(es) are no hosts of {tensor_parallel} each: with tensor parallelism T, "
            "start T times as many processes as hosts"
        )


def _described(error: BaseException) -> str:
    """Type and message, without the lone surrogates that stand for undecodable bytes of a file name."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()


def _default_device(local_rank: int) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if local_rank >= torch.cuda.device_count():
        raise HostError(
            f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
            "start at most one process per GPU, or pass device='cpu'"
        )
    return f"cuda:{local_rank}"
