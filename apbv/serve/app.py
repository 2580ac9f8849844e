"""The HTTP API: OpenAI's two completion endpoints, some of vLLM's, and endpoints for operators."""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
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

from .. import __version__
from ..allocator import return_freed_memory
from .bodies import Bodies
from .counting import JsonLimits
from .job import Event, Finished, Job, Piece
from .replies import Replies
from .requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from .scheduler import Scheduler
from .settings import ServerSettings
from .worker import Worker

_PARSERS = 4  # bodies parsed concurrently
_TOKENIZERS = 4  # prompts tokenized concurrently for tokenize requests
_LARGE_BODY = 2**24  # bytes; what such a body took is given back to the operating system
_REQUEST_ID, _FITTING = "X-Request-Id", re.compile(r"[!-~]{1,256}")
_CLIENT_CLOSED_REQUEST = 499  # not sent to anyone
_Body = TypeVar("_Body", GenerationRequest, TokenizeRequest, DetokenizeRequest)
_Handler = Callable[[Request], Awaitable[Response]]


def build_app(worker: Worker, scheduler: Scheduler, settings: ServerSettings) -> Starlette:
    """Build the ASGI application.

    Args:
        worker: answers the requests that the scheduler gives it.
        settings: with the model name in requests, their largest body, and the bearer token required
            for requests to the model or its tokenizer.
    """
    endpoints = _Endpoints(worker, scheduler, settings)

    def guarded(handler: _Handler) -> _Handler:
        async def guard(request: Request) -> Response:
            _require_key(request, settings.api_key)
            return await handler(request)

        return guard

    shared = {"allow_origins": settings.cors_origins, "expose_headers": [_REQUEST_ID]}
    cors = [
        Middleware(CORSMiddleware, allow_methods=["GET", "POST"], allow_headers=["*"], **shared)
    ]
    return Starlette(
        routes=[
            Route("/v1/models", guarded(endpoints.models)),
            Route("/v1/models/{name:path}", guarded(endpoints.one_model)),
            Route(
                "/v1/chat/completions",
                guarded(partial(endpoints.answer, ChatRequest)),
                methods=["POST"],
            ),
            Route(
                "/v1/completions",
                guarded(partial(endpoints.answer, CompletionRequest)),
                methods=["POST"],
            ),
            Route("/tokenize", guarded(endpoints.tokenize), methods=["POST"]),
            Route("/detokenize", guarded(endpoints.detokenize), methods=["POST"]),
            Route("/health", endpoints.health),
            Route("/ping", endpoints.health, methods=["GET", "POST"]),
            Route("/version", endpoints.version),
            Route("/load", endpoints.load),
            Route("/metrics", endpoints.metrics),
        ],
        middleware=[
            *(cors if settings.cors_origins else ()),
            Middleware(_with_request_ids),
            Middleware(_giving_memory_back),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _error),
    )


