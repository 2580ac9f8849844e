"""Simulating H hosts in one process, which does their shares of the work one at a time, on virtual clocks.

Every simulated host is a thread with a HostGroup of its own. Only one computes at any time, with the whole
machine, until it has to wait for data that another has not sent yet; so data, order and results are those of a
real run. A host's clock counts the time it computed, and at the end of an exchange jumps to when the data would
have arrived, by its size and a stated bandwidth and latency. Overlap of communication and computation, and waiting
for the slowest host, thus show as they would. What does not show: contention inside a network, collectives that
are better or worse than the stated formula, and on a GPU the launches that a real run hides behind kernels.
"""

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apbv.hosts.exchange import Exchange, HostError, describe_error
from apbv.hosts.failure_watch import FailureWatch
from apbv.hosts.group import HostGroup


@dataclass(frozen=True)
class Link:
    """A connection of two hosts: bytes per second in each direction, and seconds until the first byte arrives."""

    bandwidth: float = float("inf")
    latency: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return how long a message takes, in seconds; an empty one takes no time."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True)
class Network:
    """The links between hosts.

    Attributes:
        link: between hosts of one group.
        between_groups: between hosts of different groups.
        group_size: hosts in a group; None: all hosts are one group.
    """

    link: Link = Link()
    between_groups: Link = Link()
    group_size: int | None = None

    def between(self, sender: int, receiver: int) -> Link:
        """Return the link from one host to another."""
        size = self.group_size
        return self.link if size is None or sender // size == receiver // size else self.between_groups

    def gathering(self, num_hosts: int, num_bytes: int) -> float:
        """Return the seconds of a ring all-gather: H-1 steps, each as slow as the slowest link of the ring."""
        steps = [self.between(host, (host + 1) % num_hosts).seconds(num_bytes) for host in range(num_hosts)]
        return (num_hosts - 1) * max(steps)

    def receiving(self, receiver: int, num_bytes: Sequence[int]) -> float:
        """Return the seconds until a host has received ``num_bytes[h]`` from every host h, one after the other."""
        return sum(
            self.between(sender, receiver).seconds(count)
            for sender, count in enumerate(num_bytes)
            if sender != receiver
        )


@dataclass
class _Post:
    """One host's part in one exchange: what it sends, and when (on its clock)."""

    payload: Any
    time: float


