"""When what happened to a request, and what became of it: metrics, log and traces tell the same."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass
class RequestTimes:
    """A RequestTimes holds the moments of one request, as seconds of ``time.monotonic()``; None: not reached.

    Attributes:
        arrived: the server began to read it.
        ready: it was read, and its place in the queue was taken.
        began: its prefill began.
        first_token: the first token was there, and with it the prefill ended.
        last_token: the last token was there.
        ended: the last that its client hears of it was sent.
    """

    arrived: float = field(default_factory=time.monotonic)
    ready: float | None = None
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    @property
    def reading(self) -> float | None:
        """The seconds of reading it: its body, its files and the number of its tokens."""
        return _between(self.arrived, self.ready)

    @property
    def queue(self) -> float | None:
        """The seconds of waiting for its prefill."""
        return _between(self.ready, self.began)

    @property
    def prefill(self) -> float | None:
        """The seconds from the prefill's beginning to the first token."""
        return _between(self.began, self.first_token)

    @property
    def decode(self) -> float | None:
        """The seconds from the first token to the last."""
        return _between(self.first_token, self.last_token)

    @property
    def to_first_token(self) -> float | None:
        """The seconds from its arrival to the first token."""
        return _between(self.arrived, self.first_token)

    @property
    def total(self) -> float | None:
        """The seconds from its arrival to its end."""
        return _between(self.arrived, self.ended)


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """An EndedRequest is what may be told of a request that has ended: nothing of what was asked or answered.

    Attributes:
        id: the request's id, as its reply has it.
        status: HTTP's status of its reply; 499 where the client had left.
        outcome: as of :meth:`apbv.serve.metrics.Metrics.observe_end`.
        times: when what happened.
        prompt_tokens, completion_tokens: tokens that were prefilled, and of the answer.
        speculation: the figures of the draft; None: there was none.
        sampling: ``max_tokens``, ``temperature`` and ``top_p``, of those that are known.
        transfer: the id under which its KV was offered to a decoder; None: it was not.
        traceparent: the trace that its client has begun, as in W3C's header of that name.
    """

    id: str
    status: int
    outcome: str
    times: RequestTimes
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: dict[str, Any] | None = None
    sampling: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    transfer: str | None = None
    traceparent: str | None = None


def _between(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier
