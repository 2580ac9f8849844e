"""Replies to the requests of both endpoints: at once, or as a stream of server-sent events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect

from .job import Event, Finished, Job, Piece
from .requests import ApiError, ChatRequest, FinishReason, GenerationRequest, StreamOptions


class Replies:
    """The replies to one request: OpenAI's objects, with vLLM's token ids and KV transfer parameters."""

    def __init__(self, job: Job, request: GenerationRequest, model: str):
        self._job, self._is_chat = job, isinstance(request, ChatRequest)
        self._with_token_ids = bool(request.return_token_ids)
        self._head = {"id": job.record.id, "created": job.created, "model": model}
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
        text, prompt_token_ids = "".join(texts), self._job.read.prompt_token_ids
        body = {"text": text}
        if self._is_chat:
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(body, [*token_ids, *event.rest], event.reason)
        reply = {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(event.num_tokens),
        }
        if prompt_token_ids is not None:
            (reply if self._is_chat else choice)["prompt_token_ids"] = prompt_token_ids
        if event.kv_transfer_params is not None:
            reply["kv_transfer_params"] = event.kv_transfer_params
        return reply

    async def stream(self, first: Event, events: AsyncIterator[Event]) -> AsyncIterator[str]:
        """Yield server-sent events; an error after the first of them can only be told in another."""
        try:
            if opening := self._opening():
                yield self._sse(opening, [])
            event = first
            while isinstance(event, Piece):
                yield self._sse(self._chunk(event.text, event.token_ids), event.token_ids)
                event = await anext(events)
            if isinstance(event, Finished):
                yield self._sse(self._chunk("", event.rest, event.reason), event.rest)
                if self._with_usage:
                    usage = self._usage(event.num_tokens)
                    yield _event({**self._chunk("", []), "choices": [], "usage": usage})
            else:
                yield _event(event.body)
            yield "data: [DONE]\n\n"
        except StopAsyncIteration as gone:  # nobody listens
            raise ClientDisconnect from gone
        finally:
            await events.aclose()

    def _opening(self) -> dict[str, Any] | None:
        """Return the event before all text; None: there is none."""
        prompt_token_ids = self._job.read.prompt_token_ids
        given = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
        if self._is_chat:
            chunk = self._chunk("", [])
            chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            chunk["choices"][0].pop("token_ids", None)
            return {**chunk, **given}
        if not given:
            return None
        chunk = self._chunk("", [])
        chunk["choices"][0] |= given
        return chunk

    def _chunk(self, text: str, token_ids: list[int], reason: FinishReason | None = None) -> dict[str, Any]:
        """Return an event with some text, and at the end with the reason why there is no more."""
        body = {"text": text}
        if self._is_chat:
            body = {"delta": {} if reason else {"content": text}}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [self._choice(body, token_ids, reason)]}

    def _choice(self, body: dict[str, Any], token_ids: list[int], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": reason}
        return {**choice, "token_ids": token_ids} if self._with_token_ids else choice

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = self._job.read.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
        }

    def _sse(self, chunk: dict[str, Any], token_ids: list[int]) -> str:
        """Format a chunk, with the tokens in it, as an event.

        It has ``usage`` only where that was asked for; null in all but the last chunk, unless for all.
        """
        self._num_told += len(token_ids)
        if self._with_usage:
            chunk["usage"] = self._usage(self._num_told) if self._usage_in_all else None
        return _event(chunk)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
