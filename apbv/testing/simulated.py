"""Simulates H hosts in one process, one at a time, on virtual clocks.

Every simulated host is a thread with a HostGroup of its own. Only one computes at any time, with
the whole machine, until it has to wait for data that another has not sent yet; so data, order and
results are those of a real run. A host's clock counts the time it computed, and at the end of an
exchange jumps to when the data would have arrived, by its size and a stated bandwidth and latency.
Overlap of communication and computation, and waiting for the slowest host, thus show as they would.
What does not show: contention inside a network, and collectives that are better or worse than the
stated formula.

On a GPU, which runs all hosts' work in one stream, each host has two clocks. One counts the CPU's
time between two places in the host's code, in which it launches kernels; the other counts the GPU's
time between CUDA events at these places. The GPU is kept behind the CPU, so that this is the time
of the kernels alone. A kernel is done when it has been launched and those before it are done: the
later clock counts. Data on the GPU moves the GPU's clock alone. Times are worked out when they are
asked for, and nothing waits for the GPU before. What does not show: the multiprocessors that NCCL's
kernels take, and the memory that the hosts would have for themselves.
"""

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HostError, InvalidRequestError, describe_error
from ..hosts.devices import Moment, record_event
from ..hosts.failure_watch import FailureWatch
from ..hosts.group import HostGroup, HostLinks
from ..pending import Pending


@dataclass(frozen=True)
class Network:
    """The links between any two hosts.

    Attributes:
        bandwidth: bytes per second in each direction.
        latency: seconds until the first byte arrives.
    """

    bandwidth: float = float("inf")
    latency: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return how long a message takes, in seconds; an empty one takes no time."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0

    def gathering(self, num_hosts: int, num_bytes: int) -> float:
        """Return the seconds of a ring all-gather: H-1 steps."""
        return (num_hosts - 1) * self.seconds(num_bytes)

    def receiving(self, receiver: int, num_bytes: Sequence[int]) -> float:
        """Return the seconds that a host takes to receive ``num_bytes[h]`` from every host h.

        Messages arrive one after the other; what it sends itself takes no time.
        """
        seconds = 0.0
        for sender, count in enumerate(num_bytes):
            if sender != receiver:
                seconds += self.seconds(count)
        return seconds


# How long an idle GPU is kept from what a CPU launches next, in cycles: about 5 ms, in which a CPU
# launches fewer than the 1,024 kernels that CUDA queues.
_HEAD_START = 10_000_000


class Lap(NamedTuple):
    """A stretch of computing on a host: the seconds of its CPU, and of its GPU."""

    cpu: float
    gpu: float = 0.0


