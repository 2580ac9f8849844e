"""Telling a request's client what becomes of its answer, token by token."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from .job import Finished, Job, Piece
from .requests import FinishReason
from .scheduler import Scheduler


class Telling:
    """Sends the text of one answer to its client as it grows, and at last how it ended.

    Args:
        decode: token ids to text, as of :func:`text_of`; called in the thread that calls this.
    """

    def __init__(self, job: Job, scheduler: Scheduler, decode: Callable[[Sequence[int]], str]):
        self._job, self._scheduler = job, scheduler
        self._text, self._told = job.read.answer_text(decode), 0
        # Nobody needs the text of an unfinished answer that is not streamed, unless something in it may end it.
        self._reads_along = job.is_streamed or self._text.may_stop

    def stop(self, tokens: Sequence[int]) -> bool:
        """Take in all tokens so far; returns whether the answer is to end here."""
        job = self._job
        if tokens and not job.is_cancelled:
            self._note(len(tokens))
            if self._reads_along:
                self._tell(self._text.update(tokens), tokens)
        return job.is_cancelled or self._text.stopped

    def finish(self, tokens: Sequence[int], reason: FinishReason, kv_params: dict[str, Any] | None = None) -> bool:
        """End the request with its answer; False if it had ended, or its client had gone.

        Args:
            tokens: all tokens.
            reason: why there are no more, if no stop string is among them.
            kv_params: as in :class:`.job.Finished`.
        """
        job = self._job
        if job.is_cancelled:
            self._scheduler.end(job, None, "cancelled")
            return False
        self._note(len(tokens))
        self._tell(self._text.finish(tokens), tokens)
        reason = "stop" if self._text.stopped else reason
        last = Finished(reason, len(tokens), list(tokens[self._told :]), kv_params)
        return self._scheduler.end(job, last, reason)

    def _tell(self, text: str, tokens: Sequence[int]) -> None:
        """Send some text and the tokens that have come; a stream hears of tokens that have no text, too."""
        if text or (self._job.is_streamed and len(tokens) > self._told):
            self._job.send(Piece(text, list(tokens[self._told :])))
            self._told = len(tokens)

    def _note(self, num_tokens: int) -> None:
        """Note when the tokens came that are new."""
        record, now = self._job.record, time.monotonic()
        if num_tokens == record.completion_tokens:
            return
        if record.first_token is None:
            record.first_token, record.prompt_tokens = now, self._job.read.num_tokens
        else:
            self._scheduler.metrics.observe_token_gap(now - record.last_token)
        record.last_token, record.completion_tokens = now, num_tokens


def text_of(tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text without special tokens; one thread at a time may call it."""

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    return decode
