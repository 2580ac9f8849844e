"""Request state in the server: events for its client, and its record."""

import asyncio
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...request.result import FinishReason
from ..api_error import ApiError
from ..metrics.record import RequestRecord
from .ready_request import ReadyRequest


@dataclass(frozen=True)
class Finished:
    """Last event of an answered request.

    Attributes:
        num_tokens: the tokens of all its answers together.
        kv_transfer_params: parameters for another server to fetch the prompt's KV; None without a
            KV transfer.
    """

    num_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


TokenLogprob = tuple[str, float, list[tuple[str, float]]]


@dataclass(frozen=True)
class Piece:
    """Final piece of an answer's text, and the tokens since the previous piece.

    Attributes:
        choice: the index of the request's answer.
        reason: why the answer ends here; None: it continues.
        logprobs: for each token its text, its log probability, and the most probable alternatives
            with theirs; empty if not requested.
    """

    text: str
    token_ids: list[int]
    choice: int = 0
    reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


Event = Piece | Finished | ApiError


class Job:
    """Request state, from its arrival to its last event; created in its client's event loop.

    It is *admitted* (its body and files are read), then *ready* (it waits for its prefill), then
    *running* (it holds KV). From each of these it may end: failed, answered, or cancelled, which
    takes effect at the next token.

    Args:
        request_id: its id for the client and the log; None: one is generated.
        beside: an earlier job of the same HTTP request, whose queue gets this one's events, too.
        first_choice: the index of its first answer in the reply.

    Attributes:
        record: its data for metrics and log.
        events: pieces of the answer, and finally Finished or an ApiError.
        created: when it arrived, in seconds since 1970.
        is_cancelled: whether its client has disconnected.
        has_ended: whether its last event was sent.
        files: closes its files.
        kv_bytes: maximum size of its KV, of prompt and answers.
        is_short: whether its decode host prefills its prompt without the other hosts.
        decode_host: once it runs, the host that decodes its answers and holds this KV; None: every
            host holds some.
    """

    def __init__(
        self, request_id: str | None = None, beside: "Job | None" = None, first_choice: int = 0
    ):
        self.record = RequestRecord(id=request_id or f"chatcmpl-{uuid.uuid4().hex}")
        self.created = int(time.time())
        self.events: asyncio.Queue[Event] = asyncio.Queue() if beside is None else beside.events
        self.first_choice = first_choice
        self._loop = asyncio.get_running_loop()
        self.is_cancelled = False
        self.has_ended = False
        self.files = ExitStack()
        self._read: ReadyRequest | None = None
        self.kv_bytes = 0
        self.is_short = False
        self.decode_host: int | None = None

    @property
    def is_read(self) -> bool:
        """Whether its body and files were read."""
        return self._read is not None

    @property
    def read(self) -> ReadyRequest:
        """The request as read, once it was."""
        assert self._read is not None, "the request has not been read yet"
        return self._read

    @read.setter
    def read(self, read: ReadyRequest) -> None:
        self._read = read

    def send(self, event: Event) -> None:
        """Send an event; any thread may call this."""
        if isinstance(event, Piece) and self.first_choice:
            event = replace(event, choice=event.choice + self.first_choice)
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
