"""Continuous batching: decodes answers in a thread of host 0, concurrently with the prefill thread."""

import copy
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import replace

import torch

from ..decode.batch import Batch, Member
from ..engine import Engine
from ..input.request import Request
from ..model.attention import apbv_attention
from ..prefilling.result import PrefillResult
from .job import Job
from .requests import ApiError
from .scheduler import Scheduler
from .telling import Telling


class Decoding:
    """Decodes all answers whose prompts are prefilled, in a thread, as one batch.

    An answer joins the batch before its next step, and leaves it when it ends or its client disconnects. The
    thread lives inside a ``with`` block, in which apbv's attention is in force for all threads.

    Attributes:
        decode: token ids to text, in this thread.
        failure: the error that ended the thread prematurely.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler):
        self._parts, self._scheduler = engine.parts, scheduler
        # A tokenizer must not be used by two threads at once.
        self.decode = copy.deepcopy(engine.tokenizer).decode
        self._arrivals: deque[tuple[Job, Request, PrefillResult, list[Telling]]] = deque()
        self._members: dict[Member, tuple[Job, Telling]] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._attention = ExitStack()
        self.failure: BaseException | None = None

    def __enter__(self) -> "Decoding":
        self._attention.enter_context(apbv_attention(self._parts.language_model))
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Stop the thread after the current step; unfinished answers are dropped."""
        with self._scheduler.changed:
            self._is_closing = True
            self._scheduler.changed.notify_all()
        self._thread.join()
        self._attention.close()

    def add(self, job: Job, request: Request, state: PrefillResult, tellings: list[Telling]) -> None:
        """Add a prefilled job's answers; from then on this thread ends the job, and releases its KV.

        Args:
            state: the prompt's, with its KV on this host.
            tellings: of each answer.
        """
        with self._scheduler.changed:
            self._arrivals.append((job, request, state, tellings))
            self._scheduler.changed.notify_all()

    def _run(self) -> None:
        try:
            if self._parts.device.type == "cuda":
                torch.cuda.set_device(self._parts.device)
            batch = Batch(self._parts)
            while self._admit(batch):
                if failure := self._step(batch):
                    batch = Batch(self._parts)  # which also frees the KV that a failed step left
                    jobs = {job for job, _ in self._members.values()}
                    self._members.clear()
                    for job in jobs:
                        self._fail(job, failure)
        except BaseException as error:
            self.failure = error
            with self._scheduler.changed:
                self._scheduler.changed.notify_all()

    def _admit(self, batch: Batch) -> bool:
        """Wait until there is something to decode, and add arrivals; False at shutdown."""
        with self._scheduler.changed:
            self._scheduler.changed.wait_for(lambda: self._arrivals or self._members or self._is_closing)
            arrivals, self._arrivals = self._arrivals, deque()
            if self._is_closing:
                return False
        while arrivals:
            self._join(batch, *arrivals.popleft())
        return True

    def _join(
        self, batch: Batch, job: Job, request: Request, state: PrefillResult, tellings: list[Telling]
    ) -> None:
        """Add a job's answers to the batch; the job fails alone if its KV cannot grow."""
        try:
            for telling in tellings:
                self._members[batch.join(state, telling.asked(request))] = job, telling
                state = replace(state, kv=state.kv.behind(state.layout))  # which the next answer copies
        except Exception as error:
            self._fail(job, _in_words(error))

    def _step(self, batch: Batch) -> str | None:
        """Decode the next token of every answer, and end the finished ones.

        Returns:
            Why no answer got a token; None if all did, except those that failed alone.
        """
        for member, (job, _) in list(self._members.items()):
            if job.is_cancelled:
                batch.leave(member)
                self._end(member)
        if self._members:
            try:
                batch.step()
            except Exception as error:
                return _in_words(error)
        for member in [member for member in self._members if member.has_ended]:
            self._end(member)
        return None

    def _end(self, member: Member) -> None:
        """End an answer, and with the last one of a request release its KV."""
        (job, telling), failure = self._members.pop(member), None if member.error is None else str(member.error)
        if failure is None:
            try:
                telling.finish(member.tokens, member.finish_reason)
            except Exception as error:
                failure = _in_words(error)
        if failure is not None:
            self._fail(job, failure)
        elif all(job is not other for other, _ in self._members.values()):
            self._scheduler.release(job)

    def _fail(self, job: Job, failure: str) -> None:
        """Fail a request; its other answers leave the batch with the next step."""
        self._scheduler.end(job, ApiError(500, failure), "failed")
        job.is_cancelled = True
        if all(job is not other for other, _ in self._members.values()):
            self._scheduler.release(job)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
