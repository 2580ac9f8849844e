"""Where the tokens, ends and failures of a request's answers go.

They come from the host that decodes them.
"""

import time
from typing import Any

from ..hosts import AgreedError, HostError
from ..hosts.exchange import describe_error
from .job import Finished, Job, Piece
from .request_reader import client_message
from .requests import ApiError
from .scheduler import Scheduler


def failure_of(error: Exception) -> tuple[str, bool]:
    """Return why a request failed, and whether the request is to blame.

    If it is not, model or engine are.
    """
    is_invalid = isinstance(error, (ValueError, HostError)) and not isinstance(error, AgreedError)
    if is_invalid and str(error):
        return str(error), True
    return describe_error(error), is_invalid


class JobOutput:
    """Output of a request on host 0: its client, its record and the metrics.

    Args:
        job: the request, which runs.

    Attributes:
        kv_params: the ``kv_transfer_params`` of its reply.
        on_release: called when its KV is free.
    """

    def __init__(self, job: Job, scheduler: Scheduler):
        self._job = job
        self._scheduler = scheduler
        # Of each answer: its number of tokens, and since when.
        self._newest: dict[int, tuple[int, float]] = {}
        self._num_finished = 0
        self.kv_params = None
        self.on_release = lambda: None

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
        if self._num_finished < job.read.order.num_answers:
            return True
        finished = Finished(job.record.completion_tokens, self.kv_params)
        return self._scheduler.end(job, finished, piece.reason)

    def note_draft(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of the request's draft, by their names."""
        self._job.record.speculation = metrics

    def fail(self, failure: str, is_invalid: bool = False) -> None:
        """End the request with an error; its other answers are not wanted any more.

        Args:
            failure, is_invalid: as of :func:`failure_of`.
        """
        if not is_invalid:
            self._scheduler.end(self._job, ApiError(500, failure), "failed")
            return
        read = self._job.read
        message = client_message(failure, read.media)
        error = ApiError(400, message, param=read.request.prompt_field)
        self._scheduler.end(self._job, error, "invalid")

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
