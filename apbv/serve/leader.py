"""This module leads all hosts through the requests, in a thread of host 0: one after the other up to their KV."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from ..hosts import AgreedError, HostError
from ..prefilling.prefiller import RequestCancelled
from .decoding import Decoding, Prefilled
from .executor import ANSWER, HAND_OVER, LEAVE, PREFILL, WAIT, Executor, HandedOver, exchange_commands
from .job import Job
from .ledger import Ledger
from .protocol import ApiError
from .reading import client_message
from .telling import Telling, text_of

# Seconds without a request after which host 0 tells the others that there is none. This is less than what hosts
# wait for at a time, so that a wait between two requests is a single one.
_IDLE_SECONDS = 0.5


class Leader:
    """A Leader is a thread that takes requests from the ledger, and has all hosts carry them out together.

    Every exchange between hosts happens in this thread. It prefills prompts one after the other, in the order in
    which their requests became ready, and meanwhile another thread decodes; where answers cannot be decoded in one
    batch, it decodes each before it takes the next.

    Args:
        decoding: decodes the answers; None: all hosts answer together, one request at a time.
        on_stop: called when another host was asked to end.
        on_end: called when the thread has ended.

    Attributes:
        failure: the error that ended the thread before it was told to.
    """

    def __init__(
        self,
        executor: Executor,
        ledger: Ledger,
        decoding: Decoding | None,
        on_stop: Callable[[], None],
        on_end: Callable[[], None],
    ):
        self._executor, self._ledger, self._decoding = executor, ledger, decoding
        self._on_stop, self._on_end = on_stop, on_end
        self._decode = text_of(executor.engine.tokenizer)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        self._last_step_at, self._is_busy = time.monotonic(), False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def seconds_idle(self) -> float:
        """The seconds since the hosts last answered, while they have nothing to do; 0 while they have."""
        return 0.0 if self._is_busy else time.monotonic() - self._last_step_at

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread to end, which it does once the ledger has stopped."""
        self._thread.join(seconds)

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
            left = self._ledger.close()
            reason = "the server is stopping" if self.failure is None else "a host has failed"
            for job in left:
                self._ledger.end(job, ApiError(503, reason), "failed" if self.failure else "rejected")
            self._on_end()

    def _step(self) -> bool:
        """Carry out the next request, or tell the other hosts that there is none; False once they have left."""
        job = self._ledger.take(_IDLE_SECONDS)
        if self._decoding is not None and self._decoding.failure is not None:
            raise self._decoding.failure
        has_stopped = job is None and self._ledger.has_stopped
        if job is None:
            if num_bytes := self._ledger.bytes_wanted():
                self._executor.make_room(num_bytes)
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
        """Carry out a request up to its end, or to where the other thread decodes it."""
        try:
            prefilled = self._lead(job)
        except RequestCancelled:
            self._ledger.end(job, None, "cancelled")
        except Exception as error:
            if not self._executor.is_usable:
                raise
            # All hosts have refused alike: the request is to blame, the model or the engine.
            if isinstance(error, (ValueError, HostError)) and not isinstance(error, AgreedError):
                refusal = ApiError(400, client_message(error, job.read.media), param=job.read.prompt_field)
                self._ledger.end(job, refusal, "invalid")
            else:
                self._ledger.end(job, ApiError(500, f"{type(error).__name__}: {error}"), "failed")
        else:
            if prefilled is not None:
                return self._decoding.add(prefilled)
        self._ledger.release(job)

    def _lead(self, job: Job) -> Prefilled | None:
        """Have all hosts carry out a request; return what the other thread is to decode."""
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
        telling = Telling(job, self._ledger, decode)

        def open_files(_: ExitStack) -> list[Path]:
            return [file.path for file in media]

        if command == PREFILL:
            return Prefilled(job, *executor.prefill(order, open_files, telling.stop), telling)
        if command == HAND_OVER:
            self._hand_over(job, executor.hand_over(order, open_files, telling.stop), telling)
            return None
        result = executor.answer(order, open_files, telling.stop)
        job.speculation = result.stats["speculation"]
        telling.finish(result.token_ids, result.finish_reason)
        return None

    def _hand_over(self, job: Job, handed: HandedOver, telling: Telling) -> None:
        """Tell a client where the KV is that waits for it, or drop it where the client has gone."""
        ticket = handed.ticket
        self._ledger.hold_offer(ticket.transfer, ticket.num_bytes)
        job.transfer = ticket.transfer
        if not telling.finish([handed.token], handed.reason, ticket.to_params()):
            self._executor.offers.drop(ticket.transfer)
