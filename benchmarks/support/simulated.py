"""Simulating H hosts in one process, which does their shares of the work one at a time, on virtual
clocks.

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

from apbv.errors import HostError, describe_error
from apbv.hosts.devices import record_event
from apbv.hosts.exchange import Exchange
from apbv.hosts.failure_watch import FailureWatch
from apbv.hosts.group import HostGroup


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
        """Return the seconds until a host has received ``num_bytes[h]`` from every host h, one
        after the other."""
        return sum(
            self.seconds(count) for sender, count in enumerate(num_bytes) if sender != receiver
        )


# How long an idle GPU is kept from what a CPU launches next, in cycles: about 5 ms, in which a CPU
# launches fewer than the 1,024 kernels that CUDA queues.
_HEAD_START = 10_000_000


class Lap(NamedTuple):
    """A stretch of computing on a host: the seconds of its CPU, and of its GPU."""

    cpu: float
    gpu: float = 0.0


@dataclass
class _Moment:
    """A :class:`apbv.hosts.Moment` whose time is worked out when it is asked for."""

    event: torch.cuda.Event | None = None
    seconds: float = math.nan


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
        self.posts: dict[int, dict[int, Any]] = {}  # by exchange, what each host sends
        # By exchange, when each host had it on its clock.
        self.times: dict[int, dict[int, float]] = {}
        # The beginnings of any hosts' last ones.
        self.last_laps: deque[torch.cuda.Event] = deque(maxlen=16)
        self.failure: str | None = None
        self.ended: set[int] = set()
        self.waiting: dict[int, dict[int, Any]] = {}  # by host, for which exchange's posts

    def is_stuck(self, posts: dict[int, Any]) -> bool:
        """Return whether an exchange can no longer be completed."""
        if self.failure or self.ended - posts.keys():
            return True
        complete = any(len(awaited) == self.num_hosts for awaited in self.waiting.values())
        return len(self.waiting) + len(self.ended) == self.num_hosts and not complete

    def settle_times(self) -> None:
        """Work out every time that is known by now; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while any([host.settle_times() for host in self.hosts]):
            pass


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
        super().__init__(device=machine.device, timeout=float("inf"))
        self._take_place(rank, machine.num_hosts)
        self._watch = _SimulatedWatch(self.name, machine)
        self._machine = machine
        self._network = machine.network
        self._pace = pace
        self._laps: list[Lap] = []
        self._num_laps = 0  # with those whose times are not worked out yet
        self._cpu = self._gpu = 0.0  # the clocks, as far as they are worked out
        # What still has to be worked out, in order: each moves a clock, or returns False as long as
        # it cannot.
        self._log: deque[Callable[[], bool]] = deque()
        # The real clock and the GPU's event, when this lap began.
        self._read, self._begun = (0.0, None)
        self._num_posted = 0
        self._unsettled: deque[Callable[[], None]] = deque()
        self._link_free = 0.0

    @property
    def laps(self) -> list[Lap]:
        """The stretches of computing between one reading of the clock and the next."""
        self._machine.settle_times()
        return self._laps

    def clock(self) -> float:
        """Return the seconds that have passed on this host's CPU."""
        return self.seconds_at([self.moment(on_device=False)])[0]

    def moment(self, on_device: bool = True) -> _Moment:
        self._end_lap()
        moment = _Moment(self._begun)

        def read() -> None:
            moment.seconds = max(self._gpu, self._cpu) if on_device else self._cpu

        self._later(read)
        return moment

    def seconds_at(self, moments: Sequence[_Moment]) -> list[float]:
        with self._not_counted():
            self._machine.settle_times()
        return [moment.seconds for moment in moments]

    def barrier(self) -> None:
        self.settle()
        with self._not_counted():
            if (
                self.device.type == "cuda"
            ):  # no lap begins behind what another job has left in the stream
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

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        """Leave what the body does out of this host's time."""
        self._end_lap()
        try:
            yield
        finally:
            self._begin_lap()

    def _later(self, settle: Callable[[], None]) -> None:
        """Move clocks once all that came before is worked out."""
        self._log.append(lambda: settle() is None)

    def settle_times(self) -> bool:
        """Work out what is known of this host's times; returns whether anything was."""
        before = len(self._log)
        while self._log and self._log[0]():
            self._log.popleft()
        return len(self._log) < before

    def _begin_lap(self) -> None:
        """Let the time from now on count as this host's."""
        if self._machine.clock is None:
            return
        if self.device.type == "cuda":
            laps = self._machine.last_laps
            if not laps or laps[0].query():  # the GPU is only a few laps behind
                torch.cuda._sleep(_HEAD_START)
            self._begun = record_event(self.device)
            laps.append(self._begun)
        self._read = self._machine.clock()

    def _end_lap(self) -> None:
        """Count the time since the lap began as this host's, and begin the next."""
        if self._pace is not None and self._num_laps == len(self._pace):
            raise ValueError(
                f"host {self.rank} reads its clock more often than its pace was recorded for"
            )
        if self._machine.clock is None:
            return
        seconds = self._machine.clock() - self._read
        begun = self._begun
        number = self._num_laps
        ended = record_event(self.device) if self.device.type == "cuda" else None
        self._num_laps += 1
        self._begin_lap()

        def count() -> None:
            lap = Lap(seconds, begun.elapsed_time(ended) / 1e3 if begun else 0.0)
            if self._pace is not None:
                lap = self._pace[number]
            self._laps.append(lap)
            self._gpu = max(self._gpu, self._cpu) + lap.gpu
            self._cpu += lap.cpu

        self._later(count)

    def all_gather(self, tensor: Tensor) -> Exchange:
        tensor = tensor.contiguous()
        self.bytes_received += (self.size - 1) * tensor.nbytes

        def timing(payloads: list[Tensor]) -> tuple[Iterable[int], float]:
            return range(self.size), self._network.gathering(self.size, tensor.nbytes)

        return self._exchange(tensor, timing, torch.stack, tensor.is_cuda)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:

        def received(payloads: list[Sequence[Tensor]]) -> list[Tensor]:
            return [
                sent[self.rank].clone().view(*shape)
                for sent, shape in zip(payloads, shapes, strict=True)
            ]

        counts = [math.prod(shape) for shape in shapes]
        self.bytes_received += (sum(counts) - counts[self.rank]) * tensors[0].element_size()

        def timing(payloads: list[Sequence[Tensor]]) -> tuple[Iterable[int], float]:
            sizes = [sent[self.rank].nbytes for sent in payloads]
            senders = [host for host, size in enumerate(sizes) if size or host == self.rank]
            return senders, self._network.receiving(self.rank, sizes)

        return self._exchange(
            [tensor.detach() for tensor in tensors], timing, received, tensors[0].is_cuda
        )

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:

        num_bytes = tensor.nbytes if self.rank != source else 0

        def timing(payloads: list[Tensor]) -> tuple[Iterable[int], float]:
            return (source, self.rank), self._network.seconds(num_bytes)

        sent = self._exchange(
            tensor.clone(), timing, lambda payloads: payloads[source], tensor.is_cuda
        )
        tensor.copy_(sent.wait())
        self.bytes_received += num_bytes
        return tensor

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        return list(
            self._exchange(values, self._control_timing, lambda payloads: payloads[0]).wait()
        )

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._exchange(data, self._control_timing, lambda payloads: payloads[0]).wait()

    def start_gathering(self, tensor: Tensor) -> Exchange:
        return self._exchange(tensor, self._control_timing, torch.stack)

    def _control_timing(self, payloads: list) -> tuple[Iterable[int], float]:
        """Time an exchange of statuses, which are as good as empty: all wait for the last, and for
        latencies."""
        return range(self.size), self._network.gathering(self.size, 1)

    def _exchange(
        self,
        payload: Any,
        timing: Callable[[list[Any]], tuple[Iterable[int], float]],
        result: Callable[[list[Any]], Any],
        on_gpu: bool = False,
    ) -> Exchange:
        """Take part in the next exchange.

        Args:
            timing: returns by all hosts' payloads which hosts this one hears from, and how long
                that takes it.
            on_gpu: whether the GPU waits for the data, and not the CPU.
        """
        if self._watch.is_broken:
            raise HostError("this host group broke in an earlier exchange")
        machine = self._machine
        number = self._num_posted
        self._num_posted += 1
        posts = machine.posts.setdefault(number, {})
        times = machine.times.setdefault(number, {})
        self._end_lap()

        def send() -> None:
            times[self.rank] = max(self._gpu, self._cpu) if on_gpu else self._cpu

        self._later(send)
        posts[self.rank] = payload
        if len(posts) == self.size:
            del machine.posts[number], machine.times[number]
            machine.turn.notify_all()
        arrival = None

        def settle() -> None:
            """Work out when it arrives: exchanges share this host's link, in the order of their
            beginning."""
            senders, seconds = timing([posts[host] for host in range(self.size)])

            def arrive() -> bool:
                nonlocal arrival
                if not all(host in times for host in senders):
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

        def finish():
            with self._not_counted():
                machine.waiting[self.rank] = posts
                while len(posts) < self.size and not machine.is_stuck(posts):
                    machine.turn.wait()
                del machine.waiting[self.rank]
                if len(posts) < self.size:
                    self._watch.is_broken = True
                    machine.turn.notify_all()
                    raise HostError(
                        machine.failure or "the hosts no longer take part in the same exchanges"
                    )
                while settle in self._unsettled:
                    self._unsettled.popleft()()
                self._later(receive)
                return result([posts[host] for host in range(self.size)])

        return Exchange(finish)

    def subgroup(self, members: Sequence[int], timeout: float | None = None) -> HostGroup | None:
        raise ValueError("simulated hosts work together, all of them: there are no groups of some")

    def let_others_report(self) -> None:
        """Do nothing: nobody ends a thread early."""

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""


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
            mean: where the machine is noisy, the slowest of H hosts in every exchange is else
                slower than any host is by itself.

    Raises:
        ValueError: a host reads its clock more often than in the run that its pace is of.
        Exception: raised by the job; if several hosts raised, the first that is not a consequence
            of another.
    """
    machine = _Machine(num_hosts, network or Network(), clock, torch.device(device))
    machine.hosts = [
        SimulatedHost(machine, rank, paces and paces[rank]) for rank in range(num_hosts)
    ]
    results: list[Any] = [None] * num_hosts
    errors: list[BaseException | None] = [None] * num_hosts
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        host = machine.hosts[rank]
        with machine.turn:
            if torch.get_num_threads() != num_threads:  # OpenMP's setting is the thread's own
                torch.set_num_threads(num_threads)
            host._begin_lap()
            try:
                results[rank] = job(host, *args)
            except BaseException as error:
                errors[rank] = error
            machine.ended.add(rank)
            machine.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, HostError)), raised[0])
    return results


def share_weights(model: nn.Module) -> nn.Module:
    """Copy a model, but let its parameters and buffers be the original's own tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
