"""Where the tokens, ends and failures of a request's answers go, from the host that decodes
them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import FAULT_HTTP_STATUS, ApbvError, RequestCancelled, as_kind, describe_error
from ..api_error import ApiError
from ..media.files import client_message
from .job import Finished, Job, Piece
from .scheduler import Scheduler

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a request failed, as its client is told.

    Attributes:
        status: the HTTP status.
        message: the error's message.
    """

    status: int
    message: str

    @property
    def is_invalid(self) -> bool:
        """Whether the request is to blame, not the server."""
        return self.status < 500


def failure_of(error: BaseException, request_id: str) -> Failure:
    """Return the status and the message for a client.

    A fault of this package is logged with its traceback.

    Args:
        error: what the request ended with on this host.
        request_id: the id of the request in its reply and in the log.
    """
    known = as_kind(error)
    if isinstance(known, ApbvError):
        status = known.http_status
        message = str(known) or type(known).__name__
    else:
        _logger.error("%s failed on this host", request_id, exc_info=error)
        status = FAULT_HTTP_STATUS
        message = describe_error(error)
    if status == FAULT_HTTP_STATUS:
        message = f"{message} (request {request_id})"
    return Failure(status, message)


def failure_unless_cancelled(error: BaseException, request_id: str) -> Failure | None:
    """Return a failure as :func:`failure_of` does; None where a client has left."""
    return None if isinstance(error, RequestCancelled) else failure_of(error, request_id)


class AnswerOutput(Protocol):
    """The output of a request on the host that decodes its answers.

    Attributes:
        request_id: the id of the request in its reply and in the log.
    """

    request_id: str

    @property
    def is_cancelled(self) -> bool:
        """Whether no more of the request is wanted."""

    def add_tokens(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        """Send an answer's next piece; see :meth:`JobOutput.add_tokens`."""

    def note_draft(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of the request's draft, by their names."""

    def fail(self, error: BaseException) -> None:
        """End the request with an error; its other answers are not wanted any more."""

    def fail_with(self, failure: Failure) -> None:
        """End the request with an error that has become a failure."""

    def release(self) -> None:
        """Count the request's KV as free; one that has not ended was cancelled."""


class JobOutput:
    """Output of a request on host 0: its client, its record and the metrics.

    Args:
        job: the request, which runs.

    Attributes:
        request_id: the id of the request in its reply and in the log.
        kv_params: the ``kv_transfer_params`` of its reply.
        on_release: called when its KV is free.
    """

    def __init__(self, job: Job, scheduler: Scheduler):
        self.request_id = job.record.id
        self._job = job
        self._scheduler = scheduler
        # Of each answer: its number of tokens, and since when.
        self._newest: dict[int, tuple[int, float]] = {}
        self._num_finished = 0
        self.kv_params: dict[str, Any] | None = None
        self.on_release: Callable[[], object] = lambda: None

    @property
    def is_cancelled(self) -> bool:
        """Whether the request has ended, or its client has disconnected."""
        return self._job.is_cancelled or self._job.has_ended

    def add_tokens(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        """Send an answer's next piece, and note its new tokens.

        Args:
            choice: the index of the request's answer.
            num_tokens: its tokens so far.
            piece: one with a reason is the last, and the last of all answers ends the request;
                None: there is no new text yet.

        Returns:
            False if the request had ended.
        """
        job = self._job
        if self.is_cancelled:
            return False
        self._note(choice, num_tokens)
        if piece is None:
            return True
        job.send(piece)
        if piece.reason is None:
            return True
        self._num_finished += 1
        if self._num_finished < job.read.order.reply.num_answers:
            return True
        finished = Finished(job.record.completion_tokens, self.kv_params)
        return self._scheduler.end(job, finished, piece.reason)

    def note_draft(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of the request's draft, by their names."""
        self._job.record.speculation = metrics

    def fail(self, error: BaseException) -> None:
        """End the request with an error; its other answers are not wanted any more."""
        self.fail_with(failure_of(error, self.request_id))

    def fail_with(self, failure: Failure) -> None:
        """End the request with a failure, which may have happened on another host."""
        read = self._job.read
        message = client_message(failure.message, read.media)
        if failure.is_invalid:
            error = ApiError(failure.status, message, param=read.prompt_field)
            self._scheduler.end(self._job, error, "invalid")
        else:
            self._scheduler.end(self._job, ApiError(failure.status, message), "failed")

    def release(self) -> None:
        """Count the request's KV as free; one that has not ended was cancelled."""
        self._scheduler.end(self._job, None, "cancelled")
        self._scheduler.release(self._job)
        self.on_release()

    def _note(self, choice: int, num_tokens: int) -> None:
        """Record the arrival of new tokens, by this host's clock."""
        record = self._job.record
        now = time.monotonic()
        before, last_at = self._newest.get(choice, (0, 0.0))
        if num_tokens == before:
            return
        if before:
            self._scheduler.metrics.observe_token_gap(now - last_at)
        elif record.first_token is None:
            with self._scheduler.changed:  # its decode host may prefill another
                record.first_token = now
                record.prompt_tokens = self._job.read.num_tokens
                self._scheduler.changed.notify_all()
        record.completion_tokens += num_tokens - before
        self._newest[choice] = (num_tokens, now)
        record.last_token = now