class _Endpoints:
    """Request handlers."""

    def __init__(self, worker: Worker, scheduler: Scheduler, settings: ServerSettings):
        self._worker = worker
        self._scheduler = scheduler
        self._model, self._bodies = settings.model, Bodies(settings.max_body_bytes)
        self._json_limits = JsonLimits.for_requests(
            worker.reader.max_model_len, settings.max_frames
        )
        self._max_model_len, self._started = worker.reader.max_model_len, int(time.time())
        self._num_answering = 0  # answers that are asked for now
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
        if reason := self._worker.reason_unavailable():
            raise ApiError(503, reason)
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self._num_answering})

    async def metrics(self, _: Request) -> Response:
        return Response(self._scheduler.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def answer(self, body: type[GenerationRequest], request: Request) -> Response:
        """Answer a request whose body is of some type."""
        job_id = f"{body.id_prefix}-{request.state.request_id}"
        job = Job(job_id)
        try:
            asked = await self._read(request, body)
        except ApiError as error:
            self._scheduler.end(job, error, "invalid")
            raise
        except ClientDisconnect:
            self._scheduler.end(job, None, "cancelled")
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        prompts = asked.split()
        choices = range(asked.num_answers, len(prompts) * asked.num_answers, asked.num_answers)
        jobs = [job, *(Job(f"{job_id}-{choice}", job, choice) for choice in choices)]
        self._worker.admit(*jobs)
        watch = asyncio.create_task(self._cancel_when_gone(request, jobs))
        events = self._events(jobs, watch)
        for each in zip(jobs, prompts, strict=True):
            self._readers.submit(self._worker.submit, *each)
        replies = Replies(jobs, asked, self._model)
        is_streamed = False
        try:
            first = await anext(events)
            if isinstance(first, ApiError):
                raise first
            if asked.stream:
                stream = replies.stream(first, events)
                is_streamed = True
                return StreamingResponse(
                    stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
                )
            return JSONResponse(await replies.whole(first, events))
        except StopAsyncIteration:  # cancelled
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            if not is_streamed:
                await events.aclose()

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        reader = self._worker.reader

        def tokenize() -> dict[str, Any]:
            tokens = reader.tokenize(asked)
            reply = {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}
            return (
                {**reply, "token_strs": reader.token_strings(tokens)}
                if asked.return_token_strs
                else reply
            )

        threads = self._light if reader.is_light(asked) else self._heavy
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(threads, tokenize))

    async def detokenize(self, request: Request) -> Response:
        asked, loop = await self._read(request, DetokenizeRequest), asyncio.get_running_loop()
        text = await loop.run_in_executor(self._light, self._worker.reader.detokenize, asked.tokens)
        return JSONResponse({"prompt": text})

    def _describe(self) -> dict[str, Any]:
        """Describe the model, as OpenAI and vLLM do."""
        described = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "apbv",
        }
        return {
            **described,
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }

    def _require_model(self, name: str | None) -> None:
        """Raise ApiError unless a request names the served model, or none."""
        if name not in (None, self._model):
            message = f"there is no model {name!r:.200}; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        """Read and parse a body."""
        body = await self._bodies.read(request)
        asked = await asyncio.get_running_loop().run_in_executor(
            self._parsers, self._parse, kind, body
        )
        self._require_model(asked.model)
        return asked

    def _parse(self, kind: type[_Body], body: bytearray) -> _Body:
        self._json_limits.require(body)
        return kind.parse(body)

    async def _cancel_when_gone(self, request: Request, jobs: list[Job]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for job in jobs:
            self._scheduler.cancel(job)
        jobs[0].send(ApiError(_CLIENT_CLOSED_REQUEST, "the client has gone"))

    async def _events(self, jobs: list[Job], watch: asyncio.Task) -> AsyncIterator[Event]:
        """Yield the events of a request's jobs up to the last, or a failure; closing the iterator
        cancels them."""
        self._num_answering += 1
        num_left = len(jobs)
        num_tokens = 0
        try:
            while num_left:
                event = await jobs[0].events.get()
                if isinstance(event, ApiError) and event.status == _CLIENT_CLOSED_REQUEST:
                    return
                if isinstance(event, Finished):
                    num_left = num_left - 1
                    num_tokens = num_tokens + event.num_tokens
                    event = replace(event, num_tokens=num_tokens)
                if isinstance(event, Piece | ApiError) or not num_left:
                    yield event
                if isinstance(event, ApiError):
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
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Starlette decodes headers as Latin-1, which keeps every byte.
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(
            401, "the API key is missing or wrong", code="invalid_api_key", headers=headers
        )


def _with_request_ids(app: ASGIApp) -> ASGIApp:
    """Give every request an id: the client's if it is suitable for the log, else a generated
    one."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(_REQUEST_ID, "")
        request_id = given if _FITTING.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        await app(scope, receive, send_with_id)

    return call


def _giving_memory_back(app: ASGIApp) -> ASGIApp:
    """Return the memory that a large body took, its objects and files included, once its reply is
    sent."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["state"].get("num_body_bytes", 0) > _LARGE_BODY:
                await asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    return call


async def _error(_: Request, error: Exception) -> JSONResponse:
    """Answer with an error, in OpenAI's form."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return JSONResponse(error.body, error.status, headers=error.headers)
