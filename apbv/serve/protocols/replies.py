"""Replies of both endpoints, whole or as a stream of server-sent events."""

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

from ...decode.thoughts import ThoughtParser
from ..api_error import ApiError
from ..control.job import Event, Finished, Job, Piece
from ..formats.tool_calls import ToolCallParser
from .requests import ChatRequest, GenerationRequest, StreamOptions


class _Parsed(NamedTuple):
    """What a piece adds to its answer.

    Attributes:
        thought: to its thought.
        text: to its text.
        calls: complete calls of tools.
    """

    thought: str
    text: str
    calls: list[dict[str, Any]]


class Replies:
    """Builds the replies to one request.

    They are OpenAI's objects, with vLLM's token ids and KV transfer parameters.

    Args:
        jobs: one for each of its prompts.
    """

    def __init__(self, jobs: list[Job], request: GenerationRequest, model: str):
        self._jobs = jobs
        self._is_chat = isinstance(request, ChatRequest)
        self._num_answers = request.num_answers
        self._with_token_ids = request.return_token_ids
        self._with_logprobs = request.num_logprobs is not None
        self._head = {"id": jobs[0].record.id, "created": jobs[0].created, "model": model}
        options = request.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._usage_in_all = self._with_usage and bool(options.continuous_usage_stats)
        self._num_sent = 0
        self._may_call = request.may_call
        self._parsers: dict[int, ToolCallParser] = {}  # of each answer that may call tools
        self._thought_parsers: dict[int, ThoughtParser] = {}  # of each that may begin with one
        self._num_chars: Counter[int] = Counter()  # of each answer's tokens so far

    async def whole(self, first: Event, events: AsyncIterator[Event]) -> dict[str, Any]:
        """Wait for a job's last event, and return the reply.

        Raises ApiError if that is an error.
        """
        num_choices = len(self._jobs) * self._num_answers
        pieces: dict[int, list[Piece]] = {choice: [] for choice in range(num_choices)}
        event = first
        while isinstance(event, Piece):
            pieces[event.choice].append(event)
            event = await anext(events)
        if isinstance(event, ApiError):
            raise event
        choices = []
        for of_answer in pieces.values():
            answer = _joined(of_answer)
            parsed = self._parsed(answer)
            text = parsed.text
            if self._is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": text}
                if parsed.calls or self._has_thought(answer.choice):
                    message["content"] = text or None
                message |= _reasoning(parsed.thought)
                if parsed.calls:
                    message["tool_calls"] = parsed.calls
                message["refusal"] = None
                body: dict[str, Any] = {"message": message}
            else:
                body = {"text": text}
            choices.append(self._choice(body, answer))
        reply = self._object("chat.completion", choices)
        reply["usage"] = self._usage(event.num_tokens)
        if event.kv_transfer_params is not None:
            reply["kv_transfer_params"] = event.kv_transfer_params
        return self._with_prompt(reply)

    async def stream(self, first: Event, events: AsyncGenerator[Event]) -> AsyncIterator[str]:
        """Yield server-sent events; an error after the first is sent as another event."""
        try:
            event = first
            opened = set()
            while isinstance(event, Piece):
                if (self._is_chat or self._with_token_ids) and event.choice not in opened:
                    opened.add(event.choice)
                    yield self._opening(event.choice)
                self._num_sent += len(event.token_ids)
                yield self._sse(self._chunk(self._choice(self._delta(event), event)))
                event = await anext(events)
            if not isinstance(event, Finished):
                yield _event(event.body)
            elif self._with_usage:
                yield _event({**self._chunk(), "usage": self._usage(event.num_tokens)})
            yield "data: [DONE]\n\n"
        except StopAsyncIteration:  # no client is left
            return
        finally:
            await events.aclose()

    def _opening(self, choice: int) -> str:
        """Return the event that opens an answer, before its first text."""
        opening: dict[str, Any] = {"index": choice}
        if self._is_chat:
            opening["delta"] = {"role": "assistant", "content": ""}
        else:
            opening["text"] = ""
        opening["logprobs"] = None
        opening["finish_reason"] = None
        return self._sse(self._with_prompt(self._chunk(opening)))

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """Return the text and calls that a piece adds to its answer, as a choice's field."""
        thought, text, calls = self._parsed(piece)
        if not self._is_chat:
            return {"text": text}
        delta: dict[str, Any] = _reasoning(thought)
        # A last piece, a part of a thought or of a call may have no text.
        is_separated = self._may_call or piece.choice in self._thought_parsers
        if text or not (piece.reason or is_separated):
            delta["content"] = text
        if calls:
            first_index = self._parsers[piece.choice].num_calls - len(calls)
            delta["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(calls, first_index)
            ]
        return {"delta": delta}

    def _parsed(self, piece: Piece) -> _Parsed:
        """Return the parts of its answer that a piece adds to."""
        thought = ""
        text = piece.text
        choice = piece.choice
        is_last = piece.reason is not None
        job = self._jobs[0]
        if self._is_chat and job.is_read and job.read.thoughts is not None:
            if choice not in self._thought_parsers:
                self._thought_parsers[choice] = job.read.thought_parser()
            thought, text = self._thought_parsers[choice].add(text, is_last)
        calls: list[dict[str, Any]] = []
        if self._may_call:
            if choice not in self._parsers:
                self._parsers[choice] = job.read.call_parser()
            text, calls = self._parsers[choice].add(text, is_last)
        return _Parsed(thought, text, calls)

    def _has_thought(self, choice: int) -> bool:
        """Return whether an answer has begun with a thought."""
        parser = self._thought_parsers.get(choice)
        return parser is not None and parser.has_thought

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": kind if self._is_chat else "text_completion",
            "choices": choices,
        }

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", list(choices))

    def _with_prompt(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Add the prompt's tokens to a reply if requested: for a raw prompt to its choices."""
        if not self._with_token_ids:
            return reply
        if self._is_chat:  # which has one prompt
            reply["prompt_token_ids"] = self._jobs[0].read.token_ids
            return reply
        for choice in reply["choices"]:
            job = self._jobs[choice["index"] // self._num_answers]
            choice["prompt_token_ids"] = job.read.token_ids
        return reply

    def _choice(self, body: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """Return a choice of a reply: its text, or what is new of it, and why it ends here."""
        reason: str | None = piece.reason
        parser = self._parsers.get(piece.choice)
        if reason == "stop" and parser is not None and parser.num_calls:
            reason = "tool_calls"
        choice = {
            "index": piece.choice,
            **body,
            "logprobs": self._logprobs(piece) if self._with_logprobs else None,
            "finish_reason": reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self._is_chat:
            described = [
                {**_token(text, value), "top_logprobs": [_token(*other) for other in top]}
                for text, value, top in piece.logprobs
            ]
            return {"content": described, "refusal": None}
        offsets = []
        for text, _, _ in piece.logprobs:
            offsets.append(self._num_chars[piece.choice])
            self._num_chars[piece.choice] += len(text)
        return {
            "text_offset": offsets,
            "tokens": [text for text, _, _ in piece.logprobs],
            "token_logprobs": [value for _, value, _ in piece.logprobs],
            "top_logprobs": [{text: value, **dict(top)} for text, value, top in piece.logprobs],
        }

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = sum(job.read.num_tokens for job in self._jobs if job.is_read)
        total = prompt + num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": num_tokens, "total_tokens": total}

    def _sse(self, chunk: dict[str, Any]) -> str:
        """Format a chunk as an event.

        It has ``usage`` only where that was asked for; null in all but the last chunk, unless for
        all.
        """
        if self._with_usage:
            chunk["usage"] = self._usage(self._num_sent) if self._usage_in_all else None
        return _event(chunk)


def _reasoning(thought: str) -> dict[str, Any]:
    """Return a thought by both of its names, vLLM's and the older one; nothing if it is empty."""
    return {"reasoning": thought, "reasoning_content": thought} if thought else {}


def _joined(pieces: list[Piece]) -> Piece:
    """Join all pieces of one answer."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].choice,
        pieces[-1].reason,
        [told for piece in pieces for told in piece.logprobs],
    )


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
