"""The server's engine loop on host 0: takes requests from HTTP, and leads all hosts through them."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from ..hosts import AgreedError, HostError
from ..prefilling.cancelling import RequestCancelled
from .decoding import Decoding
from .executor import (
    ANSWER,
    HAND_OVER,
    LEAVE,
    PREFILL,
    WAIT,
    Executor,
    HandedOver,
    exchange_commands,
    why_one_at_a_time,
)
from .job import Job
from .reading import Reader, client_message
from .requests import ApiError, GenerationRequest
from .scheduler import Scheduler
from .telling import Telling

# Seconds without a request after which host 0 sends the others an idle command. This is less than the hosts' own
# wait, so that a wait between two requests is a single one.
_IDLE_SECONDS = 0.5
_SILENCE_SECONDS = 10.0  # without a step: another host does not answer


class Worker:
    """Engine loop: reads requests and has all hosts carry them out, in a thread.

    All communication between hosts happens in this thread. It prefills prompts sequentially, in the scheduler's
    order, while another thread decodes; if answers cannot be batched, it decodes each before it takes the next.
    The methods are called from the thread that speaks HTTP, or from those that read requests.

    Args:
        executor: carries orders out, together with the other hosts' executors.
        scheduler: the request queue and limits.

    Attributes:
        reader: reads the requests.
        why_one_at_a_time: why answers are not batched; None if they are.
        failure: the error that ended the thread prematurely.
    """

    def __init__(self, executor: Executor, reader: Reader, scheduler: Scheduler):
        self._executor, self.reader, self._scheduler = executor, reader, scheduler
        self.why_one_at_a_time = why_one_at_a_time(executor.engine)
        self._decoding = None if self.why_one_at_a_time else Decoding(executor.engine, scheduler)
        self._decode = executor.engine.tokenizer.decode
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_step_at, self._is_busy = time.monotonic(), False
        self.failure: BaseException | None = None

    def start(self, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Start the engine's threads.

        Args:
            on_stop: called when another host was asked to end.
            on_end: called when the threads have ended.
        """
        self._on_stop, self._on_end = on_stop, on_end
        self._thread.start()

    def reason_unavailable(self) -> str | None:
        """Return why no request can be answered; None if they can."""
        if self.failure is not None:
            return "a host has failed"
        if self._scheduler.is_stopping or not self._thread.is_alive():
            return "the server is stopping"
        if not self._is_busy and time.monotonic() - self._last_step_at > _SILENCE_SECONDS:
            return "a host does not answer"
        return None

    def admit(self, job: Job) -> None:
        """Give a new request a place in the queue.

        Raises:
            ApiError: with status 503 if no request can be answered, with 429 if the queue is full.
        """
        try:
            if reason := self.reason_unavailable():
                raise ApiError(503, reason)
            self._scheduler.admit(job)
        except ApiError:
            job.record.outcome = "rejected"
            self._scheduler.metrics.observe_end(job.record)
            raise

    def submit(self, job: Job, request: GenerationRequest) -> None:
        """Read a request and put it into the queue, which may take long; an error becomes its last event."""

        def is_wanted() -> bool:
            return not (job.is_cancelled or self._scheduler.is_stopping)

        try:
            if request.hands_over and self._executor.offers is None:
                message = "this server does not transfer KV: it was started without --kv-transfer"
                raise ApiError(400, message, param="kv_transfer_params")
            job.read = self.reader.read(request, job.files, is_wanted)
            sampling = job.read.order.sampling
            job.record.sampling = {
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
            }
            is_ready = self._scheduler.make_ready(job)
        except ApiError as error:
            if is_wanted():
                return self._scheduler.end(job, error, "invalid" if error.status < 500 else "failed")
            is_ready = False
        except Exception as error:
            return self._scheduler.end(job, ApiError(500, f"cannot read the request: {error}"), "failed")
        if not is_ready:
            outcome = "cancelled" if job.is_cancelled else "rejected"
            self._scheduler.end(job, ApiError(503, "the server is stopping"), outcome)

    def finish(self, seconds: float) -> None:
        """Reject waiting and new requests, finish the running ones, and shut down all hosts.

        This includes waiting until exported KV has been fetched. After ``seconds``, running requests are aborted.
        """
        self._scheduler.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._scheduler.cut_short()
        self._thread.join()

    def _run(self) -> None:
        device = self._executor.hosts.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with self._decoding or nullcontext():
                while self._step():
                    pass
        except BaseException as error:
            self.failure = error
        finally:
            self._scheduler.close(None if self.failure is None else "a host has failed")
            self._on_end()

    def _step(self) -> bool:
        """Carry out the next request, or send an idle command; False after shutdown."""
        job = self._scheduler.take(_IDLE_SECONDS)
        if self._decoding is not None and self._decoding.failure is not None:
            raise self._decoding.failure
        has_stopped = job is None and self._scheduler.has_stopped
        if job is None:
            if (num_bytes := self._scheduler.bytes_wanted()) and self._executor.offers is not None:
                self._executor.offers.make_room(num_bytes)  # by requests that have waited for long
            self._send_command(LEAVE if has_stopped else WAIT)
        else:
            self._is_busy = True
            self._carry_out(job)
        self._last_step_at, self._is_busy = time.monotonic(), False
        return not has_stopped

    def _send_command(self, command: int) -> None:
        if exchange_commands(self._executor.hosts, command, False)[1] and command != LEAVE:
            self._on_stop()

    def _carry_out(self, job: Job) -> None:
        """Carry out a request to its end, or until the other thread decodes it."""
        try:
            goes_on = self._lead(job)
        except RequestCancelled:
            self._scheduler.end(job, None, "cancelled")
        except Exception as error:
            if not self._executor.is_usable:
                raise
            # All hosts have rejected alike: the request is to blame, the model or the engine.
            if isinstance(error, (ValueError, HostError)) and not isinstance(error, AgreedError):
                refusal = ApiError(400, client_message(error, job.read.media), param=job.read.request.prompt_field)
                self._scheduler.end(job, refusal, "invalid")
            else:
                self._scheduler.end(job, ApiError(500, f"{type(error).__name__}: {error}"), "failed")
        else:
            if goes_on:
                return
        self._scheduler.release(job)

    def _lead(self, job: Job) -> bool:
        """Lead all hosts through a request; return whether the other thread decodes its answers."""
        executor, order, media = self._executor, job.read.order, job.read.media
        hosts, sent = executor.hosts, []
        if hosts.num_processes > 1:
            try:
                sent = [file.path.read_bytes() for file in media if file.relative is None]
            except OSError as error:
                raise RuntimeError(f"cannot read a temporary file: {error.strerror}") from error
        command = HAND_OVER if order.hands_over else ANSWER if self._decoding is None else PREFILL
        self._send_command(command)
        hosts.broadcast_bytes(order.to_json())
        for data in sent:
            hosts.broadcast_bytes(data)
        decode = self._decoding.decode if command == PREFILL else self._decode
        tellings = [Telling(job, self._scheduler, decode, choice) for choice in range(order.num_answers)]

        def open_files(_: ExitStack) -> list[Path]:
            return [file.path for file in media]

        done = executor.carry_out(command, order, open_files, tellings[0].asked, job.read.prompt)
        if command == PREFILL:
            self._decoding.add(job, *done, tellings)
        elif command == HAND_OVER:
            self._hand_over(job, done, tellings[0])
        else:
            job.record.speculation = done.stats["speculation"]
            tellings[0].finish(done.token_ids, done.finish_reason)
        return command == PREFILL

    def _hand_over(self, job: Job, handed: HandedOver, telling: Telling) -> None:
        """Send a client its KV ticket, or drop the KV if the client has disconnected."""
        ticket = handed.ticket
        self._scheduler.hold_offer(ticket.transfer, ticket.num_bytes)
        job.record.transfer = ticket.transfer
        if not telling.finish([handed.token], handed.reason, ticket.to_params()):
            self._executor.offers.drop(ticket.transfer)
