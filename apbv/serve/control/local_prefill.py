"""Prefills short prompts on their decode host alone, beside what all hosts prefill together."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...engine import Engine
from ...input.prompts.tokenized_prompt import TokenizedPrompt
from ...request.sink import StopFunction
from .decode_thread import Arrival, DecodeThread
from .output import AnswerOutput, failure_unless_cancelled
from .work_order import WorkOrder

# Multiple of a short prompt's CPU time for which its thread rests beside a long prompt, so that
# this takes at most a fifth longer: two threads have at most 1/21 of the time each; decoding and
# HTTP cost twice as much again. But a rest longer than this many seconds is as short as a sixth of
# the time for the thread allows: who is next waits.
REST = 20
LONG_REST = 1.0
SHORTEST_REST = 5


class Lane(NamedTuple):
    """A thread that prefills, and the engine that it has."""

    engine: Engine
    pool: ThreadPoolExecutor


class LocalPrefillPool:
    """Prefills short prompts on this host, texts in one thread, and prompts with files in another.

    So a text waits neither for files that take long to decode, nor for what all hosts prefill; but
    it leaves most of the time to them. The threads live inside a ``with`` block.

    Args:
        engine: of all hosts; where it cannot work alone, nothing is to be prefilled.
        decoding: gets what is prefilled.
    """

    def __init__(self, engine: Engine, decoding: DecodeThread | None):
        self._engine = engine
        self._decoding = decoding
        self._stack = ExitStack()
        self._text_lane: Lane | None = None
        self._file_lane: Lane | None = None
        # Of those that the others give way to.
        self._num_long = 0
        self._changed = threading.Condition()

    def __enter__(self) -> "LocalPrefillPool":
        if self._engine.can_work_alone:
            self._stack.enter_context(self._engine.prefilling_in_threads())
            self._text_lane = self._open_lane("prefilling texts")
            self._file_lane = self._open_lane("prefilling files")
        return self

    def _open_lane(self, name: str) -> Lane:
        """Start a thread with an engine of its own, until this pool is closed."""
        pool = ThreadPoolExecutor(1, name)
        self._stack.callback(pool.shutdown, cancel_futures=True)
        return Lane(self._engine.alone(), pool)

    def __exit__(self, *_) -> None:
        """Stop the threads after their current prompts; those that wait are dropped."""
        self._stack.close()

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Leave most of the time to what this host does in the block."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_long += change
            self._changed.notify_all()

    def prefill(
        self,
        order: WorkOrder,
        output: AnswerOutput,
        files: AbstractContextManager[Sequence[Path]],
        prompt: TokenizedPrompt | None = None,
    ) -> None:
        """Prefill a prompt in a thread, and hand it, or the error, to the decoding thread.

        Args:
            files: provides this host's paths of the order's files.
            prompt: the part of the question that this host has already read.
        """
        lane = self._file_lane if order.files else self._text_lane
        decoding = self._decoding
        assert lane is not None, "this host prefills nothing alone"
        assert decoding is not None, "this host decodes nothing alone"
        engine = lane.engine
        # Texts do not wait for files.
        precedence: AbstractContextManager[None] = nullcontext()
        if order.files:
            precedence = self.giving_way()

        def run() -> None:
            began = time.thread_time()
            done: Arrival
            try:
                with files as paths, precedence, engine.hosts.on_device():
                    request = order.request(engine.hosts, paths, prompt)
                    sink = StopFunction(lambda _: output.is_cancelled)
                    done = engine.begin(replace(request, sink=sink))
            except Exception as error:
                done = failure_unless_cancelled(error, output.request_id)
            decoding.add(output, order, done)
            del done  # its KV is not needed here
            spent = time.thread_time() - began
            with self._changed:
                rest = min(REST * spent, max(LONG_REST, SHORTEST_REST * spent))
                self._changed.wait_for(lambda: not self._num_long, rest)

        lane.pool.submit(run)
