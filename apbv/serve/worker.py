"""The queue of requests, and the thread on host 0 that takes them through the engine, one at a time."""

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch

from ..engine import Engine
from ..generated import GenerateResult
from ..hosts import AgreedError, HostError, HostGroup
from ..prefilling.prefiller import RequestCancelled
from .metrics import Metrics
from .order import ANSWER, LEAVE, WAIT, answer, exchange_commands, is_usable
from .protocol import ApiError, ChatRequest, FinishReason, Usage
from .reading import Reader, ReadRequest, client_message
from .text import AnswerText

# Seconds without a request after which host 0 tells the others that there is none. This is less than what hosts
# wait for at a time, so that a wait between two requests is a single one.
_IDLE_SECONDS = 0.5
_SILENCE_SECONDS = 10.0  # without a step: another host does not answer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """The last event of a request that was answered."""

    reason: FinishReason
    usage: Usage


Event = str | Finished | ApiError


class Job:
    """A request on its way, from its arrival to its last event.

    It is *admitted* (its body and files are read), then *ready* (it waits for the engine), then *running*. From
    each of these :meth:`Worker.end` takes it to its end: once it has failed, was answered, or was cancelled,
    which takes effect at the engine's next token.

    Attributes:
        events: stretches of text, and at last Finished or an ApiError; for the event loop it was made in.
    """

    def __init__(self):
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.is_cancelled = self.has_ended = False
        self.files = ExitStack()
        self.read: ReadRequest | None = None

    def send(self, event: Event) -> None:
        """Send an event; any thread may call this."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """Gives requests to the engine in the order in which they were ready; on host 0.

    Args:
        max_queue: how many requests may be read or wait while another one is answered.

    Attributes:
        max_admitted: how many requests may be read or wait at all.
        failure: the error that ended the engine's thread before it was told to stop.
    """

    def __init__(self, engine: Engine, hosts: HostGroup, reader: Reader, metrics: Metrics, max_queue: int):
        self._engine, self._hosts, self._reader, self.metrics = engine, hosts, reader, metrics
        self._max_queue, self.max_admitted = max_queue, max_queue + 1
        self._changed = threading.Condition()
        self._admitted: set[Job] = set()  # not running yet
        self._ready: deque[Job] = deque()
        self._running: Job | None = None
        self._is_stopping = False
        self._last_step_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._on_stop: Callable[[], None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None

    # These are called from the thread that speaks HTTP, or from those that read requests.

    def start(self, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Start the engine's thread.

        Args:
            on_stop: called when another host was asked to end.
            on_end: called when the thread has ended.
        """
        self._on_stop, self._on_end = on_stop, on_end
        self._thread.start()

    def reason_unavailable(self) -> str | None:
        """Say why no request can be answered; None if all is well."""
        if self.failure is not None:
            return "a host has failed"
        if self._is_stopping or not self._thread.is_alive():
            return "the server is stopping"
        if self._running is None and time.monotonic() - self._last_step_at > _SILENCE_SECONDS:
            return "a host does not answer"
        return None

    def admit(self) -> Job:
        """Give a new request a place in the queue.

        Raises:
            ApiError: with status 503 if no request can be answered, with 429 if the queue is full.
        """
        job = Job()
        with self._changed:
            error = None
            if reason := self.reason_unavailable():
                error = ApiError(503, reason)
            elif len(self._admitted) >= self._max_queue + (self._running is None):
                error = ApiError(429, "the queue is full; try again later", headers={"Retry-After": "1"})
            if error is not None:
                self.metrics.requests.labels("rejected").inc()
                raise error
            self._admitted.add(job)
            self._update_gauges()
        return job

    def submit(self, job: Job, request: ChatRequest) -> None:
        """Read a request and put it into the queue, which may take long; an error becomes its last event."""

        def is_wanted() -> bool:
            return not (job.is_cancelled or self._is_stopping)

        try:
            job.read = self._reader.read(request, job.files, is_wanted)
        except ApiError as error:
            if is_wanted():
                return self.end(job, error, "invalid" if error.status < 500 else "failed")
        except Exception as error:
            return self.end(job, ApiError(500, f"cannot read the request: {error}"), "failed")
        with self._changed:
            if job.read is not None and is_wanted():
                self._ready.append(job)
                self._changed.notify()
                return
        self.end(job, ApiError(503, "the server is stopping"), "cancelled" if job.is_cancelled else "rejected")

    def cancel(self, job: Job) -> None:
        """Drop a request whose client has gone: at once from the queue, or at the engine's next token."""
        with self._changed:
            job.is_cancelled = True
            is_ready = job in self._ready
            if is_ready:
                self._ready.remove(job)
        if is_ready:
            self.end(job, None, "cancelled")

    def end(self, job: Job, event: Finished | ApiError | None, outcome: str) -> None:
        """Send a request's last event, count the request, and delete its files; a second call changes nothing."""
        with self._changed:
            had_ended, job.has_ended = job.has_ended, True
            self._admitted.discard(job)
            self._update_gauges()
        job.files.close()  # of a request that ended while it was read, those opened since, too
        if had_ended:
            return
        self.metrics.requests.labels(outcome).inc()
        _logger.info("%s %s", job.id, _log_line(job, event, outcome))
        if event is not None:
            job.send(event)

    def stop(self) -> None:
        """Refuse the requests that wait or come, finish the running one, and let all hosts leave."""
        with self._changed:
            self._is_stopping = True
            waiting = list(self._ready)
            self._ready.clear()
            self._changed.notify()
        for job in waiting:
            self.end(job, ApiError(503, "the server is stopping"), "rejected")

    def join(self, seconds: float) -> None:
        """Wait for the engine's thread to end; after so many seconds cut the running answer short."""
        self._thread.join(seconds)
        running = self._running
        if self._thread.is_alive() and running is not None:
            self.end(running, ApiError(503, "the server is stopping"), "failed")
            self.cancel(running)
        self._thread.join()

    # These run in the engine's thread.

    def _run(self) -> None:
        try:
            if self._hosts.device.type == "cuda":
                torch.cuda.set_device(self._hosts.device)
            while self._step():
                pass
        except BaseException as error:
            self.failure = error
        finally:
            with self._changed:
                left, self._is_stopping = list(self._admitted), True
                self._ready.clear()
            if self._running is not None:
                left.append(self._running)
            for job in left:
                self.end(job, ApiError(503, self.reason_unavailable()), "failed" if self.failure else "rejected")
            self._on_end()

    def _step(self) -> bool:
        """Answer the next request, or tell the other hosts that there is none; False once they have left."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_stopping, _IDLE_SECONDS)
            job = self._running = self._ready.popleft() if self._ready else None
            self._admitted.discard(job)
            self._update_gauges()
            command = LEAVE if self._is_stopping and job is None else WAIT if job is None else ANSWER
        if job is not None:
            self._answer(job)
        else:
            self._send_command(command)
        with self._changed:
            self._running, self._last_step_at = None, time.monotonic()
            self._update_gauges()
        return command != LEAVE

    def _send_command(self, command: int) -> None:
        if exchange_commands(self._hosts, command, False)[1] and command != LEAVE:
            self._on_stop()

    def _answer(self, job: Job) -> None:
        order, media = job.read.order, job.read.media
        alone = self._hosts.num_processes == 1
        try:
            sent = [] if alone else [file.path.read_bytes() for file in media if file.relative is None]
        except OSError as error:
            return self.end(job, ApiError(500, f"cannot read a temporary file: {error.strerror}"), "failed")
        self._send_command(ANSWER)
        self._hosts.broadcast_bytes(order.to_json())
        for data in sent:
            self._hosts.broadcast_bytes(data)
        text = AnswerText(self._decode, job.read.stop)

        def stop(tokens: Sequence[int]) -> bool:
            if tokens and not job.is_cancelled:
                self._send_text(job, text.update(tokens))
            return job.is_cancelled or text.stopped

        try:
            result = answer(self._engine, self._hosts, order, lambda _: [file.path for file in media], stop)
        except RequestCancelled:
            return self.end(job, None, "cancelled")
        except Exception as error:
            if not is_usable(self._engine, self._hosts):
                raise
            # All hosts have refused alike: the request is to blame, the model or the engine.
            if isinstance(error, (ValueError, HostError)) and not isinstance(error, AgreedError):
                return self.end(job, ApiError(400, client_message(error, media), param="messages"), "invalid")
            return self.end(job, ApiError(500, f"{type(error).__name__}: {error}"), "failed")
        if job.is_cancelled:
            return self.end(job, None, "cancelled")
        self._send_text(job, text.finish(result.token_ids))
        self._finish(job, result, "stop" if text.stopped else result.finish_reason)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(tokens, skip_special_tokens=True)

    def _send_text(self, job: Job, text: str) -> None:
        if job.first_token is None:
            job.first_token = time.monotonic()
        if text:
            job.send(text)

    def _finish(self, job: Job, result: GenerateResult, reason: FinishReason) -> None:
        usage = Usage.of(result.stats["num_input_tokens"], len(result.token_ids))
        metrics, speculation = self.metrics, result.stats["speculation"]
        metrics.ttft.observe(job.first_token - job.arrived)
        metrics.latency.observe(time.monotonic() - job.arrived)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generated_tokens.inc(usage.completion_tokens)
        if speculation is not None:
            metrics.drafted_tokens.inc(speculation["num_drafted"])
            metrics.accepted_tokens.inc(speculation["num_accepted"])
        self.end(job, Finished(reason, usage), reason)

    def _update_gauges(self) -> None:
        self.metrics.waiting.set(len(self._admitted))
        self.metrics.running.set(self._running is not None)


def _log_line(job: Job, event: Finished | ApiError | None, outcome: str) -> str:
    """Say for the log what became of a request, but nothing of what was asked or answered."""
    status = 200 if isinstance(event, Finished) else 499 if event is None else event.status  # 499: the client left
    parts = [f"{status} {outcome}"]
    if isinstance(event, Finished):
        parts.append(f"{event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens")
    if job.first_token is not None:
        parts.append(f"first token {job.first_token - job.arrived:.3f} s")
    parts.append(f"total {time.monotonic() - job.arrived:.3f} s")
    return ", ".join(parts)
