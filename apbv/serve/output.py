"""Where the tokens, ends and failures of a request's answers go, from the host that decodes them."""

import time
from typing import Protocol

from .job import Finished, Job, Piece
from .requests import ApiError
from .scheduler import Scheduler


class Output(Protocol):
    """Interface of a request to the thread that decodes its answers.

    Attributes:
        is_cancelled: whether its answers are not wanted any more.
    """

    is_cancelled: bool

    def tell(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        """Report an answer's new tokens.

        Args:
            choice: the index of the request's answer.
            num_tokens: its tokens so far.
            piece: the next piece of its text, of which one with a reason is the last; None: there is none yet.

        Returns:
            False if the request is known to have ended before.
        """

    def fail(self, failure: str) -> None:
        """End the request with an error; its other answers are not wanted any more."""

    def release(self) -> None:
        """Report that the request holds no KV any more. This is the last call."""


class JobOutput:
    """Output of a request on host 0: its client, its record and the metrics.

    Args:
        job: the request, which runs.

    Attributes:
        kv_params: the ``kv_transfer_params`` of its reply.
    """

    def __init__(self, job: Job, scheduler: Scheduler):
        self._job, self._scheduler = job, scheduler
        self._newest: dict[int, tuple[int, float]] = {}  # of each answer: its number of tokens, and since when
        self._num_finished, self.kv_params = 0, None

    @property
    def is_cancelled(self) -> bool:
        return self._job.is_cancelled

    def tell(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        job = self._job
        if job.is_cancelled:
            return False
        self._note(choice, num_tokens)
        if piece is None:
            return True
        job.send(piece)
        self._num_finished += piece.reason is not None
        if piece.reason is None or self._num_finished < job.read.order.num_answers:
            return True
        return self._scheduler.end(job, Finished(job.record.completion_tokens, self.kv_params), piece.reason)

    def fail(self, failure: str) -> None:
        self._scheduler.end(self._job, ApiError(500, failure), "failed")
        self._job.is_cancelled = True

    def release(self) -> None:
        if self._job.is_cancelled:
            self._scheduler.end(self._job, None, "cancelled")
        self._scheduler.release(self._job)

    def _note(self, choice: int, num_tokens: int) -> None:
        """Record the arrival of new tokens, by this host's clock."""
        record, now = self._job.record, time.monotonic()
        before, last_at = self._newest.get(choice, (0, 0.0))
        if num_tokens == before:
            return
        if before:
            self._scheduler.metrics.observe_token_gap(now - last_at)
        elif record.first_token is None:
            record.first_token, record.prompt_tokens = now, self._job.read.num_tokens
        record.completion_tokens += num_tokens - before
        self._newest[choice], record.last_token = (num_tokens, now), now
