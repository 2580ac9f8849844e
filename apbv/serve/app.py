"""The HTTP interface: OpenAI's two endpoints for answers, some of vLLM's beside them, and operators' addresses."""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from .job import Event, Job, Piece
from .protocol import ApiError, ErrorBody, Load, Model, ModelList, ModelPermission, Text, Tokens
from .replies import ChatReplies, CompletionReplies, Replies
from .requests import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from .worker import Worker

_BODY_SECONDS = 60.0
_PARSERS = 4  # bodies that are parsed at a time
_TOKENIZERS = 4  # prompts that are tokenized at a time for requests that want nothing else
_CLIENT_CLOSED_REQUEST = 499  # nobody sees it
_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 503)}

_Body = TypeVar("_Body", GenerationRequest, TokenizeRequest, DetokenizeRequest)


def build_app(
    worker: Worker, model: str, max_model_len: int, *, max_body_bytes: int, api_key: str | None = None
) -> FastAPI:
    """Build the ASGI application.

    Args:
        worker: answers the requests.
        model: the name that requests give, and are told.
        max_model_len: the tokens of prompt and answer that clients are told are possible.
        max_body_bytes: the largest body that is read.
        api_key: the bearer token that whoever lets the model or its tokenizer work has to send; None: none.
    """
    app = FastAPI(title="apbv", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(_RequestIds)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _error)
    endpoints = _Endpoints(worker, model, max_body_bytes)
    started = int(time.time())
    guarded = APIRouter(dependencies=[Depends(_Guard(api_key))])

    def describe() -> Model:
        permission = ModelPermission(id=f"modelperm-{uuid.uuid4().hex}", created=started)
        return Model(id=model, created=started, root=model, max_model_len=max_model_len, permission=[permission])

    @guarded.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[describe()])

    @guarded.get("/v1/models/{name:path}", responses={404: {"model": ErrorBody}})
    async def one_model(name: str) -> Model:
        endpoints.require_model(name)
        return describe()

    @guarded.post(
        "/v1/chat/completions",
        response_model=ChatReplies.answer,
        responses=_ERRORS,
        openapi_extra=_body_schema(ChatRequest),
    )
    async def chat_completions(request: Request) -> Response:
        return await endpoints.answer(request, ChatRequest, ChatReplies)

    @guarded.post(
        "/v1/completions",
        response_model=CompletionReplies.answer,
        responses=_ERRORS,
        openapi_extra=_body_schema(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        return await endpoints.answer(request, CompletionRequest, CompletionReplies)

    @guarded.post(
        "/tokenize", response_model=Tokens, responses=_ERRORS, openapi_extra=_body_schema(TokenizeRequest)
    )
    async def tokenize(request: Request) -> Response:
        tokens, strings = await endpoints.tokenize(request)
        reply = Tokens(count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=strings)
        return JSONResponse(reply.model_dump())

    @guarded.post("/detokenize", responses=_ERRORS, openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Text:
        return Text(prompt=await endpoints.detokenize(request))

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Response:
        if reason := worker.reason_unavailable():
            raise ApiError(503, reason)
        return Response()

    app.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/load")
    async def load() -> Load:
        return Load(server_load=endpoints.num_answering)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.render(), media_type=worker.metrics.content_type)

    app.include_router(guarded)
    return _with_schemas(app, ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


class _Endpoints:
    """What the addresses do that take a body.

    Attributes:
        num_answering: how many answers are asked for now.
    """

    def __init__(self, worker: Worker, model: str, max_body_bytes: int):
        self._worker, self._model, self._max_body_bytes = worker, model, max_body_bytes
        self.num_answering = 0
        self._parsers = ThreadPoolExecutor(_PARSERS, thread_name_prefix="parser")
        self._tokenizers = ThreadPoolExecutor(_TOKENIZERS, thread_name_prefix="tokenizer")
        # One for everybody in the queue: who waits for another server's files keeps nobody else waiting.
        self._readers = ThreadPoolExecutor(worker.max_admitted, thread_name_prefix="reader")

    async def answer(self, request: Request, body: type[GenerationRequest], form: type[Replies]) -> Response:
        """Answer a request of which ``form`` knows what its replies look like."""
        job_id, traceparent = f"{form.kind}-{request.state.request_id}", request.headers.get("traceparent")
        job = self._worker.admit(job_id, form.kind, traceparent)
        try:
            asked = await self._read(request, body)
        except BaseException as error:
            self._worker.end(job, None, "invalid" if isinstance(error, ApiError) else "cancelled")
            if isinstance(error, ClientDisconnect):
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            raise
        watch = asyncio.create_task(self._cancel_when_gone(request, job))
        events = self._events(job, watch)
        self._readers.submit(self._worker.submit, job, asked)
        replies, is_streamed = form(job, asked, self._model), False
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

    async def tokenize(self, request: Request) -> tuple[list[int], list[str] | None]:
        """Return a prompt's tokens, and how the vocabulary spells them where that is wanted."""
        asked, reader = await self._read(request, TokenizeRequest), self._worker.reader

        def tokenize() -> tuple[list[int], list[str] | None]:
            tokens = reader.tokenize(asked)
            return tokens, reader.token_strings(tokens) if asked.return_token_strs else None

        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, tokenize)

    async def detokenize(self, request: Request) -> str:
        """Return the text of some tokens."""
        asked, loop = await self._read(request, DetokenizeRequest), asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizers, self._worker.reader.detokenize, asked.tokens)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError unless a request names the served model, or none."""
        if name not in (None, self._model):
            message = f"there is no model {name!r:.200}; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        """Read and parse a body."""
        try:
            body = await asyncio.wait_for(_read_body(request, self._max_body_bytes), _BODY_SECONDS)
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body took more than {_BODY_SECONDS:g} s") from error
        asked = await asyncio.get_running_loop().run_in_executor(self._parsers, kind.parse, body)
        self.require_model(asked.model)
        return asked

    async def _cancel_when_gone(self, request: Request, job: Job) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(job)
        job.send(ApiError(_CLIENT_CLOSED_REQUEST, "the client has gone"))

    async def _events(self, job: Job, watch: asyncio.Task) -> AsyncIterator[Event]:
        """Yield a job's events up to its last; whoever stops listening cancels the job."""
        self.num_answering += 1
        try:
            while True:
                event = await job.events.get()
                if isinstance(event, ApiError) and event.status == _CLIENT_CLOSED_REQUEST:
                    return
                yield event
                if not isinstance(event, Piece):
                    return
        finally:
            self.num_answering -= 1
            watch.cancel()
            self._worker.cancel(job)


class _Guard:
    """Refuses requests without the API key."""

    def __init__(self, api_key: str | None):
        self._api_key = api_key

    async def __call__(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1, which keeps every byte.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class _RequestIds:
    """Gives every request an id: the client's, if that fits into a line of the log, or one of its own."""

    _HEADER = "X-Request-Id"
    _FITTING = re.compile(r"[!-~]{1,256}")

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(self._HEADER, "")
        request_id = given if self._FITTING.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[self._HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body, unless its header, or what has come so far, shows that it is too large."""
    too_large = ApiError(
        413, f"the body may have at most {max_bytes} bytes", code="body_too_large", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _error(_: Request, error: Exception) -> JSONResponse:
    """Answer with an error, in OpenAI's form."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return JSONResponse(error.body, error.status, headers=error.headers)


def _body_schema(body: type[BaseModel]) -> dict:
    """Describe for OpenAPI a body, which FastAPI does not read itself."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _with_schemas(app: FastAPI, *bodies: type[BaseModel]) -> FastAPI:
    """Add the bodies' schemas to those that FastAPI collects."""
    schemas = app.openapi()["components"]["schemas"]
    for body in bodies:
        schema = body.model_json_schema(ref_template=_REFERENCE)
        schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
    return app