class _Machine:
    """The state that simulated hosts share: the turn to compute, and the exchanges under way."""

    def __init__(
        self,
        num_hosts: int,
        network: Network,
        clock: Callable[[], float] | None,
        device: torch.device,
    ):
        self.num_hosts = num_hosts
        self.network = network
        self.clock = clock
        self.device = device
        self.turn = threading.Condition()
        self.hosts: list[SimulatedHost] = []
        # Of each open exchange, what every host sends, by rank.
        self.posts: dict[int, dict[int, Any]] = {}
        # Of each open exchange, when every host sends it by its clock, by rank.
        self.times: dict[int, dict[int, float]] = {}
        # When the last laps of any hosts began, the oldest first.
        self.last_laps: deque[torch.cuda.Event] = deque(maxlen=16)
        self.failure: str | None = None
        # The ranks of hosts whose job has ended.
        self.ended: set[int] = set()
        # The posts of the exchange that a host waits for, by rank.
        self.waiting: dict[int, dict[int, Any]] = {}

    def is_stuck(self, posts: dict[int, Any]) -> bool:
        """Return whether an exchange can no longer be completed."""
        if self.failure or self.ended - posts.keys():
            return True
        if len(self.waiting) + len(self.ended) < self.num_hosts:
            return False  # a host still computes
        # No host computes, but one goes on if the exchange that it waits for is complete.
        return all(len(awaited) < self.num_hosts for awaited in self.waiting.values())

    def settle_times(self) -> None:
        """Work out every time that is known by now; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # What one host's log waits for may be in another's.
        has_progress = True
        while has_progress:
            has_progress = False
            for host in self.hosts:
                if host.settle_times():
                    has_progress = True


class _SimulatedWatch(FailureWatch):
    """Posts failures where the other simulated hosts of a machine find them."""

    def __init__(self, name: str, machine: _Machine):
        super().__init__(name, float("inf"))
        self._machine = machine

    def post(self, stage: str, error: BaseException) -> None:
        if self._machine.failure is None:
            self._machine.failure = f"{self._name} failed in {stage}: {describe_error(error)}"
        self._machine.turn.notify_all()


class SimulatedHost(HostGroup):
    """One of the hosts of :func:`simulate`; used as any HostGroup."""

    has_own_process = False

    def __init__(self, machine: _Machine, rank: int, pace: Sequence[Lap] | None = None):
        self._failures = _SimulatedWatch(f"host {rank}", machine)
        links = HostLinks(rank, machine.num_hosts, self._failures)
        super().__init__(device=machine.device, timeout=float("inf"), links=links)
        self._machine = machine
        self._network = machine.network
        self._pace = pace
        self._laps: list[Lap] = []
        # Including laps whose times are not worked out yet.
        self._num_laps = 0
        # The clocks in seconds, as far as they are worked out.
        self._cpu = 0.0
        self._gpu = 0.0
        # What still has to be worked out, in order: each moves a clock, or returns False as long as
        # it cannot.
        self._log: deque[Callable[[], bool]] = deque()
        # When this lap began: the real clock's seconds, and an event on a GPU.
        self._lap_start = 0.0
        self._lap_start_event: torch.cuda.Event | None = None
        self._num_posted = 0
        # Of exchanges whose arrival is not in the log yet, what puts it there.
        self._unsettled: deque[Callable[[], None]] = deque()
        # When this host's link has received everything before, in seconds.
        self._link_free = 0.0

    @property
    def laps(self) -> list[Lap]:
        """The stretches of computing between one reading of the clock and the next."""
        self._machine.settle_times()
        return self._laps

    def clock(self) -> float:
        """Return the seconds that have passed on this host's CPU."""
        return self.seconds_at([self.moment(on_device=False)])[0]

    def moment(self, on_device: bool = True) -> Moment:
        self._end_lap()
        moment = Moment(math.nan, self._lap_start_event)

        def read() -> None:
            moment.seconds = self._time(on_device)

        self._later(read)
        return moment

    def seconds_at(self, moments: Sequence[Moment]) -> list[float]:
        with self._not_counted():
            self._machine.settle_times()
        return [moment.seconds for moment in moments]

    def barrier(self) -> None:
        self.settle()
        with self._not_counted():
            if self.device.type == "cuda":
                # No lap begins behind what another job has left in the stream.
                torch.cuda.synchronize(self.device)
        self.start_gathering(torch.zeros(1)).wait()

    def wait_for_device(self, event: torch.cuda.Event) -> None:
        self.settle()
        with self._not_counted():
            event.synchronize()

    def settle(self) -> None:
        if self.device.type == "cuda":
            self._end_lap()
            self._later(self._wait_for_gpu)

    def _wait_for_gpu(self) -> None:
        self._cpu = max(self._cpu, self._gpu)

    def _time(self, on_device: bool) -> float:
        """Return a clock's seconds as far as they are worked out: the device's, or the CPU's."""
        if on_device:
            return max(self._gpu, self._cpu)
        return self._cpu

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Leave what the body does out of this host's time."""
        self._end_lap()
        try:
            yield
        finally:
            self._begin_lap()

    def _later(self, step: Callable[[], None]) -> None:
        """Run a step that cannot fail once everything before it is worked out."""

        def entry() -> bool:
            step()
            return True

        self._log.append(entry)

    def settle_times(self) -> bool:
        """Work out what is known of this host's times; returns whether anything was."""
        num_before = len(self._log)
        while self._log and self._log[0]():
            self._log.popleft()
        return len(self._log) < num_before

    def _begin_lap(self) -> None:
        """Let the time from now on count as this host's."""
        if self._machine.clock is None:
            return
        if self.device.type == "cuda":
            laps = self._machine.last_laps
            if not laps or laps[0].query():
                # The GPU is only a few laps behind the CPU.
                torch.cuda._sleep(_HEAD_START)
            self._lap_start_event = record_event(self.device)
            laps.append(self._lap_start_event)
        self._lap_start = self._machine.clock()

    def _end_lap(self) -> None:
        """Count the time since the lap began as this host's, and begin the next."""
        if self._pace is not None and self._num_laps == len(self._pace):
            raise InvalidRequestError(
                f"host {self.rank} reads its clock more often than its pace was recorded for"
            )
        if self._machine.clock is None:
            return
        cpu_seconds = self._machine.clock() - self._lap_start
        start_event = self._lap_start_event
        end_event = record_event(self.device) if start_event is not None else None
        number = self._num_laps
        self._num_laps += 1
        self._begin_lap()

        def count() -> None:
            gpu_seconds = 0.0
            if start_event is not None and end_event is not None:
                gpu_seconds = start_event.elapsed_time(end_event) / 1e3
            lap = Lap(cpu_seconds, gpu_seconds)
            if self._pace is not None:
                lap = self._pace[number]
            self._laps.append(lap)
            self._gpu = max(self._gpu, self._cpu) + lap.gpu
            self._cpu += lap.cpu

        self._later(count)

    def all_gather(self, tensor: Tensor) -> Pending:
        tensor = tensor.contiguous()
        self.bytes_received += (self.size - 1) * tensor.nbytes

        def timing(payloads: list[Tensor]) -> tuple[Iterable[int], float]:
            return range(self.size), self._network.gathering(self.size, tensor.nbytes)

        return self._exchange(tensor, timing, torch.stack, tensor.is_cuda)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        counts = [math.prod(shape) for shape in shapes]
        self.bytes_received += (sum(counts) - counts[self.rank]) * tensors[0].element_size()

        def timing(payloads: list[Sequence[Tensor]]) -> tuple[Iterable[int], float]:
            sizes = [sent[self.rank].nbytes for sent in payloads]
            senders = [host for host, size in enumerate(sizes) if size or host == self.rank]
            return senders, self._network.receiving(self.rank, sizes)

        def received(payloads: list[Sequence[Tensor]]) -> list[Tensor]:
            parts = []
            for sent, shape in zip(payloads, shapes, strict=True):
                parts.append(sent[self.rank].clone().view(*shape))
            return parts

        payload = [tensor.detach() for tensor in tensors]
        return self._exchange(payload, timing, received, tensors[0].is_cuda)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        num_bytes = tensor.nbytes if self.rank != source else 0

        def timing(payloads: list[Tensor]) -> tuple[Iterable[int], float]:
            return (source, self.rank), self._network.seconds(num_bytes)

        def received(payloads: list[Tensor]) -> Tensor:
            return payloads[source]

        exchange = self._exchange(tensor.clone(), timing, received, tensor.is_cuda)
        tensor.copy_(exchange.wait())
        self.bytes_received += num_bytes
        return tensor

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        return list(self._exchange(values, self._control_timing, _of_leader).wait())

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._exchange(data, self._control_timing, _of_leader).wait()

    def start_gathering(self, tensor: Tensor) -> Pending:
        return self._exchange(tensor, self._control_timing, torch.stack)

    def _control_timing(self, payloads: list) -> tuple[Iterable[int], float]:
        """Time an exchange of statuses, which are nearly empty: all wait for the last host."""
        return range(self.size), self._network.gathering(self.size, 1)

    def _exchange(
        self,
        payload: Any,
        timing: Callable[[list[Any]], tuple[Iterable[int], float]],
        result: Callable[[list[Any]], Any],
        on_gpu: bool = False,
    ) -> Pending:
        """Take part in the next exchange.

        Args:
            payload: what this host sends.
            timing: returns, by all hosts' payloads, which hosts this one receives from, and how
                many seconds that takes it.
            result: makes what this host receives of all hosts' payloads.
            on_gpu: whether the GPU waits for the data, and not the CPU.
        """
        if self._failures.is_broken:
            raise HostError("this host group broke in an earlier exchange")
        machine = self._machine

        # Send: post the payload, and log the time.
        number = self._num_posted
        self._num_posted += 1
        posts = machine.posts.setdefault(number, {})
        times = machine.times.setdefault(number, {})
        self._end_lap()

        def send() -> None:
            times[self.rank] = self._time(on_gpu)

        self._later(send)
        posts[self.rank] = payload
        if len(posts) == self.size:
            del machine.posts[number]
            del machine.times[number]
            machine.turn.notify_all()

        # Receive: work out when the data arrives, which may be after it is waited for.
        arrival = math.nan

        def settle() -> None:
            # Exchanges share this host's link, in the order of their beginning.
            senders, seconds = timing([posts[host] for host in range(self.size)])

            def arrive() -> bool:
                nonlocal arrival
                if any(host not in times for host in senders):
                    return False
                start = max(times[host] for host in senders)
                if seconds:
                    start = max(start, self._link_free)
                    self._link_free = start + seconds
                arrival = start + seconds
                return True

            self._log.append(arrive)

        def receive() -> None:
            if on_gpu:
                self._gpu = max(self._gpu, arrival)
            else:
                self._cpu = max(self._cpu, arrival)

        self._unsettled.append(settle)

        def finish() -> Any:
            with self._not_counted():
                # Let other hosts compute until all have posted.
                machine.waiting[self.rank] = posts
                while len(posts) < self.size and not machine.is_stuck(posts):
                    machine.turn.wait()
                del machine.waiting[self.rank]
                if len(posts) < self.size:
                    self._failures.is_broken = True
                    machine.turn.notify_all()
                    raise HostError(
                        machine.failure or "the hosts no longer take part in the same exchanges"
                    )
                # Exchanges that began before this one have the link before it.
                while settle in self._unsettled:
                    settle_next = self._unsettled.popleft()
                    settle_next()
                self._later(receive)
                return result([posts[host] for host in range(self.size)])

        return Pending(finish)

    def subgroup(
        self,
        members: Sequence[int],
        timeout: float | None = None,
        waits_for_work: bool = True,
        has_data: bool = True,
    ) -> HostGroup | None:
        """Refuse: there are no groups of some simulated hosts.

        Raises:
            ValueError: always.
        """
        raise ValueError("simulated hosts work together, all of them: there are no groups of some")

    def let_others_report(self) -> None:
        """Do nothing: nobody ends a thread early."""

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""


