"""Continuous batching: decodes a host's share of the answers in a thread.

It runs concurrently with the host's prefill thread.
"""

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from ...decode.answer import begin_answer
from ...decode.batch import Batch, Member
from ...engine import Engine
from ...speculate.loops.decode_loop import PrefilledRequest
from ...speculate.loops.speculative_batch import join_batch
from .answer_stream import AnswerStream
from .output import AnswerOutput, Failure
from .work_order import WorkOrder

# Where both threads share a core, the prefill goes first: in every layer the other hosts wait for
# it.
_NICENESS = 10


# A prefilled request, or why its prefill failed; None: its client has left.
Arrival = PrefilledRequest | Failure | None


class DecodeThread:
    """Decodes all answers whose decode host is this host, in a thread, as one batch.

    Their prompts are prefilled.

    An answer joins the batch before its next step, and leaves it when it ends or its client
    disconnects. The thread lives inside a ``with`` block, in which apbv's attention is in force for
    all threads.

    Args:
        on_step: called in the thread after the outputs got a step's tokens.

    Attributes:
        failure: the error that ended the thread prematurely.
    """

    def __init__(self, engine: Engine, on_step: Callable[[], None] = lambda: None):
        self._engine = engine
        self._on_step = on_step
        # A tokenizer must not be used by two threads at once.
        self._decode = copy.deepcopy(engine.tokenizer).decode
        self._arrivals: deque[tuple[AnswerOutput, WorkOrder, Arrival]] = deque()
        self._members: dict[Member, tuple[AnswerOutput, AnswerStream]] = {}  # the youngest last
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._attention = ExitStack()
        self.failure: BaseException | None = None

    def __enter__(self) -> "DecodeThread":
        self._attention.enter_context(self._engine.attention())
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Stop the thread after the current step; unfinished answers are dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._attention.close()

    def add(self, output: AnswerOutput, order: WorkOrder, arrival: Arrival) -> None:
        """Add the answers of a prefilled request.

        From then on this thread ends it, and releases its KV.

        Args:
            arrival: the request, with its KV on this host; or how its prefill ended.
        """
        with self._changed:
            self._arrivals.append((output, order, arrival))
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # elsewhere threads have no priority of their own
                with suppress(OSError):  # where a sandbox forbids it
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            with self._engine.hosts.on_device():
                batch = self._engine.batch()
                while self._admit(batch):
                    self._step(batch)
                    self._on_step()
        except BaseException as error:
            self.failure = error

    def _admit(self, batch: Batch) -> bool:
        """Wait until there is something to decode, and add arrivals; False at shutdown."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrivals or self._members or self._is_closing)
            arrivals = self._arrivals
            self._arrivals = deque()
            if self._is_closing:
                return False
        while arrivals:
            self._join(batch, *arrivals.popleft())
        return True

    def _join(
        self,
        batch: Batch,
        output: AnswerOutput,
        order: WorkOrder,
        arrival: Arrival,
    ) -> None:
        """Add a request's answers to the batch, the first with its draft.

        It fails alone if its KV cannot grow.
        """
        try:
            if isinstance(arrival, PrefilledRequest):
                self._join_all(batch, output, order, arrival)
                return
            if arrival is not None:
                output.fail_with(arrival)
        except Exception as error:
            output.fail(error)
        self._release(output)

    def _join_all(
        self, batch: Batch, output: AnswerOutput, order: WorkOrder, begun: PrefilledRequest
    ) -> None:
        """Add all answers of a prefilled request to the batch."""
        state = begun.state
        draft = begun.draft
        for choice in range(order.reply.num_answers):
            stream = AnswerStream(output, order, self._decode, choice)
            request = stream.request_for_answer(begun.read.request)
            answer = begin_answer(self._engine.parts, state, request)
            member = join_batch(batch, answer, draft)
            self._members[member] = (output, stream)
            # The next answer copies the KV, and has no draft.
            state = replace(state, kv=state.kv.behind(state.layout))
            draft = None

    def _step(self, batch: Batch) -> None:
        """Decode the next token of every answer, and end the finished ones."""
        for member, (output, _) in list(self._members.items()):
            if output.is_cancelled:
                batch.leave(member)
                self._end(member)
        if self._members:
            batch.step_or_drop()
        for member in [member for member in self._members if member.has_ended]:
            self._end(member)

    def _end(self, member: Member) -> None:
        """End an answer, and with the last one of a request release its KV."""
        output, stream = self._members.pop(member)
        failure = member.error
        reason = member.finish_reason
        # An answer that was aborted has neither.
        if failure is None and reason is not None:
            try:
                stream.finish(member.tokens, member.logprobs, reason, member.summary())
            except Exception as error:
                failure = error
        if failure is not None:
            output.fail(failure)
        self._release(output)

    def _release(self, output: AnswerOutput) -> None:
        """Count a request's KV as free if no answer of it is left.

        A failed one's leave with the next step.
        """
        if all(output is not other for other, _ in self._members.values()):
            output.release()
