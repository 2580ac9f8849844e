"""What is told of a request once it has ended: to Prometheus, to the log and to a collector of traces."""

import logging
from typing import Any

from .log import FIELDS
from .metrics import Metrics
from .times import EndedRequest
from .tracing import Tracer

_logger = logging.getLogger(__name__)


class Reporter:
    """A Reporter tells of requests that have ended; any thread may call it.

    Args:
        metrics: the figures that count them.
        tracer: sends a trace of each; None: there are no traces.

    Attributes:
        metrics: as above.
    """

    def __init__(self, metrics: Metrics, tracer: Tracer | None = None):
        self.metrics, self._tracer = metrics, tracer

    def tell(self, request: EndedRequest) -> None:
        """Count a request, trace it, and write its line of the log."""
        self.metrics.observe_end(
            request.outcome, request.times, request.prompt_tokens, request.completion_tokens, request.speculation
        )
        fields = log_fields(self.metrics.model, request)
        if self._tracer is not None:
            fields["trace_id"] = self._tracer.trace(request)
        _logger.info("%s %s", request.id, _in_words(request), extra={FIELDS: fields})


def log_fields(model: str, request: EndedRequest) -> dict[str, Any]:
    """Return what a structured log says of a request; times are in seconds, None where it did not get so far."""
    times = request.times
    fields = {
        "request_id": request.id,
        "model": model,
        "status": request.status,
        "outcome": request.outcome,
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.completion_tokens,
        "read_seconds": times.reading,
        "queue_seconds": times.queue,
        "prefill_seconds": times.prefill,
        "decode_seconds": times.decode,
        "time_to_first_token_seconds": times.to_first_token,
        "total_seconds": times.total,
    }
    if request.speculation is not None:
        fields |= {name: request.speculation[name] for name in ("num_drafted", "num_accepted")}
    if request.transfer is not None:
        fields["transfer"] = request.transfer
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


def _in_words(request: EndedRequest) -> str:
    parts = [f"{request.status} {request.outcome}"]
    if request.status == 200:
        parts.append(f"{request.prompt_tokens} + {request.completion_tokens} tokens")
    if request.transfer is not None:
        parts.append(f"KV offered as {request.transfer}")
    if (seconds := request.times.to_first_token) is not None:
        parts.append(f"first token {seconds:.3f} s")
    if (seconds := request.times.total) is not None:
        parts.append(f"total {seconds:.3f} s")
    return ", ".join(parts)
