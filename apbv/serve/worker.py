"""This module takes requests from HTTP to the engine, and says how the engine is."""

from collections.abc import Callable

from .decoding import Decoding
from .executor import Executor, why_one_at_a_time
from .job import Finished, Job
from .leader import Leader
from .ledger import Ledger
from .protocol import ApiError
from .reading import Reader
from .requests import GenerationRequest

_SILENCE_SECONDS = 10.0  # without a step: another host does not answer


class Worker:
    """A Worker has requests read, and answered in the order in which they were ready; on host 0.

    Its methods are called from the thread that speaks HTTP, or from those that read requests.

    Args:
        executor: carries them out, together with the other hosts' executors.
        ledger: keeps their limits.

    Attributes:
        reader: reads the requests.
        max_model_len: the tokens of a prompt and its answer, at most.
        max_admitted: how many requests may be read or wait at all.
        why_one_at_a_time: why answers are not decoded together; None where they are.
    """

    def __init__(self, executor: Executor, reader: Reader, ledger: Ledger):
        self._executor, self.reader, self._ledger = executor, reader, ledger
        self.max_admitted, self.metrics = ledger.limits.max_queue + 1, ledger.metrics
        self.why_one_at_a_time = why_one_at_a_time(executor.engine)
        self.max_model_len = reader.max_model_len
        self._leader: Leader | None = None

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's threads before they were told to stop."""
        return None if self._leader is None else self._leader.failure

    def start(self, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Start the engine's threads.

        Args:
            on_stop: called when another host was asked to end.
            on_end: called when the threads have ended.
        """
        decoding = None
        if self.why_one_at_a_time is None:
            decoding = Decoding(self._executor.engine, self._ledger)
        self._leader = Leader(self._executor, self._ledger, decoding, on_stop, on_end)
        self._leader.start()

    def reason_unavailable(self) -> str | None:
        """Say why no request can be answered; None if all is well."""
        if self.failure is not None:
            return "a host has failed"
        if self._ledger.is_stopping or self._leader is None or not self._leader.is_alive:
            return "the server is stopping"
        if self._leader.seconds_idle > _SILENCE_SECONDS:
            return "a host does not answer"
        return None

    def admit(self, request_id: str | None = None, kind: str = "chatcmpl", traceparent: str | None = None) -> Job:
        """Give a new request a place in the queue; arguments as of :class:`.job.Job`.

        Raises:
            ApiError: with status 503 if no request can be answered, with 429 if the queue is full.
        """
        job = Job(request_id, kind, traceparent)
        try:
            if reason := self.reason_unavailable():
                raise ApiError(503, reason)
            self._ledger.admit(job)
        except ApiError:
            self.metrics.observe_end("rejected", job.times, 0, 0, None)
            raise
        return job

    def submit(self, job: Job, request: GenerationRequest) -> None:
        """Read a request and put it into the queue, which may take long; an error becomes its last event."""

        def is_wanted() -> bool:
            return not (job.is_cancelled or self._ledger.is_stopping)

        try:
            job.is_streamed = bool(request.stream)
            if request.hands_over and self._executor.offers is None:
                message = "this server hands no KV over: it was started without --kv-transfer"
                raise ApiError(400, message, param="kv_transfer_params")
            job.read = self.reader.read(request, job.files, is_wanted)
        except ApiError as error:
            if is_wanted():
                return self.end(job, error, "invalid" if error.status < 500 else "failed")
        except Exception as error:
            return self.end(job, ApiError(500, f"cannot read the request: {error}"), "failed")
        if job.read is None or not self._ledger.make_ready(job):
            outcome = "cancelled" if job.is_cancelled else "rejected"
            self.end(job, ApiError(503, "the server is stopping"), outcome)

    def cancel(self, job: Job) -> None:
        """Drop a request whose client has gone: at once from the queue, or at its next token."""
        self._ledger.cancel(job)

    def end(self, job: Job, event: Finished | ApiError | None, outcome: str) -> None:
        """End a request that is not running; see :meth:`.ledger.Ledger.end`."""
        self._ledger.end(job, event, outcome)

    def stop(self) -> None:
        """Refuse the requests that wait or come, finish the others, and let all hosts leave.

        They stay until the KV of prompts that were handed over has been fetched, too.
        """
        for job in self._ledger.stop():
            self.end(job, ApiError(503, "the server is stopping"), "rejected")

    def join(self, seconds: float) -> None:
        """Wait for the engine's threads to end; after so many seconds cut the running answers short, and leave."""
        self._leader.join(seconds)
        if self._leader.is_alive:
            self._ledger.give_up_offers()
            for job in self._ledger.running:
                self.end(job, ApiError(503, "the server is stopping"), "failed")
                self.cancel(job)
        self._leader.join()
