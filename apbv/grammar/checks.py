"""Checks grammars in another process before they are compiled in this one.

Some of a few hundred characters would take hours to compile, and all memory, and nothing in this
process could stop that. The other process (:mod:`.check_process`) starts with the first check, and
ends with this one.
"""

import json
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from .check_process import STARTED

_SCRIPT = Path(__file__).with_name("check_process.py")
_MEMORY_BYTES = 2**28  # the limit of a check
_NUM_VERDICTS = 1024  # remembered verdicts
_POLL_SECONDS = 0.1  # between two looks at whether a verdict is still wanted
_MAX_STARTS = 2  # starts of the other process for a check that it did not begin
_BUSY = "too many JSON schemas and grammars are being checked; try again later"
_TOO_COMPLEX = "is too complex: it takes too long, or too much memory, to compile"


class GrammarCheckError(RuntimeError):
    """Raised where a grammar could not be checked, which is not its fault."""


class GrammarChecksBusyError(GrammarCheckError):
    """Raised where too many other grammars are being checked."""


@dataclass(frozen=True)
class Lane:
    """Checks with the same time limit.

    Attributes:
        cpu_seconds: the limit.
        places: places of checks that run at once, beside all else that the CPU has to do.
        queue: places of checks that run or wait.
        max_wait: seconds to wait for a place to run.
    """

    cpu_seconds: float
    places: threading.Semaphore
    queue: threading.Semaphore
    max_wait: float


class GrammarChecks:
    """Checks grammars for one tokenizer; any thread may call it.

    Grammars that take longer than a moment are checked again in a second lane, so that nobody waits
    long for the many that do not. Verdicts are remembered.

    Args:
        tokenizer: the JSON of the tokenizers library.
        vocab_size: the number of the model's logits.
        eos_tokens: tokens that are allowed once an answer is complete; None: the tokenizer's own.

    Attributes:
        lanes: the limits, the lane of the quickest checks first.
        process: the other process; None: no check has started it.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_tokens: list[int] | int | None):
        description = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_tokens": eos_tokens}
        self._tokenizer_description = json.dumps(description).encode()
        quick = Lane(
            0.1, places=threading.Semaphore(4), queue=threading.Semaphore(32), max_wait=5.0
        )
        slow = Lane(2.0, places=threading.Semaphore(2), queue=threading.Semaphore(4), max_wait=5.0)
        self.lanes: Sequence[Lane] = (quick, slow)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()  # of the verdicts and the following attributes
        self.process: subprocess.Popen | None = None
        self._requests: socket.socket | None = None  # to the process; None: it has not started
        self._end: Callable[[], None] = lambda: None

    def reason_against(self, grammar: str, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Return why a grammar cannot be used, as the end of a sentence; empty if it can.

        Args:
            grammar: in the form that llguidance's ``LLMatcher`` takes.
            is_wanted: asked several times a second whether to go on.

        Raises:
            GrammarCheckError: the verdict is not wanted any more, or the other process does not
                start.
            GrammarChecksBusyError: too many others are being checked.
        """
        key = sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        reason = None
        for lane in self.lanes:
            reason = self._remembered(key)
            if reason is not None:
                return reason
            with _place_in(lane, is_wanted):
                # Another thread may have had the same grammar checked while this one waited.
                reason = self._remembered(key)
                if reason is None:
                    reason = self.check(grammar, lane.cpu_seconds, is_wanted)
            if reason is not None:
                break
        if reason is None:
            reason = _TOO_COMPLEX
        self._remember(key, reason)
        return reason

    def close(self) -> None:
        """End the other process, if it runs; the next check starts it again."""
        self._end()

    def _remembered(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def _remember(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._verdicts[key] = reason
            if len(self._verdicts) > _NUM_VERDICTS:
                self._verdicts.popitem(last=False)

    def check(self, grammar: str, cpu_seconds: float, is_wanted: Callable[[], bool]) -> str | None:
        """Return the other process's verdict; None if a limit ended the check."""
        request = {"grammar": grammar, "cpu_seconds": cpu_seconds, "memory_bytes": _MEMORY_BYTES}
        encoded = json.dumps(request).encode()
        for _ in range(_MAX_STARTS):
            requests = self._started()
            try:
                with _sent_channel(requests) as channel:
                    reply = _reply_of(channel, encoded, is_wanted)
            except OSError:
                reply = b""
            if reply:
                verdict = reply.removeprefix(STARTED)
                return json.loads(verdict) if verdict else None
            self._restart_after(requests)
        raise GrammarCheckError("the process that checks JSON schemas and grammars does not work")

    def _started(self) -> socket.socket:
        """Return the socket to the other process, which is started if there is none.

        Raises:
            GrammarCheckError: it cannot be started.
        """
        with self._lock:
            if self._requests is not None:
                return self._requests
            ours, theirs = socket.socketpair()
            # Without the script's own folder on the path, where apbv's modules would hide others of
            # the same name.
            command = [sys.executable, "-P", str(_SCRIPT)]
            try:
                with theirs:
                    self.process = subprocess.Popen(
                        command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                    )
                with _sent_channel(ours) as channel:
                    channel.sendall(self._tokenizer_description)
            except OSError as error:
                ours.close()
                raise GrammarCheckError(
                    f"cannot check JSON schemas and grammars: {error}"
                ) from error
            self._requests = ours
            self._end = weakref.finalize(self, _end_process, ours, self.process)
            return ours

    def _restart_after(self, requests: socket.socket) -> None:
        """Forget a process that has ended, unless another thread did."""
        with self._lock:
            if self._requests is requests:
                self._requests = None
                self._end()


@contextmanager
def _place_in(lane: Lane, is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold a place in a lane.

    Raises:
        GrammarChecksBusyError: too many wait, or this one has waited too long, or is not wanted any
            more.
    """
    deadline = time.monotonic() + lane.max_wait
    if not lane.queue.acquire(blocking=False):
        raise GrammarChecksBusyError(_BUSY)
    try:
        while not lane.places.acquire(timeout=_POLL_SECONDS):
            if not is_wanted() or time.monotonic() > deadline:
                raise GrammarChecksBusyError(_BUSY)
        try:
            yield
        finally:
            lane.places.release()
    finally:
        lane.queue.release()


@contextmanager
def _sent_channel(requests: socket.socket) -> Iterator[socket.socket]:
    """Send one end of a new pair of sockets to the other process, and hold the other end."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(requests, [b"-"], [theirs.fileno()])
        yield ours


def _reply_of(channel: socket.socket, request: bytes, is_wanted: Callable[[], bool]) -> bytes:
    """Return a check's whole reply; nothing if the other process has ended before.

    Raises:
        GrammarCheckError: the verdict is not wanted any more; its process ends by itself.
    """
    channel.sendall(request)
    channel.shutdown(socket.SHUT_WR)
    channel.settimeout(_POLL_SECONDS)
    reply = b""
    while True:
        try:
            piece = channel.recv(2**16)
        except TimeoutError:
            if is_wanted():
                continue
            raise GrammarCheckError("the verdict is not wanted any more") from None
        if not piece:
            return reply
        reply += piece


def _end_process(requests: socket.socket, process: subprocess.Popen) -> None:
    """Let the other process end, and wait for it."""
    requests.close()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
