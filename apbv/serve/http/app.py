"""The HTTP API: OpenAI's two completion endpoints, some of vLLM's, and endpoints for operators."""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ...device.allocator import return_freed_memory
from ..api_error import ApiError
from ..control.job import Event, Finished, Job, Piece
from ..control.scheduler import Scheduler
from ..control.worker import Worker
from ..protocols.replies import Replies
from ..protocols.request_reader import Reader
from ..protocols.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from ..settings import ServerSettings
from .bodies import Bodies
from .json_limits import JsonLimits

_PARSERS = 4  # bodies parsed concurrently
_TOKENIZERS = 4  # prompts tokenized concurrently for tokenize requests
LARGE_BODY = 2**24  # bytes; what such a body took is given back to the operating system
_REQUEST_ID = "X-Request-Id"
_FITTING_ID = re.compile(r"[!-~]{1,256}")
_CLIENT_CLOSED_REQUEST = 499  # not sent to anyone
_Body = TypeVar("_Body", GenerationRequest, TokenizeRequest, DetokenizeRequest)
_Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    worker: Worker, scheduler: Scheduler, reader: Reader, settings: ServerSettings
) -> Starlette:
    """Build the ASGI application.

    Args:
        worker: answers the requests that the scheduler gives it.
        settings: with the model name in requests, their largest body, and the bearer token required
            for requests to the model or its tokenizer.
    """
    endpoints = _Endpoints(worker, scheduler, reader, settings)

    def guarded(handler: _Handler) -> _Handler:
        async def guard(request: Request) -> Response:
            _require_key(request, settings.api_key)
            return await handler(request)

        return guard

    routes = [
        Route("/v1/models", guarded(endpoints.models)),
        Route("/v1/models/{name:path}", guarded(endpoints.one_model)),
        Route("/v1/chat/completions", guarded(endpoints.chat), methods=["POST"]),
        Route("/v1/completions", guarded(endpoints.complete), methods=["POST"]),
        Route("/tokenize", guarded(endpoints.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(endpoints.detokenize), methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/ping", endpoints.health, methods=["GET", "POST"]),
        Route("/version", endpoints.version),
        Route("/load", endpoints.load),
        Route("/metrics", endpoints.metrics),
    ]
    middleware = [Middleware(_with_request_ids), Middleware(_giving_memory_back)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[_REQUEST_ID],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: _error, HTTPException: _error, Exception: _error},
    )


class _Endpoints:
    """Request handlers."""

    def __init__(
        self, worker: Worker, scheduler: Scheduler, reader: Reader, settings: ServerSettings
    ):
        self._worker = worker
        self._reader = reader
        self._scheduler = scheduler
        self._model = settings.model
        self._bodies = Bodies(settings.max_body_bytes)
        self._max_model_len = reader.max_model_len
        self._json_limits = JsonLimits.for_requests(self._max_model_len, settings.media.max_frames)
        self._started = int(time.time())
        self._num_answering = 0  # requests that are being answered
        self._parsers = ThreadPoolExecutor(_PARSERS, thread_name_prefix="parser")
        # Two, so that short texts do not wait for long ones.
        self._light = ThreadPoolExecutor(_TOKENIZERS, thread_name_prefix="tokenizer")
        self._heavy = ThreadPoolExecutor(_TOKENIZERS, thread_name_prefix="tokenizer")
        # One per queued request: waiting for another server's files does not block other requests.
        self._readers = ThreadPoolExecutor(
            scheduler.limits.max_queue + 1, thread_name_prefix="reader"
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._describe())

    async def health(self, _: Request) -> Response:
        reason = self._worker.reason_unavailable()
        if reason is not None:
            raise ApiError(503, reason)
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._num_answering})

    async def metrics(self, _: Request) -> Response:
        return Response(self._scheduler.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def chat(self, http_request: Request) -> Response:
        return await self._answer(ChatRequest, http_request)

    async def complete(self, http_request: Request) -> Response:
        return await self._answer(CompletionRequest, http_request)

    async def _answer(self, kind: type[GenerationRequest], http_request: Request) -> Response:
        """Answer a request.

        Args:
            kind: the type of its body.
        """
        # Read the body.
        job_id = f"{kind.id_prefix}-{http_request.state.request_id}"
        job = Job(job_id)
        try:
            body = await self._read(http_request, kind)
        except ApiError as error:
            self._scheduler.end(job, error, "invalid")
            raise
        except ClientDisconnect:
            self._scheduler.end(job, None, "cancelled")
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

        # Submit a job for each prompt.
        prompt_bodies = body.split()
        jobs = [job]
        for index in range(1, len(prompt_bodies)):
            first_choice = index * body.num_answers
            jobs.append(Job(f"{job_id}-{first_choice}", job, first_choice))
        self._worker.admit(*jobs)
        watch = asyncio.create_task(self._cancel_when_gone(http_request, jobs))
        events = self._events(jobs, watch)
        for prompt_job, prompt_body in zip(jobs, prompt_bodies, strict=True):
            read = partial(self._reader.read, prompt_body)
            self._readers.submit(self._worker.submit, prompt_job, read, body.hands_over)

        # Reply.
        replies = Replies(jobs, body, self._model)
        is_streamed = False
        try:
            first_event = await anext(events)
            if isinstance(first_event, ApiError):
                raise first_event
            if body.stream:
                stream = replies.stream(first_event, events)
                is_streamed = True
                headers = {"Cache-Control": "no-store"}
                return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
            return JSONResponse(await replies.whole(first_event, events))
        except StopAsyncIteration:  # cancelled
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            if not is_streamed:
                await events.aclose()

    async def tokenize(self, http_request: Request) -> Response:
        body = await self._read(http_request, TokenizeRequest)
        reader = self._reader

        def tokenize() -> dict[str, Any]:
            tokens = reader.tokenize(body)
            reply = {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}
            if body.return_token_strs:
                reply["token_strs"] = reader.token_strings(tokens)
            return reply

        threads = self._light if reader.is_light(body) else self._heavy
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(threads, tokenize))

    async def detokenize(self, http_request: Request) -> Response:
        body = await self._read(http_request, DetokenizeRequest)
        detokenize = self._reader.detokenize
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._light, detokenize, body.tokens)
        return JSONResponse({"prompt": text})

    def _describe(self) -> dict[str, Any]:
        """Describe the model, as OpenAI and vLLM do."""
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "apbv",
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }

    def _require_model(self, name: str | None) -> None:
        """Raise ApiError unless a request names the served model, or none."""
        if name not in (None, self._model):
            message = f"there is no model {name!r:.200}; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, http_request: Request, kind: type[_Body]) -> _Body:
        """Read and parse a body."""
        data = await self._bodies.read(http_request)
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._parsers, self._parse, kind, data)
        self._require_model(body.model)
        return body

    def _parse(self, kind: type[_Body], data: bytearray) -> _Body:
        self._json_limits.require(data)
        return kind.parse(data)

    async def _cancel_when_gone(self, http_request: Request, jobs: list[Job]) -> None:
        message = await http_request.receive()
        while message["type"] != "http.disconnect":
            message = await http_request.receive()
        for job in jobs:
            self._scheduler.cancel(job)
        jobs[0].send(ApiError(_CLIENT_CLOSED_REQUEST, "the client has gone"))

    async def _events(self, jobs: list[Job], watch: asyncio.Task) -> AsyncGenerator[Event]:
        """Yield the pieces of a request's jobs, and the last one's end, or a failure.

        Closing the iterator cancels the jobs.

        Args:
            watch: the task that notices when the client has gone.
        """
        self._num_answering += 1
        num_unfinished = len(jobs)
        num_tokens = 0
        try:
            while num_unfinished:
                event = await jobs[0].events.get()
                if isinstance(event, Piece):
                    yield event
                elif isinstance(event, Finished):
                    num_unfinished -= 1
                    num_tokens += event.num_tokens
                    if num_unfinished == 0:
                        yield replace(event, num_tokens=num_tokens)
                elif event.status == _CLIENT_CLOSED_REQUEST:
                    return
                else:
                    yield event
                    return
        finally:
            self._num_answering -= 1
            watch.cancel()
            for job in jobs:
                self._scheduler.cancel(job)


def _require_key(request: Request, api_key: str | None) -> None:
    """Raise ApiError unless a request has the API key, if there is one."""
    if api_key is None:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Starlette decodes headers as Latin-1, which keeps every byte.
    is_right = hmac.compare_digest(token.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(
            401,
            "the API key is missing or wrong",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _with_request_ids(app: ASGIApp) -> ASGIApp:
    """Give every request an id: the client's if it is suitable for the log, else a new one."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get(_REQUEST_ID, "")
        if not _FITTING_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        await app(scope, receive, send_with_id)

    return call


def _giving_memory_back(app: ASGIApp) -> ASGIApp:
    """Return a large body's memory to the system once its reply is sent, objects and files too."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["state"].get("num_body_bytes", 0) > LARGE_BODY:
                await asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    return call


async def _error(_: Request, error: Exception) -> JSONResponse:
    """Answer with an error, in OpenAI's form."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return JSONResponse(error.body, error.status, headers=error.headers)
