"""Replies to the requests of both endpoints: at once, or as a stream of server-sent events."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect

from .job import Event, Finished, Job, Piece
from .protocol import (
    AnswerMessage,
    ApiError,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChunk,
    FinishReason,
    Reply,
    TextChoice,
    Usage,
)
from .requests import GenerationRequest, StreamOptions


class Replies(ABC):
    """The replies to one request, in the form of its endpoint.

    Attributes:
        answer: the type of its answers.
        kind: how an answer's id begins.
    """

    answer: ClassVar[type[Reply]]
    kind: ClassVar[str]

    def __init__(self, job: Job, request: GenerationRequest, model: str):
        self._job, self._with_token_ids = job, bool(request.return_token_ids)
        self._head = {"id": job.id, "created": job.created, "model": model}
        options = request.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._usage_in_all = self._with_usage and bool(options.continuous_usage_stats)
        self._num_told = 0

    async def whole(self, first: Event, events: AsyncIterator[Event]) -> dict[str, Any]:
        """Wait for the last of a job's events, and return the reply; raises ApiError where that is an error."""
        texts, token_ids, event = [], [], first
        while isinstance(event, Piece):
            texts.append(event.text)
            token_ids += event.token_ids
            event = await anext(events)
        if isinstance(event, ApiError):
            raise event
        return self._reply("".join(texts), self._shown([*token_ids, *event.rest]), event)

    async def stream(self, first: Event, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Yield server-sent events; an error after the first of them can only be told in another."""
        try:
            if opening := self._opening():
                yield self._sse(opening)
            event = first
            while isinstance(event, Piece):
                yield self._sse(self._chunk(event.text, event.token_ids), event.token_ids)
                event = await anext(events)
            if isinstance(event, Finished):
                yield self._sse(self._chunk("", event.rest, event.reason), event.rest)
                if self._with_usage:
                    yield _event({**self._chunk("", []), "choices": [], "usage": event.usage.model_dump()})
            else:
                yield _event(event.body)
            yield "data: [DONE]\n\n"
        except StopAsyncIteration as gone:  # nobody listens
            raise ClientDisconnect from gone
        finally:
            await events.aclose()

    def _sse(self, chunk: dict[str, Any], token_ids: list[int] | None = None) -> str:
        """Format a chunk, with the tokens in it, as an event.

        It has ``usage`` only where that was asked for; null in all but the last chunk, unless for all.
        """
        self._num_told += len(token_ids or ())
        if self._with_usage:
            usage = Usage.of(self._job.read.num_tokens, self._num_told).model_dump()
            chunk["usage"] = usage if self._usage_in_all else None
        return _event(chunk)

    def _shown(self, token_ids: list[int] | None) -> list[int] | None:
        """Return tokens where the request wants to see them."""
        return token_ids if self._with_token_ids else None

    @abstractmethod
    def _reply(self, text: str, token_ids: list[int] | None, finished: Finished) -> dict[str, Any]:
        """Return the reply to a request that is not streamed."""

    @abstractmethod
    def _opening(self) -> dict[str, Any] | None:
        """Return the event before all text; None: there is none."""

    @abstractmethod
    def _chunk(self, text: str, token_ids: list[int], reason: FinishReason | None = None) -> dict[str, Any]:
        """Return an event with some text, and at the end with the reason why there is no more."""


class ChatReplies(Replies):
    """The replies of /v1/chat/completions."""

    answer, kind = ChatCompletion, "chatcmpl"

    def _reply(self, text: str, token_ids: list[int] | None, finished: Finished) -> dict[str, Any]:
        message = AnswerMessage(content=text)
        return ChatCompletion(
            **self._head,
            choices=[Choice(message=message, finish_reason=finished.reason, token_ids=token_ids)],
            usage=finished.usage,
            prompt_token_ids=self._job.read.prompt_token_ids,
            kv_transfer_params=finished.kv_transfer_params,
        ).to_dict()

    def _opening(self) -> dict[str, Any]:
        choice = ChunkChoice(delta={"role": "assistant", "content": ""})
        prompt_token_ids = self._job.read.prompt_token_ids
        return ChatChunk(**self._head, choices=[choice], prompt_token_ids=prompt_token_ids).to_dict()

    def _chunk(self, text: str, token_ids: list[int], reason: FinishReason | None = None) -> dict[str, Any]:
        delta = {} if reason else {"content": text}
        choice = ChunkChoice(delta=delta, finish_reason=reason, token_ids=self._shown(token_ids))
        return ChatChunk(**self._head, choices=[choice]).to_dict()


class CompletionReplies(Replies):
    """The replies of /v1/completions."""

    answer, kind = Completion, "cmpl"

    def _reply(self, text: str, token_ids: list[int] | None, finished: Finished) -> dict[str, Any]:
        prompt_token_ids = self._job.read.prompt_token_ids
        choice = TextChoice(
            text=text, finish_reason=finished.reason, prompt_token_ids=prompt_token_ids, token_ids=token_ids
        )
        return Completion(
            **self._head,
            choices=[choice],
            usage=finished.usage,
            kv_transfer_params=finished.kv_transfer_params,
        ).to_dict()

    def _opening(self) -> dict[str, Any] | None:
        prompt_token_ids = self._job.read.prompt_token_ids
        if prompt_token_ids is None:
            return None
        choice = TextChoice(text="", prompt_token_ids=prompt_token_ids, token_ids=[])
        return CompletionChunk(**self._head, choices=[choice]).to_dict()

    def _chunk(self, text: str, token_ids: list[int], reason: FinishReason | None = None) -> dict[str, Any]:
        choice = TextChoice(text=text, finish_reason=reason, token_ids=self._shown(token_ids))
        return CompletionChunk(**self._head, choices=[choice]).to_dict()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