def _of_leader(payloads: list[Any]) -> Any:
    """Return host 0's payload, which it broadcasts."""
    return payloads[0]


def simulate(
    num_hosts: int,
    job: Callable,
    *args,
    network: Network | None = None,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] | None = time.perf_counter,
    paces: Sequence[Sequence[Lap]] | None = None,
) -> list[Any]:
    """Run ``job(hosts, *args)`` on simulated hosts, and return the list of its results.

    Hosts that share a model must not share the object, see :func:`share_weights`. Every host
    computes with as many threads as the caller's process.

    Args:
        num_hosts: H.
        job: called once per host with its :class:`SimulatedHost`.
        network: bandwidths and latencies; by default data arrives at once.
        device: where all of them compute.
        clock: seconds; what a host's computing is timed with. None: no host computes for any time,
            and on a GPU none is slowed down to be timed.
        paces: in place of measured times, each host's ``laps`` of runs of the same job, say their
            mean. Where the machine is noisy, the slowest of H hosts in every exchange would else be
            slower than any host is by itself.

    Raises:
        InvalidRequestError: a host reads its clock more often than in the run that gave its pace.
        Exception: raised by the job; if several hosts raised, the first that is not a consequence
            of another.
    """
    machine = _Machine(num_hosts, network or Network(), clock, torch.device(device))
    for rank in range(num_hosts):
        pace = None if paces is None else paces[rank]
        machine.hosts.append(SimulatedHost(machine, rank, pace))
    results: list[Any] = [None] * num_hosts
    errors: list[BaseException | None] = [None] * num_hosts
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        host = machine.hosts[rank]
        with machine.turn:
            # OpenMP's setting is the thread's own.
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            host._begin_lap()
            try:
                results[rank] = job(host, *args)
            except BaseException as error:
                errors[rank] = error
            machine.ended.add(rank)
            machine.turn.notify_all()

    # Run all hosts.
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # A HostError is the consequence of another host's error, where there is another.
    raised = [error for error in errors if error is not None]
    for error in raised:
        if not isinstance(error, HostError):
            raise error
    if raised:
        raise raised[0]
    return results


def share_weights(model: nn.Module) -> nn.Module:
    """Copy a model, but let its parameters and buffers be the original's own tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
