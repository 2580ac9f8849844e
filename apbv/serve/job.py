"""This module defines a job: a request on its way through the server, and what its client hears of it."""

import asyncio
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from .protocol import ApiError, FinishReason, Usage
from .reading import ReadRequest
from .times import EndedRequest, RequestTimes

_CLIENT_LEFT = 499  # as nginx has it


@dataclass(frozen=True)
class Finished:
    """The last event of a request that was answered.

    Attributes:
        reason: why the answer ended.
        usage: tokens of prompt and answer.
        rest: the tokens since the last piece, which have no text.
        kv_transfer_params: what another server needs to fetch the prompt's KV; None where it was not handed over.
    """

    reason: FinishReason
    usage: Usage
    rest: list[int]
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Piece:
    """A Piece is a stretch of an answer's text.

    Attributes:
        text: what has become certain.
        token_ids: the tokens since the piece before.
    """

    text: str
    token_ids: list[int]


Event = Piece | Finished | ApiError


class Job:
    """A Job is a request on its way, from its arrival to its last event; made in its client's event loop.

    It is *admitted* (its body and files are read), then *ready* (it waits for its prefill), then *running* (it
    holds KV). From each of these it may end: failed, answered, or cancelled, which takes effect at the next token.

    Args:
        request_id: how the client and the log call it; None: a name of its own.
        kind: how such a name begins.
        traceparent: the trace that its client has begun, as in the header of that name.

    Attributes:
        events: pieces of the answer, and at last Finished or an ApiError.
        created: when it arrived, in seconds since 1970.
        times: when what happened to it.
        is_streamed: whether its client wants the text as it comes, and not only all of it.
        is_cancelled: whether its client has gone.
        has_ended: whether its last event was sent.
        files: closes its files.
        read: what is to be done; None until it is ready.
        kv_bytes: what its KV takes at most, of prompt and answer on all hosts.
        num_tokens: how many tokens of its answer there are.
        speculation: the figures of its draft.
        transfer: the transfer by which its KV was offered; None where it was not.
    """

    def __init__(self, request_id: str | None = None, kind: str = "chatcmpl", traceparent: str | None = None):
        self.id = request_id or f"{kind}-{uuid.uuid4().hex}"
        self.traceparent = traceparent
        self.created = int(time.time())
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.times = RequestTimes()
        self.is_streamed = self.is_cancelled = self.has_ended = False
        self.files = ExitStack()
        self.read: ReadRequest | None = None
        self.kv_bytes = self.num_tokens = 0
        self.speculation: dict[str, Any] | None = None
        self.transfer: str | None = None

    def send(self, event: Event) -> None:
        """Send an event; any thread may call this."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def ended(self, event: Finished | ApiError | None, outcome: str) -> EndedRequest:
        """Return what may be told of the request now that this was its last event, None where its client left."""
        order = None if self.read is None else self.read.order
        return EndedRequest(
            id=self.id,
            status=200 if isinstance(event, Finished) else _CLIENT_LEFT if event is None else event.status,
            outcome=outcome,
            times=self.times,
            prompt_tokens=0 if self.times.first_token is None else self.read.num_tokens,
            completion_tokens=self.num_tokens,
            speculation=self.speculation,
            sampling={} if order is None else order.sampling_figures,
            transfer=self.transfer,
            traceparent=self.traceparent,
        )
