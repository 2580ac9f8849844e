"""The HTTP interface: OpenAI's chat completions, and the addresses that operators ask."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from .protocol import (
    AnswerMessage,
    ApiError,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChunkChoice,
    Delta,
    ErrorBody,
    Model,
    ModelList,
)
from .worker import Event, Finished, Job, Worker

_BODY_SECONDS = 60.0
_PARSERS = 4  # bodies that are parsed at a time
_CLIENT_CLOSED_REQUEST = 499  # nobody sees it
_REFERENCE = "#/components/schemas/{model}"


def build_app(
    worker: Worker, model: str, max_model_len: int, *, max_body_bytes: int, api_key: str | None = None
) -> FastAPI:
    """Build the ASGI application.

    Args:
        worker: answers the requests.
        model: the name that requests give, and are told.
        max_model_len: the tokens of prompt and answer that clients are told are possible.
        max_body_bytes: the largest body that is read.
        api_key: the bearer token that /v1/* wants; None: none.
    """
    app = FastAPI(title="apbv", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _error)
    app.add_exception_handler(HTTPException, _error)
    app.add_exception_handler(Exception, _error)
    started = int(time.time())
    parsers = ThreadPoolExecutor(_PARSERS, thread_name_prefix="parser")
    # One for everybody in the queue: who waits for another server's files keeps nobody else waiting.
    readers = ThreadPoolExecutor(worker.max_admitted, thread_name_prefix="reader")

    def authorise(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1, which keeps every byte.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(authorise)])

    @v1.get("/models")
    async def models() -> ModelList:
        return ModelList(data=[Model(id=model, created=started, max_model_len=max_model_len)])

    @v1.get("/models/{name:path}", responses={404: {"model": ErrorBody}})
    async def one_model(name: str) -> Model:
        _require_model(name, model)
        return Model(id=model, created=started, max_model_len=max_model_len)

    @v1.post(
        "/chat/completions",
        response_model=ChatCompletion,
        responses={status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 503)},
        openapi_extra=_body_schema(),
    )
    async def chat_completions(request: Request) -> Response:
        job = worker.admit()
        try:
            asked = await _read_request(request, max_body_bytes, parsers)
            _require_model(asked.model, model)
        except BaseException as error:
            worker.end(job, None, "invalid" if isinstance(error, ApiError) else "cancelled")
            if isinstance(error, ClientDisconnect):
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            raise
        watch = asyncio.create_task(_cancel_when_gone(request, worker, job))
        events = _events(worker, job, watch)
        readers.submit(worker.submit, job, asked)
        is_streamed = False
        try:
            first = await anext(events)
            if isinstance(first, ApiError):
                raise first
            if asked.stream:
                include_usage = asked.stream_options is not None and asked.stream_options.include_usage
                stream = _stream(job, model, first, events, include_usage)
                is_streamed = True
                return StreamingResponse(
                    stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
                )
            return JSONResponse((await _completion(job, model, first, events)).model_dump())
        except StopAsyncIteration:  # cancelled
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            if not is_streamed:
                await events.aclose()

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Response:
        if reason := worker.reason_unavailable():
            raise ApiError(503, reason)
        return Response()

    app.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.render(), media_type=worker.metrics.content_type)

    app.include_router(v1)
    return _with_schemas(app)


async def _read_request(request: Request, max_bytes: int, parsers: ThreadPoolExecutor) -> ChatRequest:
    try:
        body = await asyncio.wait_for(_read_body(request, max_bytes), _BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body took more than {_BODY_SECONDS:g} s") from error
    return await asyncio.get_running_loop().run_in_executor(parsers, ChatRequest.parse, body)


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


def _require_model(name: str, served: str) -> None:
    if name != served:
        message = f"there is no model {name!r:.200}; this server has {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _cancel_when_gone(request: Request, worker: Worker, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    worker.cancel(job)
    job.send(ApiError(_CLIENT_CLOSED_REQUEST, "the client has gone"))


async def _events(worker: Worker, job: Job, watch: asyncio.Task) -> AsyncIterator[Event]:
    """Yield a job's events up to its last; whoever stops listening cancels the job."""
    try:
        while True:
            event = await job.events.get()
            if isinstance(event, ApiError) and event.status == _CLIENT_CLOSED_REQUEST:
                return
            yield event
            if not isinstance(event, str):
                return
    finally:
        watch.cancel()
        worker.cancel(job)


async def _completion(job: Job, model: str, first: Event, events: AsyncIterator[Event]) -> ChatCompletion:
    text, event = "", first
    while isinstance(event, str):
        text += event
        event = await anext(events)
    if isinstance(event, ApiError):
        raise event
    choice = Choice(message=AnswerMessage(content=text), finish_reason=event.reason)
    return ChatCompletion(id=job.id, created=job.created, model=model, choices=[choice], usage=event.usage)


async def _stream(
    job: Job, model: str, first: Event, events: AsyncIterator[Event], include_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; an error after the first of them can only be told in another."""

    def chunk(delta: Delta, reason: str | None = None) -> str:
        choice = ChunkChoice(delta=delta, finish_reason=reason)
        return _sse(ChatChunk(id=job.id, created=job.created, model=model, choices=[choice]), include_usage)

    try:
        yield chunk(Delta(role="assistant", content=""))
        event = first
        while isinstance(event, str):
            yield chunk(Delta(content=event))
            event = await anext(events)
        if isinstance(event, Finished):
            yield chunk(Delta(), event.reason)
            if include_usage:
                usage = ChatChunk(id=job.id, created=job.created, model=model, choices=[], usage=event.usage)
                yield _sse(usage, include_usage)
        else:
            yield _sse(ErrorBody.model_validate(event.body), True)
        yield "data: [DONE]\n\n"
    except StopAsyncIteration as gone:  # nobody listens
        raise ClientDisconnect from gone
    finally:
        await events.aclose()


def _sse(content: BaseModel, with_usage: bool) -> str:
    """Format one event. Chunks have ``usage`` only where it was asked for; it is null in all but the last."""
    fields = content.model_dump()
    if not with_usage:
        fields.pop("usage", None)
    for choice in fields.get("choices", ()):
        choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
    return f"data: {json.dumps(fields)}\n\n"


async def _error(_: Request, error: Exception) -> JSONResponse:
    """Answer with an error, in OpenAI's form."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return JSONResponse(error.body, error.status, headers=error.headers)


def _body_schema() -> dict:
    """Describe for OpenAPI the body, which FastAPI does not read itself."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=ChatRequest.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _with_schemas(app: FastAPI) -> FastAPI:
    """Add the request's schema to those that FastAPI collects."""
    schema = ChatRequest.model_json_schema(ref_template=_REFERENCE)
    definitions = schema.pop("$defs", {})
    document = app.openapi()
    document["components"]["schemas"] |= {**definitions, ChatRequest.__name__: schema}
    return app
