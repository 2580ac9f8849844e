"""OpenTelemetry traces of requests, with vLLM's names and attributes."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .. import __version__
from .log import OncePerPeriod

if TYPE_CHECKING:
    from .job import RequestRecord

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_LAST_SPANS_SECONDS = 5.0
_WARNING_SECONDS = 60.0
_NANO = 10**9


def require_traceable(endpoint: str) -> None:
    """Check that traces can be sent to an address.

    Raises:
        ValueError: it is not a URL, or the exporter is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--otlp-traces-endpoint must be a URL such as http://host:4318/v1/traces, not {endpoint}"
        )
    try:
        missing = [name for name in _NEEDED if find_spec(name) is None]
    except ModuleNotFoundError as error:  # of a package that the name lies in
        missing = [error.name]
    if missing:
        raise ValueError(f"traces need {missing[0]}, which is not installed: pip install 'apbv[otel]'")


class Tracer:
    """Exports a trace of each request to a collector, by OTLP over HTTP, from a separate thread.

    If the collector is unreachable, spans are dropped with a log message; requests never wait for it.
    OpenTelemetry's own environment variables say the rest: ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``,
    ``OTEL_EXPORTER_OTLP_TRACES_HEADERS``, ….

    Args:
        endpoint: the collector's URL for traces.
        model: the name that requests give.
    """

    def __init__(self, endpoint: str, model: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {SERVICE_VERSION: __version__, "process.pid": os.getpid()}
        if "OTEL_SERVICE_NAME" not in os.environ:
            named[SERVICE_NAME] = "apbv"
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("apbv.serve", __version__)
        self._model = model
        # A collector that is away is tried again and again, and every time said to be.
        self._seldom = OncePerPeriod(_WARNING_SECONDS, (logging.WARNING, logging.ERROR))
        self._exporters_log = logging.getLogger(OTLPSpanExporter.__module__)
        self._exporters_log.addFilter(self._seldom)

    def trace(self, record: "RequestRecord") -> str:
        """Make the spans of a request that has ended, and return the trace's id as hex digits.

        The trace is the one that the request came with, or a new one. A request that ended in the middle of a
        phase has a span of it up to the end.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Of two clocks that are read together, one gives the date and the other the distance.
        offset = time.time_ns() - time.monotonic_ns()

        def moment(seconds: float) -> int:
            return offset + round(seconds * _NANO)

        carrier = {} if record.traceparent is None else {"traceparent": record.traceparent}
        whole = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_attributes(self._model, record),
            start_time=moment(record.arrived),
        )
        if record.status >= 500:
            whole.set_status(Status(StatusCode.ERROR, record.outcome))
        inside = set_span_in_context(whole)
        for name, began, ended in _phases(record):
            span = self._tracer.start_span(name, context=inside, start_time=moment(began))
            span.end(moment(ended))
        whole.end(moment(record.ended))
        return format_trace_id(whole.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(_LAST_SPANS_SECONDS)
        self._exporters_log.removeFilter(self._seldom)


def _phases(record: "RequestRecord") -> Iterator[tuple[str, float, float]]:
    """Yield the name, beginning and end of each phase that a request reached."""
    last = ("decode", record.first_token, record.last_token)
    if record.transfer is not None:
        last = ("hand_over", record.first_token, record.ended)
    before = (("read", record.arrived, record.ready), ("queue", record.ready, record.began))
    for name, began, ended in (*before, ("prefill", record.began, record.first_token), last):
        if began is not None:
            yield name, began, record.ended if ended is None else ended


def _attributes(model: str, record: "RequestRecord") -> dict[str, str | int | float | list[str]]:
    """Return a request's attributes by the semantic conventions for generative AI, as vLLM names them."""
    attributes = {
        "gen_ai.request.id": record.id,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.time_in_queue": record.seconds("queue"),
        "gen_ai.latency.time_to_first_token": record.seconds("time_to_first_token"),
        "gen_ai.latency.time_in_model_prefill": record.seconds("prefill"),
        "gen_ai.latency.time_in_model_decode": record.seconds("decode"),
        "gen_ai.latency.e2e": record.seconds("total"),
        "http.response.status_code": record.status,
        "apbv.outcome": record.outcome,
        **{f"gen_ai.request.{name}": value for name, value in record.sampling.items()},
    }
    if record.outcome in ("stop", "length"):
        attributes["gen_ai.response.finish_reasons"] = [record.outcome]
    if record.speculation is not None:
        for name in ("num_drafted", "num_accepted"):
            attributes[f"apbv.speculation.{name}"] = record.speculation[name]
    if record.transfer is not None:
        attributes["apbv.kv_transfer.id"] = record.transfer
    return {name: value for name, value in attributes.items() if value is not None}
