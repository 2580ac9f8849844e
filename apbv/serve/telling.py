"""Streams an answer to a request's client, token by token."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..input.request import Request
from ..logprobs import TokenLogprobs
from .job import Finished, Job, Piece
from .requests import FinishReason
from .scheduler import Scheduler
from .text import AnswerText


class Telling:
    """Streams the text of one answer to its client, and finally the finish reason.

    Args:
        decode: token ids to text; called in the caller's thread.
        choice: the index of the request's answer.
    """

    def __init__(self, job: Job, scheduler: Scheduler, decode: Callable[..., str], choice: int = 0):
        self._job, self._scheduler, self._decode, self._choice = job, scheduler, decode, choice
        asked, least = job.read.request, job.read.order.sampling.min_tokens
        to_text = partial(decode, skip_special_tokens=True)
        self._text = AnswerText(to_text, asked.stop_strings, asked.stop_token_ids or [], least)
        self._told = 0
        self._logprobs: list[TokenLogprobs] = []
        self._num_noted, self._last_at = 0, 0.0
        # The text of an unfinished answer is needed only for streaming and for stop strings.
        self._reads_along = asked.stream or self._text.may_stop

    def asked(self, request: Request) -> Request:
        """Return a request for this answer alone."""
        sampling = request.sampling
        own = replace(sampling, seed=(sampling.seed + self._choice) % 2**64)
        return replace(request, sampling=own, stop=self.stop, logprobs=self._logprobs)

    def stop(self, tokens: Sequence[int]) -> bool:
        """Process all tokens so far; return whether the answer must end here."""
        job = self._job
        if tokens and not job.is_cancelled:
            self._note(len(tokens))
            if self._reads_along:
                text = self._text.update(tokens)
                # Streams also get tokens without text.
                if text or (job.read.request.stream and len(tokens) > self._told):
                    self._send(text, tokens)
        return job.is_cancelled or self._text.stopped

    def finish(self, tokens: Sequence[int], reason: FinishReason, kv_params: dict[str, Any] | None = None) -> bool:
        """End the answer, and with the last one the request; False if that had already ended.

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
        text = self._text.finish(tokens)
        reason = "stop" if self._text.stopped else reason
        self._send(text, tokens, reason)
        job.num_finished += 1
        if job.num_finished < job.read.order.num_answers:
            return True
        return self._scheduler.end(job, Finished(job.record.completion_tokens, kv_params), reason)

    def _send(self, text: str, tokens: Sequence[int], reason: FinishReason | None = None) -> None:
        new = slice(self._told, len(tokens))
        logprobs = [
            (self._spelt(token), told.logprob, [(self._spelt(other), value) for other, value in told.top])
            for token, told in zip(tokens[new], self._logprobs[new], strict=False)
        ]
        self._job.send(Piece(text, list(tokens[new]), self._choice, reason, logprobs))
        self._told = len(tokens)

    def _spelt(self, token: int) -> str:
        return self._decode([token], skip_special_tokens=False)

    def _note(self, num_tokens: int) -> None:
        """Record the arrival time of new tokens."""
        record, now = self._job.record, time.monotonic()
        if num_tokens == self._num_noted:
            return
        if self._num_noted:
            self._scheduler.metrics.observe_token_gap(now - self._last_at)
        elif record.first_token is None:
            record.first_token, record.prompt_tokens = now, self._job.read.num_tokens
        record.completion_tokens += num_tokens - self._num_noted
        self._num_noted, self._last_at, record.last_token = num_tokens, now, now
