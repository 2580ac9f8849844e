"""Answers a file of requests with the server's worker and its HTTP API, but without HTTP."""

import asyncio
import json
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from starlette.types import Message

from ...errors import ApbvError, StorageError
from ..api_error import ApiError
from ..control.scheduler import Scheduler
from ..control.worker import Worker
from ..http.app import build_app
from ..metrics.log import in_one_line, reason_in_one_line
from ..metrics.prometheus import Metrics
from ..protocols.request_reader import Reader
from ..server import SAME_SIGNAL_SECONDS, SIGNALS
from ..settings import ServerSettings
from .files import Answers, Requests

_URLS = ("/v1/chat/completions", "/v1/completions")
_LOOK_AHEAD = 32  # requests that are read while others run; a body may have --max-body-mib
_LINE_BYTES = 2**16  # bytes of a line beside its body
_RETRY_SECONDS = 0.2
_SHOW_SECONDS = 0.5
_NUM_REASONS = 5  # errors whose reasons are kept

_logger = logging.getLogger(__name__)


class Batch:
    """Answers the requests of a file, on host 0.

    Requests are read a bounded number ahead of those that run, and answered in any order.

    Args:
        settings: the model name in requests, and their limits.
        show: called with this object twice a second.

    Attributes:
        total: the number of requests; None: unknown (yet).
        num_answered: the requests answered in this run, errors included.
        num_failed: the errors in the file of answers, earlier runs' included.
        reasons: why the first requests of this run failed, a line each.
        num_left: requests that were read and not answered, because the batch was stopped.
        stopped_by: the signal that stopped it; None: none did.
    """

    def __init__(
        self,
        requests: Requests,
        answers: Answers,
        settings: ServerSettings,
        show: Callable[["Batch"], None],
    ):
        self._requests = requests
        self._answers = answers
        self._settings = settings
        self._show = show
        self.total: int | None = None
        self.num_answered = 0
        self.num_failed = answers.num_failed
        self.num_left = 0
        self.stopped_by: int | None = None
        self.reasons: list[str] = []
        self._custom_ids: set[str] = set()  # of the lines read so far
        self._unanswered: set[Future] = set()  # requests that were read
        self._has_read_all = False
        self._failure: BaseException | None = None
        self._began = time.monotonic()
        self._stopped_at = self._began
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")

    @property
    def num_read(self) -> int:
        """How many lines with an id of their own have been read so far."""
        return len(self._custom_ids)

    def open(self, worker: Worker, scheduler: Scheduler, reader: Reader) -> Callable[[], None]:
        """Return the function that answers the requests, for :func:`.server.run_worker`."""
        self._worker = worker
        self._scheduler = scheduler
        self._app = build_app(worker, scheduler, reader, self._settings)
        return self._run

    @property
    def num_running(self) -> int:
        """How many requests are being prefilled or decoded."""
        return self._scheduler.num_running

    @property
    def metrics(self) -> Metrics:
        """The metrics of this run's requests."""
        return self._scheduler.metrics

    @property
    def seconds(self) -> float:
        """Seconds since the first request."""
        return time.monotonic() - self._began

    @property
    def num_in_file(self) -> int:
        """How many requests the file of answers has an answer or an error for."""
        return len(self._answers.ids) + len(self._answers.lines) + self.num_answered

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped it before its end."""
        is_complete = self._has_read_all and not self.num_left
        return self.stopped_by is not None and not is_complete

    def _run(self) -> None:
        """Answer all requests, or until a signal.

        Raises:
            StorageError: the requests cannot be read any further, or the answers not be written.
        """
        self._began = time.monotonic()
        with self._writer:
            asyncio.run(self._answer_all())
        if self._failure is not None:
            raise self._failure

    async def _answer_all(self) -> None:
        self._loop = asyncio.get_running_loop()
        worker_has_ended = asyncio.Event()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)

        def on_end() -> None:
            self._loop.call_soon_threadsafe(worker_has_ended.set)

        # Start the worker, and read requests for it.
        self._worker.start(on_stop=lambda: self._stop(signal.SIGTERM), on_end=on_end)
        threading.Thread(target=self._feed, name="requests", daemon=True).start()
        threading.Thread(target=self._count, name="requests", daemon=True).start()

        # Show the progress until the worker has ended.
        end = asyncio.create_task(worker_has_ended.wait())
        while not end.done():
            self._show(self)
            await asyncio.wait({end}, timeout=_SHOW_SECONDS)

        # Write the last answers.
        last_answers = [asyncio.wrap_future(future) for future in list(self._unanswered)]
        await asyncio.gather(*last_answers, return_exceptions=True)
        self._show(self)

    def _count(self) -> None:
        """Count the requests that are not answered yet, in a thread."""
        total = self._requests.count()
        if total is not None:
            self.total = total - len(self._answers.ids) - len(self._answers.lines)

    def _feed(self) -> None:
        """Read requests, in a thread, as far ahead as is allowed."""
        changed = self._scheduler.changed
        look_ahead = min(_LOOK_AHEAD, self._settings.max_queue)

        def may_go_on() -> bool:
            num_waiting = len(self._unanswered) - self.num_running
            return self._scheduler.is_stopping or num_waiting < look_ahead

        try:
            for number, line in self._requests.lines(self._max_line_bytes):
                answering = self._answering(number, line)
                if answering is None:
                    continue
                with changed:
                    changed.wait_for(may_go_on)
                    if self._scheduler.is_stopping:
                        answering.close()
                        self.num_left += 1
                        return
                    future = asyncio.run_coroutine_threadsafe(answering, self._loop)
                    self._unanswered.add(future)
                future.add_done_callback(self._end)
            self._has_read_all = True
        except Exception as error:  # requests that were read are still answered
            self._failure = _failure("cannot read the requests any further", error)
        self._stop_after_last()

    def _end(self, future: Future) -> None:
        """Count a request as answered, and stop after the last."""
        error = future.exception()
        if error is not None:
            self._failure = _failure("cannot write the answers", error)
            self._scheduler.stop()
            self._scheduler.cut_short()
        with self._scheduler.changed:
            self._unanswered.discard(future)
        self._stop_after_last()

    def _stop_after_last(self) -> None:
        """Have the reading thread go on, or stop if nothing is left to answer."""
        with self._scheduler.changed:
            self._scheduler.changed.notify_all()
            if not self._unanswered and (self._has_read_all or self._failure is not None):
                self._scheduler.stop()

    @property
    def _max_line_bytes(self) -> int:
        return self._settings.max_body_bytes + _LINE_BYTES

    def _answering(self, number: int, line: bytes) -> Coroutine | None:
        """Return the coroutine that answers a line; None if it is answered already."""

        def refusing(code: str, reason: str) -> Coroutine | None:
            if number in self._answers.lines:
                return None
            error = {"code": code, "message": f"line {number}: {reason}", "line": number}
            return self._write(None, None, error)

        if len(line) > self._max_line_bytes:
            reason = f"it has more than {self._max_line_bytes} bytes (--max-body-mib)"
            return refusing("line_too_long", reason)
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            return refusing("invalid_json", str(error))
        custom_id = request.get("custom_id") if isinstance(request, dict) else None
        if not isinstance(custom_id, str):
            return refusing("no_custom_id", "it needs a custom_id, a string")
        if custom_id in self._custom_ids:
            reason = f"an earlier line has the custom_id {custom_id!r:.200}"
            return refusing("duplicate_custom_id", reason)
        self._custom_ids.add(custom_id)
        if custom_id in self._answers.ids:
            return None
        return self._answer(custom_id, request)

    async def _answer(self, custom_id: str, request: dict[str, Any]) -> None:
        """Ask the API until it can answer, and write the answer."""
        request_id = uuid.uuid4().hex
        status, reply = await self._ask(request, request_id)
        while status == 429 or (status == 503 and self._worker.reason_unavailable() is not None):
            if self._scheduler.is_stopping:
                self.num_left += 1
                return
            await asyncio.sleep(_RETRY_SECONDS)
            status, reply = await self._ask(request, request_id)
        response = {"status_code": status, "request_id": request_id, "body": reply}
        await self._write(custom_id, response, None)

    async def _ask(self, request: dict[str, Any], request_id: str) -> tuple[int, Any]:
        """Return the status and the body with which the HTTP API answers a request."""
        method = request.get("method")
        url = request.get("url")
        body = request.get("body")
        if method != "POST" or url not in _URLS:
            message = f"use POST {' or '.join(_URLS)}, not {method!s:.20} {url!s:.200}"
            return 404, ApiError(404, message).body
        if isinstance(body, dict) and body.get("stream"):
            return 400, ApiError(400, "a batch does not stream", param="stream").body
        scope = {
            "type": "http",
            "method": method,
            "path": url,
            "query_string": b"",
            "headers": [(b"x-request-id", request_id.encode())],
        }
        body_messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        reply_messages = []

        async def receive() -> Message:
            if body_messages:
                return body_messages.pop()
            return await asyncio.Future()  # the client stays

        async def send(message: Message) -> None:
            reply_messages.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:  # after it was answered with status 500
            _logger.exception("a request failed")
        head, *pieces = reply_messages
        return head["status"], json.loads(b"".join(piece["body"] for piece in pieces))

    async def _write(self, custom_id: str | None, response: Any, error: Any) -> None:
        """Write a line of answers, and count it."""
        request_id = uuid.uuid4().hex if response is None else response["request_id"]
        await self._loop.run_in_executor(
            self._writer, self._answers.add, request_id, custom_id, response, error
        )
        self.num_answered += 1
        if error is None and response["status_code"] == 200:
            return
        self.num_failed += 1
        if len(self.reasons) < _NUM_REASONS:
            self.reasons.append(_reason(custom_id, response, error))

    def _on_signal(self, number: int) -> None:
        if self.stopped_by is None:
            self._stop(number)
        elif time.monotonic() - self._stopped_at > SAME_SIGNAL_SECONDS:
            self._scheduler.cut_short()

    def _stop(self, number: int) -> None:
        """Finish what runs, and ask for nothing more; idempotent."""
        if self.stopped_by is None:
            self.stopped_by = number
            self._stopped_at = time.monotonic()
            self._scheduler.stop()


def _failure(what: str, error: BaseException) -> BaseException:
    """Return why a batch ends early: an error of a file with a sentence before it; a fault of ours
    as it is."""
    if not isinstance(error, (ApbvError, OSError)):
        return error
    failure = StorageError(f"{what}: {error}")
    failure.__cause__ = error
    return failure


def _reason(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> str:
    """Return in one line which request failed, and why.

    Args:
        custom_id, response, error: as in the line of answers.
    """
    if error is not None:
        return in_one_line(error["message"])
    assert custom_id is not None and response is not None, "a request was answered"
    api_error = response["body"]["error"]
    reason = reason_in_one_line(api_error["message"], api_error["param"])
    return f"{in_one_line(custom_id)}: {response['status_code']}, {reason}"