class _Machine:
    """The state that simulated hosts share: the turn to compute, and the exchanges under way."""

    def __init__(self, num_hosts: int, network: Network, clock: Callable[[], float]):
        self.num_hosts = num_hosts
        self.network = network
        self.clock = clock
        self.turn = threading.Condition()
        self.posts: dict[int, dict[int, _Post]] = {}
        self.failure: str | None = None
        self.ended: set[int] = set()
        self.waiting: dict[int, dict[int, _Post]] = {}  # by host, for which exchange

    def is_stuck(self, posts: dict[int, _Post]) -> bool:
        """Return whether an exchange can no longer be completed."""
        if self.failure or self.ended - posts.keys():
            return True
        complete = any(len(awaited) == self.num_hosts for awaited in self.waiting.values())
        return len(self.waiting) + len(self.ended) == self.num_hosts and not complete


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
    """One of the hosts of :func:`simulate`; used as any HostGroup.

    Attributes:
        laps: seconds of computing between one reading of the clock and the next.
    """

    has_own_process = False

    def __init__(self, machine: _Machine, rank: int, device: torch.device, pace: Sequence[float] | None = None):
        super().__init__(device=device, timeout=float("inf"))
        self._take_place(rank, machine.num_hosts)
        self._watch = _SimulatedWatch(self.name, machine)
        self._machine, self._network = machine, machine.network
        self.laps: list[float] = []
        self._pace = pace
        self._time = 0.0  # of this host, when its clock was last read
        self._read = 0.0  # the real clock, then
        self._num_posted = 0
        self._unsettled: deque[Callable[[], None]] = deque()
        self._link_free = 0.0

    def clock(self) -> float:
        """Return the seconds that have passed on this host."""
        before = self._read
        self._resume()
        lap = self._read - before
        if self._pace is not None:
            if len(self.laps) == len(self._pace):
                raise ValueError(f"host {self.rank} reads its clock more often than its pace was recorded for")
            lap = self._pace[len(self.laps)]
        self.laps.append(lap)
        self._time += lap
        return self._time

    def _resume(self) -> None:
        """Let the time from now on count as this host's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._read = self._machine.clock()

    def all_gather(self, tensor: Tensor) -> Exchange:
        tensor = tensor.contiguous()
        self.bytes_received += (self.size - 1) * tensor.nbytes

        def timing(posts: list[_Post]) -> tuple[float, float]:
            return max(post.time for post in posts), self._network.gathering(self.size, tensor.nbytes)

        return self._exchange(tensor, timing, torch.stack)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:

        def received(payloads: list[Sequence[Tensor]]) -> list[Tensor]:
            return [sent[self.rank].clone().view(*shape) for sent, shape in zip(payloads, shapes, strict=True)]

        counts = [math.prod(shape) for shape in shapes]
        self.bytes_received += (sum(counts) - counts[self.rank]) * tensors[0].element_size()

        def timing(posts: list[_Post]) -> tuple[float, float]:
            sizes = [post.payload[self.rank].nbytes for post in posts]
            start = max(post.time for host, post in enumerate(posts) if sizes[host] or host == self.rank)
            return start, self._network.receiving(self.rank, sizes)

        return self._exchange([tensor.detach() for tensor in tensors], timing, received)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:

        num_bytes = tensor.nbytes if self.rank != source else 0

        def timing(posts: list[_Post]) -> tuple[float, float]:
            link = self._network.between(source, self.rank)
            return max(posts[source].time, posts[self.rank].time), link.seconds(num_bytes)

        tensor.copy_(self._exchange(tensor.clone(), timing, lambda payloads: payloads[source]).wait())
        self.bytes_received += num_bytes
        return tensor

    def broadcast_ints(self, values: Sequence[int] | None, count: int) -> list[int]:
        return list(self._exchange(values, self._control_timing, lambda payloads: payloads[0]).wait())

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return self._exchange(data, self._control_timing, lambda payloads: payloads[0]).wait()

    def start_gathering(self, tensor: Tensor) -> Exchange:
        return self._exchange(tensor, self._control_timing, torch.stack)

    def _control_timing(self, posts: list[_Post]) -> tuple[float, float]:
        """Time an exchange of statuses, which are as good as empty: all wait for the last, and for latencies."""
        return max(post.time for post in posts), self._network.gathering(self.size, 1)

    def _exchange(self, payload, timing, result: Callable[[list[Any]], Any]) -> Exchange:
        """Take part in the next exchange; ``timing`` gives when it starts and how long it takes this host."""
        if self._watch.is_broken:
            raise HostError("this host group broke in an earlier exchange")
        machine, number = self._machine, self._num_posted
        self._num_posted += 1
        posts = machine.posts.setdefault(number, {})
        posts[self.rank] = _Post(payload, self.clock())
        if len(posts) == self.size:
            del machine.posts[number]
            machine.turn.notify_all()
        arrival = None

        def settle() -> None:
            """Work out when it arrives: exchanges share this host's link, in the order of their beginning."""
            nonlocal arrival
            start, seconds = timing([posts[host] for host in range(self.size)])
            if seconds:
                start = max(start, self._link_free)
                self._link_free = start + seconds
            arrival = start + seconds

        self._unsettled.append(settle)

        def finish():
            self.clock()
            machine.waiting[self.rank] = posts
            while len(posts) < self.size and not machine.is_stuck(posts):
                machine.turn.wait()
            del machine.waiting[self.rank]
            if len(posts) < self.size:
                self._watch.is_broken = True
                machine.turn.notify_all()
                self._resume()
                raise HostError(machine.failure or "the hosts no longer take part in the same exchanges")
            while arrival is None:
                self._unsettled.popleft()()
            self._time = max(self._time, arrival)
            received = result([posts[host].payload for host in range(self.size)])
            self._resume()
            return received

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
    clock: Callable[[], float] = time.perf_counter,
    paces: Sequence[Sequence[float]] | None = None,
) -> list[Any]:
    """Run ``job(hosts, *args)`` on simulated hosts, and return the list of its results.

    Hosts that share a model must not share the object, see :func:`share_weights`. Every host computes with as
    many threads as the caller's process.

    Args:
        num_hosts: H.
        job: called once per host with its :class:`SimulatedHost`.
        network: bandwidths and latencies; by default data arrives at once.
        device: where all of them compute.
        clock: seconds; what a host's computing is timed with.
        paces: in place of measured times, each host's ``laps`` of runs of the same job, say their mean: where the
            machine is noisy, the slowest of H hosts in every exchange is else slower than any host is by itself.

    Raises:
        ValueError: a host reads its clock more often than in the run that its pace is of.
        Exception: raised by the job; if several hosts raised, the first that is not a consequence of another.
    """
    machine = _Machine(num_hosts, network or Network(), clock)
    results: list[Any] = [None] * num_hosts
    errors: list[BaseException | None] = [None] * num_hosts
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        host = SimulatedHost(machine, rank, torch.device(device), paces and paces[rank])
        with machine.turn:
            if torch.get_num_threads() != num_threads:  # OpenMP's setting is the thread's own
                torch.set_num_threads(num_threads)
            host._resume()
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
