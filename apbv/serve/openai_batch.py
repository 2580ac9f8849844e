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
from functools import partial
from typing import Any

from .app import build_app
from .batch_files import Answers, Requests
from .log import in_one_line, reason_in_one_line
from .metrics import Metrics
from .requests import ApiError
from .scheduler import Scheduler
from .server import SAME_SIGNAL_SECONDS, SIGNALS
from .settings import ServerSettings
from .worker import Worker

_URLS = ("/v1/chat/completions", "/v1/completions")
_LOOK_AHEAD = 32  # requests that are read while others run; a body may have --max-body-mib
_LINE_BYTES = 2**16  # of a line, beside its body
_RETRY_SECONDS = 0.2
_SHOW_SECONDS = 0.5
_NUM_REASONS = 5  # of errors that are told

_logger = logging.getLogger(__name__)


class Batch:
    """Answers the requests of a file, on host 0.

    Requests are read a bounded number ahead of those that run, and answered in any order.

    Args:
        settings: the model name in requests, and their limits.
        show: called with this object twice a second.

    Attributes:
        total: the number of requests; None: unknown (yet).
        num_answered: of them, also with errors.
        num_failed: errors in the file of answers, of earlier runs, too.
        reasons: why the first requests of this run failed, a line each.
        num_left: requests that were read and not answered, because the batch was stopped.
        stopped_by: the signal that it got; None: none.
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
        self._seen: set[str] = set()
        self._asking: set[Future] = set()
        self._has_read_all, self._failure = False, None  # a ValueError
        self._began = self._stopped_at = time.monotonic()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")

    def open(self, worker: Worker, scheduler: Scheduler) -> Callable[[], None]:
        """As :func:`.server.run_worker` wants it."""
        self._worker = worker
        self._scheduler = scheduler
        self._app = build_app(worker, scheduler, self._settings)
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
        return self.stopped_by is not None and not (self._has_read_all and not self.num_left)

    def _run(self) -> None:
        """Answer all requests, or until a signal.

        Raises:
            ValueError: the requests cannot be read any further, or the answers not be written.
        """
        self._began = time.monotonic()
        with self._writer:
            asyncio.run(self._answer_all())
        if self._failure is not None:
            raise self._failure

    async def _answer_all(self) -> None:
        self._loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)
        on_end = partial(self._loop.call_soon_threadsafe, has_ended.set)
        self._worker.start(on_stop=partial(self._stop, signal.SIGTERM), on_end=on_end)
        for work in (self._feed, self._count):
            threading.Thread(target=work, name="requests", daemon=True).start()
        ended = asyncio.create_task(has_ended.wait())
        while not ended.done():
            self._show(self)
            await asyncio.wait({ended}, timeout=_SHOW_SECONDS)
        await asyncio.gather(*map(asyncio.wrap_future, list(self._asking)), return_exceptions=True)
        self._show(self)

    def _count(self) -> None:
        if (total := self._requests.count()) is not None:
            self.total = total - len(self._answers.ids) - len(self._answers.lines)

    def _feed(self) -> None:
        """Read requests, in a thread, as far ahead as is allowed."""
        changed = self._scheduler.changed
        look_ahead = min(_LOOK_AHEAD, self._settings.max_queue)

        def may_go_on() -> bool:
            return self._scheduler.is_stopping or len(self._asking) - self.num_running < look_ahead

        try:
            for number, line in self._requests.lines(self._settings.max_body_bytes + _LINE_BYTES):
                work = self._work_of(number, line)
                if work is None:
                    continue
                with changed:
                    changed.wait_for(may_go_on)
                    if self._scheduler.is_stopping:
                        work.close()
                        self.num_left += 1
                        return
                    asking = asyncio.run_coroutine_threadsafe(work, self._loop)
                    self._asking.add(asking)
                asking.add_done_callback(self._end)
            self._has_read_all = True
        except Exception as error:  # what was read is answered yet
            self._failure = ValueError(f"cannot read the requests any further: {error}")
        self._end()

    def _end(self, asking: Future | None = None) -> None:
        """Count a request as answered, and stop after the last."""
        if asking is not None and asking.exception() is not None:
            self._failure = ValueError(f"cannot write the answers: {asking.exception()}")
            self._scheduler.stop()
            self._scheduler.cut_short()
        with self._scheduler.changed:
            self._asking.discard(asking)
            self._scheduler.changed.notify_all()
            if not self._asking and (self._has_read_all or self._failure is not None):
                self._scheduler.stop()

    def _work_of(self, number: int, line: bytes) -> Coroutine | None:
        """Return the coroutine that answers a line; None if it is answered already."""

        def refused(code: str, why: str) -> Coroutine | None:
            error = {"code": code, "message": f"line {number}: {why}", "line": number}
            return None if number in self._answers.lines else self._write(None, None, error)

        if len(line) > (most := self._settings.max_body_bytes + _LINE_BYTES):
            return refused("line_too_long", f"it has more than {most} bytes (--max-body-mib)")
        try:
            asked = json.loads(line)
        except (ValueError, RecursionError) as error:
            return refused("invalid_json", str(error))
        custom_id = asked.get("custom_id") if isinstance(asked, dict) else None
        if not isinstance(custom_id, str):
            return refused("no_custom_id", "it needs a custom_id, a string")
        if custom_id in self._seen:
            return refused(
                "duplicate_custom_id", f"an earlier line has the custom_id {custom_id!r:.200}"
            )
        self._seen.add(custom_id)
        return None if custom_id in self._answers.ids else self._answer(custom_id, asked)

    async def _answer(self, custom_id: str, asked: dict[str, Any]) -> None:
        """Ask the API until it can answer, and write the answer."""
        request_id = uuid.uuid4().hex
        status, reply = await self._ask(asked, request_id)
        while status == 429 or (status == 503 and self._worker.reason_unavailable()):
            if self._scheduler.is_stopping:
                self.num_left += 1
                return
            await asyncio.sleep(_RETRY_SECONDS)
            status, reply = await self._ask(asked, request_id)
        await self._write(
            custom_id, {"status_code": status, "request_id": request_id, "body": reply}, None
        )

    async def _ask(self, asked: dict[str, Any], request_id: str) -> tuple[int, Any]:
        """Return the status and the body with which the HTTP API answers a request."""
        method = asked.get("method")
        url = asked.get("url")
        body = asked.get("body")
        if method != "POST" or url not in _URLS:
            return 404, ApiError(
                404, f"use POST {' or '.join(_URLS)}, not {method!s:.20} {url!s:.200}"
            ).body
        if isinstance(body, dict) and body.get("stream"):
            return 400, ApiError(400, "a batch does not stream", param="stream").body
        scope = {"type": "http", "method": method, "path": url, "query_string": b""}
        scope["headers"] = [(b"x-request-id", request_id.encode())]
        coming = [{"type": "http.request", "body": json.dumps(body).encode()}]
        told = []

        async def receive() -> dict[str, Any]:
            return coming.pop() if coming else await asyncio.Future()  # the client stays

        async def send(message: dict[str, Any]) -> None:
            told.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:  # after it was answered with status 500
            _logger.exception("a request failed")
        return told[0]["status"], json.loads(b"".join(message["body"] for message in told[1:]))

    async def _write(self, custom_id: str | None, response: Any, error: Any) -> None:
        request_id = uuid.uuid4().hex if response is None else response["request_id"]
        add = partial(self._answers.add, request_id, custom_id, response, error)
        await self._loop.run_in_executor(self._writer, add)
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
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self._scheduler.stop()


def _reason(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> str:
    """Return in one line which request failed, and why.

    Args:
        custom_id, response, error: as in the line of answers.
    """
    if error is not None:
        return in_one_line(error["message"])
    told = response["body"]["error"]
    return (
        f"{in_one_line(custom_id)}: {response['status_code']}, "
        f"{reason_in_one_line(told['message'], told['param'])}"
    )
