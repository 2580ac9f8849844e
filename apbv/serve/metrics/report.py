"""Reports finished requests to Prometheus and the log."""

import logging

from .log import FIELDS, in_one_line, reason_in_one_line
from .prometheus import Metrics
from .record import DURATIONS, RequestRecord

_logger = logging.getLogger(__name__)


def report(record: RequestRecord, metrics: Metrics) -> None:
    """Count a finished request, and log it; thread-safe."""
    metrics.observe_end(record)
    fields = {
        "request_id": record.id,
        "model": metrics.model,
        "status": record.status,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }
    for name in DURATIONS:
        seconds = record.seconds(name)
        # None if the request did not get so far.
        fields[f"{name}_seconds"] = None if seconds is None else round(seconds, 6)
    if record.error is not None:
        fields["error"] = in_one_line(record.error)
        fields["param"] = record.param
    if record.speculation is not None:
        fields["num_drafted"] = record.speculation["num_drafted"]
        fields["num_accepted"] = record.speculation["num_accepted"]
    if record.transfer is not None:
        fields["transfer"] = record.transfer
    _logger.info("%s %s", record.id, _in_words(record), extra={FIELDS: fields})


def _in_words(record: RequestRecord) -> str:
    parts = [f"{record.status} {record.outcome}"]
    if record.status == 200:
        parts.append(f"{record.prompt_tokens} + {record.completion_tokens} tokens")
    if record.error is not None:
        parts[0] += f" ({reason_in_one_line(record.error, record.param)})"
    if record.transfer is not None:
        parts.append(f"KV offered as {record.transfer}")
    for name, what in (("time_to_first_token", "first token"), ("total", "total")):
        seconds = record.seconds(name)
        if seconds is not None:
            parts.append(f"{what} {seconds:.3f} s")
    return ", ".join(parts)
