"""What is known of a request for metrics and log."""

import time
from dataclasses import dataclass, field
from typing import Any

# The moments of a record that bound a duration.
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
    """Request data for metrics and log, without the content of prompt and answer.

    Moments are seconds of ``time.monotonic()``; None: not reached.

    Attributes:
        id: the request's id, as its reply has it.
        arrived: the server began to read it.
        ready: it was read and entered the queue.
        began: its prefill began.
        first_token: the first token was available, which ends the prefill.
        last_token: the last token was available.
        ended: the last event was sent to its client.
        status: HTTP status of its reply; 499 if the client had disconnected.
        error, param: the message of its error and the field at fault, as its reply has them; None:
            there is none.
        outcome: answered up to a ``stop`` or the ``length`` asked for, ``cancelled`` by the client,
            ``rejected`` because of a full queue or a stopping server, ``invalid``, or ``failed``.
        prompt_tokens: tokens that were prefilled.
        completion_tokens: tokens of the answer so far.
        speculation: the metrics of the draft (``apbv.speculate.DecodedAnswer``); None: there was
            none.
        transfer: id of its KV transfer to a decode instance; None: there was none.
    """

    id: str
    arrived: float = field(default_factory=time.monotonic)
    ready: float | None = None
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    status: int = 200
    error: str | None = None
    param: str | None = None
    outcome: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: dict[str, Any] | None = None
    transfer: str | None = None

    def seconds(self, name: str) -> float | None:
        """Return one of :data:`DURATIONS`; None if the request did not get so far."""
        begin_name, end_name = DURATIONS[name]
        begin = getattr(self, begin_name)
        end = getattr(self, end_name)
        if begin is None or end is None:
            return None
        return end - begin
