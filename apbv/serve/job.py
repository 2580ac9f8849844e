"""A request on its way through the server: what its client hears of it, and what is recorded of it."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from .reading import ReadyRequest
from .requests import ApiError, FinishReason

# The moments of a record between which a duration lies.
DURATIONS = {
    "read": ("arrived", "ready"),
    "queue": ("ready", "began"),
    "prefill": ("began", "first_token"),
    "decode": ("first_token", "last_token"),
    "time_to_first_token": ("arrived", "first_token"),
    "total": ("arrived", "ended"),
}


@dataclass(kw_only=True)
class RequestRecord:
    """Everything that metrics, log and traces may tell of a request: nothing of what was asked or answered.

    Moments are seconds of ``time.monotonic()``; None: not reached.

    Attributes:
        id: the request's id, as its reply has it.
        traceparent: the trace that its client has begun, as in W3C's header of that name.
        arrived: the server began to read it.
        ready: it was read, and its place in the queue was taken.
        began: its prefill began.
        first_token: the first token was there, and with it the prefill ended.
        last_token: the last token was there.
        ended: the last that its client hears of it was sent.
        status: HTTP's status of its reply; 499 where the client had left.
        outcome: answered up to a ``stop`` or the ``length`` asked for, ``cancelled`` by the client, ``rejected``
            because of a full queue or a stopping server, ``invalid``, or ``failed``.
        prompt_tokens, completion_tokens: tokens that were prefilled, and of the answer so far.
        speculation: the figures of the draft (``apbv.speculate.Answered``); None: there was none.
        sampling: ``max_tokens``, ``temperature`` and ``top_p``, once they are known.
        transfer: the id under which its KV was offered to a decoder; None: it was not.
    """

    id: str
    traceparent: str | None = None
    arrived: float = field(default_factory=time.monotonic)
    ready: float | None = None
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    status: int = 200
    outcome: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: dict[str, Any] | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    transfer: str | None = None

    def seconds(self, name: str) -> float | None:
        """Return one of :data:`DURATIONS`; None if the request did not get so far."""
        earlier, later = (getattr(self, moment) for moment in DURATIONS[name])
        return None if earlier is None or later is None else later - earlier


@dataclass(frozen=True)
class Finished:
    """The last event of a request that was answered.

    Attributes:
        num_tokens: how many tokens all its answers have.
        kv_transfer_params: what another server needs to fetch the prompt's KV; None if it was not handed over.
    """

    num_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


TokenLogprob = tuple[str, float, list[tuple[str, float]]]


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer's text that has become certain, and the tokens since the piece before.

    Attributes:
        choice: which of the request's answers it is of.
        reason: why the answer ends here; None: it goes on.
        logprobs: of each of the tokens its text, its logarithmic probability, and the most probable texts in its
            place with theirs; empty where nobody asked.
    """

    text: str
    token_ids: list[int]
    choice: int = 0
    reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


Event = Piece | Finished | ApiError


class Job:
    """A request on its way, from its arrival to its last event; made in its client's event loop.

    It is *admitted* (its body and files are read), then *ready* (it waits for its prefill), then *running* (it
    holds KV). From each of these it may end: failed, answered, or cancelled, which takes effect at the next token.

    Args:
        request_id: how the client and the log call it; None: a name of its own.
        traceparent: the trace that its client has begun, as in the header of that name.

    Attributes:
        record: what may be told of it.
        events: pieces of the answer, and at last Finished or an ApiError.
        created: when it arrived, in seconds since 1970.
        is_cancelled: whether its client has gone.
        has_ended: whether its last event was sent.
        files: closes its files.
        read: what is to be done; None until it is ready.
        kv_bytes: what its KV takes at most, of prompt and answers on all hosts.
        num_finished: how many of its answers have ended.
    """

    def __init__(self, request_id: str | None = None, traceparent: str | None = None):
        self.record = RequestRecord(id=request_id or f"chatcmpl-{uuid.uuid4().hex}", traceparent=traceparent)
        self.created = int(time.time())
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.is_cancelled = self.has_ended = False
        self.files = ExitStack()
        self.read: ReadyRequest | None = None
        self.kv_bytes = self.num_finished = 0

    def send(self, event: Event) -> None:
        """Send an event; any thread may call this."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
