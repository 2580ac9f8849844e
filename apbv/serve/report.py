"""Reports finished requests to Prometheus and the log."""

import logging

from .job import DURATIONS, RequestRecord
from .log import FIELDS, in_one_line, reason_in_one_line
from .metrics import Metrics

_logger = logging.getLogger(__name__)


def report(record: RequestRecord, metrics: Metrics) -> None:
    """Count a finished request, and log it; thread-safe."""
    metrics.observe_end(record)
    # Times are in seconds, None if it did not get so far.
    names = ("status", "outcome", "prompt_tokens", "completion_tokens")
    fields = {
        "request_id": record.id,
        "model": metrics.model,
        **{name: getattr(record, name) for name in names},
    }
    fields |= {
        f"{name}_seconds": (took := record.seconds(name)) and round(took, 6) for name in DURATIONS
    }
    if record.error is not None:
        fields |= {"error": in_one_line(record.error), "param": record.param}
    if record.speculation is not None:
        fields |= {name: record.speculation[name] for name in ("num_drafted", "num_accepted")}
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
        if (seconds := record.seconds(name)) is not None:
            parts.append(f"{what} {seconds:.3f} s")
    return ", ".join(parts)
