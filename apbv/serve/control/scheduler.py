"""The server's scheduler: waiting and running requests, and their KV memory."""

import bisect
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

from ..api_error import ApiError
from ..metrics.prometheus import Metrics
from ..metrics.report import report
from .job import Finished, Job
from .work_order import WorkOrder

_CLIENT_LEFT = 499  # as nginx has it
# Short prompts of a host at once, so that it has the next one when it has prefilled one.
_MOST_AHEAD = 2
# Seconds per token that a prompt lets others go first, about what its prefill takes on a CPU.
SECONDS_PER_TOKEN = 1e-3


class _Load(NamedTuple):
    """How loaded a host is for a request: the least loaded one gets it.

    Attributes:
        has_enough: whether it has short prompts to prefill for now, if this is one.
        used_bytes: the KV that counts there.
        num_answers: the answers that it decodes.
        reverse_number: minus the host's number: of equally loaded hosts the last one, because host
            0 serves HTTP, too.
    """

    has_enough: bool
    used_bytes: int
    num_answers: int
    reverse_number: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the requests in a server.

    Attributes:
        max_queue: how many requests may be read or wait while others run.
        max_kv_bytes: the most bytes of KV at once on each host: of answers that it decodes,
            prefills included, and of prompts that wait to be fetched. Of the latter all bytes count
            on every host: no host holds more.
        token_bytes: the KV of one token, in all layers.
        answer_bytes: what an answer holds beside its KV: a hybrid's states of linear attention.
        spare_tokens: the most tokens that an answer's KV has room for beyond its own.
        max_running: how many answers each host may decode at once; None: as many as the KV allows.
        max_answers: how many answers a request may ask for; None: as many as may run at once.
        split_tokens: the fewest tokens of a prompt that all hosts prefill together; shorter ones
            their decode hosts do.
    """

    max_queue: int
    max_kv_bytes: int
    token_bytes: int
    answer_bytes: int = 0
    spare_tokens: int = 0
    max_running: int | None = None
    max_answers: int | None = None
    split_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """The most tokens of a prompt and its answer that can ever run."""
        return (self.max_kv_bytes - self.answer_bytes) // self.token_bytes - self.spare_tokens

    def bytes_of(self, order: WorkOrder, num_tokens: int) -> int:
        """Return the maximum KV bytes of a prompt with this many tokens and its answers.

        Raises:
            ApiError: with status 400 if the request's answers can never run at once.
        """
        answer = 0
        if not order.hands_over:
            max_new_tokens = order.settings.sampling.max_new_tokens
            assert max_new_tokens is not None, "the reader sets the limit of every order"
            answer = max_new_tokens + self.spare_tokens
        count = order.reply.num_answers
        num_bytes = count * ((num_tokens + answer) * self.token_bytes + self.answer_bytes)
        most = min(each for each in (count, self.max_answers, self.max_running) if each is not None)
        if count > 1 and num_bytes > self.max_kv_bytes:
            most = min(most, self.max_kv_bytes * count // num_bytes)
        if count > most:
            raise ApiError(
                400,
                f"n is {count}, but this server allows at most {most} for this request",
                param="n",
            )
        return num_bytes


def _turn(job: Job) -> float:
    """Return the moment by which ready requests are ordered: later the longer a prompt is."""
    ready = job.record.ready
    assert ready is not None, "only ready requests are ordered"
    return ready + SECONDS_PER_TOKEN * job.read.num_tokens


class Scheduler:
    """Schedules the server's requests; thread-safe.

    A prompt lets shorter ones that become ready soon after it go first, up to a time that grows
    with its length; so none starves. Where the first does not fit on any host, those after it wait,
    too.

    Args:
        num_decode_hosts: how many hosts, the first ones, decode answers. A request's go to the one
            with the least KV.

    Attributes:
        changed: notified of what may let a thread go on.
        is_stopping: whether no further request is taken.
    """

    def __init__(self, limits: Limits, metrics: Metrics, num_decode_hosts: int = 1):
        self.limits = limits
        self.metrics = metrics
        self._decode_hosts = range(num_decode_hosts)
        self.changed = threading.Condition()
        self.is_stopping = False
        self._admitted: set[Job] = set()  # not running yet
        self._ready: list[Job] = []  # the first to run first
        self._running: set[Job] = set()
        self._offers: dict[str, tuple[int, float]] = {}  # by transfer: bytes of KV, and since when
        self._ended_offers: set[str] = set()  # that ended before they were counted
        self._awaits_offers = True

    @property
    def has_stopped(self) -> bool:
        """Whether no further request is taken, none runs, and no KV waits to be fetched."""
        with self.changed:
            if not self.is_stopping or self._running:
                return False
            return not (self._offers and self._awaits_offers)

    @property
    def num_running(self) -> int:
        """How many requests are being prefilled or decoded."""
        with self.changed:
            return len(self._running)

    @property
    def running_jobs(self) -> list[Job]:
        """The requests that are being prefilled or decoded."""
        with self.changed:
            return list(self._running)

    @property
    def num_ready(self) -> int:
        """How many requests that have been read wait to run."""
        with self.changed:
            return len(self._ready)

    def admit(self, *jobs: Job) -> None:
        """Give new requests places in the queue, all or none of them.

        Raises:
            ApiError: with status 429: the queue is full; with 400: it is too short for them.
        """
        with self.changed:
            most = self.limits.max_queue + 1
            if len(jobs) > most:
                raise ApiError(
                    400, f"at most {most} prompts are allowed, not {len(jobs)}", param="prompt"
                )
            # Where nothing runs, the first one does not wait.
            num_places = self.limits.max_queue if self._running else most
            if len(self._admitted) + len(jobs) > num_places:
                raise ApiError(
                    429, "the queue is full; try again later", headers={"Retry-After": "1"}
                )
            self._admitted.update(jobs)

    def make_ready(self, job: Job) -> None:
        """Put a request that was read into the queue.

        Raises:
            ApiError: as of :meth:`Limits.bytes_of`; or with status 503: it is not wanted any more.
        """
        with self.changed:
            if job.is_cancelled or self.is_stopping:
                raise ApiError(503, "the server is stopping, or the client has gone")
            job.kv_bytes = self.limits.bytes_of(job.read.order, job.read.num_tokens)
            job.is_short = (
                job.read.num_tokens < self.limits.split_tokens and not job.read.order.hands_over
            )
            job.record.ready = time.monotonic()
            bisect.insort(self._ready, job, key=_turn)
            self.changed.notify_all()

    def take(self, seconds: float, is_short: bool = False) -> Job | None:
        """Wait for the first prompt of a kind to fit, and let it run.

        None if that takes longer than ``seconds``.

        Also None as soon as everything has stopped.

        Args:
            is_short: take one that its decode host prefills alone, instead of one that all hosts
                prefill.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._first(is_short) is not None or self.has_stopped, seconds
            )
            first = self._first(is_short)
            if first is None:
                return None
            job, decode_host = first
            self._ready.remove(job)
            job.decode_host = None if job.read.order.hands_over else decode_host
            self._admitted.discard(job)
            self._running.add(job)
            job.record.began = time.monotonic()
            return job

    def cancel(self, job: Job) -> None:
        """Drop a request whose client has gone.

        A queued request is dropped at once, a running one at its next token.
        """
        with self.changed:
            job.is_cancelled = True
            is_ready = job in self._ready
            if is_ready:
                self._ready.remove(job)
            self.changed.notify_all()
        if is_ready:
            self.end(job, None, "cancelled")

    def release(self, job: Job) -> None:
        """Count a request as running no more: its KV is gone."""
        with self.changed:
            self._running.discard(job)
            self.changed.notify_all()

    def hold_offer(self, transfer: str, num_bytes: int) -> None:
        """Count KV that waits to be fetched, until :meth:`end_offer`."""
        with self.changed:
            if transfer in self._ended_offers:
                self._ended_offers.discard(transfer)
            else:
                self._offers[transfer] = num_bytes, time.monotonic()

    def end_offer(self, transfer: str, how: str, num_bytes: int) -> None:
        """Count KV no more that is not offered any longer; see :class:`apbv.kv.offers.Offers`."""
        now = time.monotonic()
        with self.changed:
            _, began = self._offers.pop(transfer, (0, None))
            if began is None:
                self._ended_offers.add(transfer)
            self.changed.notify_all()
        self.metrics.observe_transfer(how, num_bytes, 0.0 if began is None else now - began)

    def end(self, job: Job, event: Finished | ApiError | None, outcome: str) -> bool:
        """Send a request's last event, count the request, and delete its files.

        A second call changes nothing.

        Returns:
            Whether the request had not ended.
        """
        with self.changed:
            had_ended = job.has_ended
            job.has_ended = True
            self._admitted.discard(job)
        job.files.close()  # of a request that ended while it was read, those opened since, too
        if had_ended:
            return False
        record = job.record
        record.ended = time.monotonic()
        record.outcome = outcome
        if isinstance(event, ApiError):
            record.status = event.status
            record.error = str(event)
            record.param = event.param
        elif event is None:
            record.status = _CLIENT_LEFT
        else:
            record.status = 200
        report(record, self.metrics)
        if event is not None:
            job.send(event)
        return True

    def stop(self) -> None:
        """Reject further requests, and those that wait.

        What runs goes on, and KV waits to be fetched.
        """
        with self.changed:
            self.is_stopping = True
            waiting = self._ready
            self._ready = []
            self.changed.notify_all()
        self._end_all(waiting, "the server is stopping", "rejected")

    def cut_short(self) -> None:
        """End what runs, and let KV wait no longer."""
        with self.changed:
            self._awaits_offers = False
            running = list(self._running)
            self.changed.notify_all()
        self._end_all(running, "the server is stopping", "failed")
        for job in running:
            self.cancel(job)

    def close(self, failure: str | None) -> None:
        """Take no request any more, and end all that are left, running ones included.

        Args:
            failure: what the server fails of; None: it was asked to end.
        """
        with self.changed:
            self.is_stopping = True
            left = [*self._admitted, *self._running]
        if failure is None:
            self._end_all(left, "the server is stopping", "rejected")
        else:
            self._end_all(left, failure, "failed")

    def _end_all(self, jobs: list[Job], reason: str, outcome: str) -> None:
        for job in jobs:
            self.end(job, ApiError(503, reason), outcome)

    def _first(self, is_short: bool) -> tuple[Job, int] | None:
        """Return the first of a kind in the queue and its decode host.

        None if it, or one before it, fits nowhere yet.
        """
        for job in self._ready:
            decode_host = self._decode_host_of(job)
            if decode_host is None:
                return None
            if job.is_short == is_short and not (is_short and self._has_enough(decode_host, job)):
                return job, decode_host
        return None

    def _decode_host_of(self, job: Job) -> int | None:
        """Return the host with the least KV of those where a request fits; None if it fits nowhere.

        A prompt whose KV is transferred has to fit on every host.
        """
        fitting = [
            decode_host for decode_host in self._decode_hosts if self._fits(job, decode_host)
        ]
        if job.read.order.hands_over and len(fitting) < len(self._decode_hosts):
            return None
        return min(fitting, key=lambda decode_host: self._load(job, decode_host), default=None)

    def _fits(self, job: Job, decode_host: int) -> bool:
        """Return whether a host has room for a request's KV, and may decode its answers."""
        if self.kv_bytes_on(decode_host) + job.kv_bytes > self.limits.max_kv_bytes:
            return False
        order = job.read.order
        if self.limits.max_running is None or order.hands_over:
            return True
        return self._num_answers(decode_host) + order.reply.num_answers <= self.limits.max_running

    def _load(self, job: Job, decode_host: int) -> _Load:
        has_enough = job.is_short and self._has_enough(decode_host, job)
        return _Load(
            has_enough, self.kv_bytes_on(decode_host), self._num_answers(decode_host), -decode_host
        )

    def _has_enough(self, decode_host: int, job: Job) -> bool:
        """Return whether a host has short prompts to prefill for now.

        Only requests with files count if this one has files, and only those without if it has none.
        """
        num_alike = 0
        for other in self._running:
            is_waiting = other.is_short and other.record.first_token is None
            has_files_alike = bool(other.read.media) == bool(job.read.media)
            if is_waiting and other.decode_host == decode_host and has_files_alike:
                num_alike += 1
        return num_alike >= _MOST_AHEAD

    def kv_bytes_on(self, decode_host: int) -> int:
        """Return the bytes of KV that count on a host."""
        running = sum(
            job.kv_bytes for job in self._running if job.decode_host in (decode_host, None)
        )
        return running + self._offered()

    def _offered(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._offers.values())

    def _num_answers(self, decode_host: int) -> int:
        return sum(
            job.read.order.reply.num_answers
            for job in self._running
            if job.decode_host == decode_host
        )

    def render_metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format, with gauges of this moment."""
        with self.changed:
            used = [self.kv_bytes_on(decode_host) for decode_host in self._decode_hosts]
            most = self.limits.max_kv_bytes
            self.metrics.set(
                num_requests_waiting=len(self._admitted),
                num_requests_running=len(self._running),
                kv_cache_bytes=sum(job.kv_bytes for job in self._running) + self._offered(),
                kv_cache_usage_perc=sum(used) / (len(used) * most) if most else 0,
                kv_offers_waiting=len(self._offers),
            )
            for decode_host in self._decode_hosts:
                self.metrics.set_of_host(
                    decode_host, used[decode_host], self._num_answers(decode_host)
                )
        return self.metrics.render()
