"""Prometheus metrics for GET /metrics, under vLLM's names where the meaning is the same."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..kv.offers import ENDINGS
from .job import RequestRecord

# vLLM's, so that both can be shown in one panel.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_GAP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKENS = tuple(mantissa * 10**exponent for exponent in range(7) for mantissa in (1, 2, 5))

# Outcomes and vLLM's names for them; vLLM counts only requests that its engine has accepted.
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}
REFUSALS = ("rejected", "invalid")

_GAUGES = {
    "num_requests_running": "Requests being prefilled or decoded",
    "num_requests_waiting": "Requests being read or waiting for prefill",
    "kv_cache_usage_perc": "KV cache usage, mean of the hosts that decode; 1 means full",
    "kv_cache_bytes": "KV cache in bytes",
    "kv_offers_waiting": "Prompts whose KV waits to be fetched by a decode instance",
}
_OF_HOSTS = (
    ("host_kv_cache_bytes", "KV cache in bytes, by the host that decodes from it"),
    ("host_answers", "Answers being prefilled or decoded, by the host that decodes them"),
)
# With the field of a request's speculation record that it counts, if any.
_COUNTERS = {
    "prompt_tokens": ("Prefilled prompt tokens",),
    "generation_tokens": ("Generated tokens",),
    "spec_decode_num_drafts": ("Drafts, one per round", "rounds"),
    "spec_decode_num_draft_tokens": ("Draft tokens", "num_drafted"),
    "spec_decode_num_accepted_tokens": ("Accepted draft tokens", "num_accepted"),
}
# With the duration of a request that it observes, if any.
_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Time to first token (TTFT), from arrival",
        _FIRST_TOKEN_SECONDS,
        "time_to_first_token",
    ),
    "inter_token_latency_seconds": ("Inter-token latency (ITL)", _GAP_SECONDS),
    "e2e_request_latency_seconds": ("End-to-end latency, from arrival", _REQUEST_SECONDS, "total"),
    "request_queue_time_seconds": ("Time in the queue, after the request was read", _REQUEST_SECONDS, "queue"),
    "request_prefill_time_seconds": ("Prefill time, to the first token", _REQUEST_SECONDS, "prefill"),
    "request_decode_time_seconds": ("Decoding time, from first to last token", _REQUEST_SECONDS, "decode"),
    "request_prompt_tokens": ("Prompt tokens per request", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request", _TOKENS),
    "kv_transfer_wait_seconds": ("Time from export of KV until it was fetched", _REQUEST_SECONDS),
}


class Metrics:
    """Metrics of one server, in their own registry; thread-safe.

    Args:
        model: the model name in requests; the label ``model_name`` of every metric.

    Attributes:
        model: as given.
    """

    def __init__(self, model: str):
        self._registry, self.model = CollectorRegistry(), model
        self._gauges = {name: self._new(Gauge, name, what) for name, what in _GAUGES.items()}
        labels = ["model_name", "host"]
        self._of_hosts = [Gauge(f"apbv:{name}", what, labels, registry=self._registry) for name, what in _OF_HOSTS]
        self._counters = {name: self._new(Counter, name, what) for name, (what, *_) in _COUNTERS.items()}
        self._histograms = {
            name: self._new(Histogram, name, what, buckets=buckets)
            for name, (what, buckets, *_) in _HISTOGRAMS.items()
        }
        ended, offered = "Finished requests, by reason", "KV transfers, by how they ended"
        self._finished = self._labelled("request_success", "finished_reason", ended, FINISHED_REASONS.values())
        refused = "Rejected requests, by reason"
        self._refused = self._labelled("requests_refused", "reason", refused, REFUSALS)
        self._transfers = self._labelled("kv_transfers", "how", offered, ENDINGS)
        num_bytes = "Bytes of KV transfers, by how they ended"
        self._transfer_bytes = self._labelled("kv_transfer_bytes", "how", num_bytes, ENDINGS)

    def set(self, **gauges: float) -> None:
        """Set gauges, by their names without the prefix."""
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def set_of_host(self, host: int, num_bytes: int, num_answers: int) -> None:
        """Set the bytes of KV that a host holds, and the number of answers that it decodes."""
        for gauge, value in zip(self._of_hosts, (num_bytes, num_answers), strict=True):
            gauge.labels(self.model, host).set(value)

    def observe_token_gap(self, seconds: float) -> None:
        """Observe the ITL of one token."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def observe_end(self, record: RequestRecord) -> None:
        """Count a finished request.

        Tokens and TTFT are counted for every request; the other times and lengths only for completed answers.
        """
        if record.outcome in REFUSALS:
            self._refused.labels(self.model, record.outcome).inc()
        else:
            self._finished.labels(self.model, FINISHED_REASONS[record.outcome]).inc()
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["generation_tokens"].inc(record.completion_tokens)
        if record.speculation is not None:
            for name, (_, *figures) in _COUNTERS.items():
                for figure in figures:
                    self._counters[name].inc(record.speculation[figure])
        is_answer = record.outcome in ("stop", "length")
        for name, (_, _, *durations) in _HISTOGRAMS.items():
            for duration in durations:
                seconds = record.seconds(duration)
                if seconds is not None and (is_answer or duration == "time_to_first_token"):
                    self._histograms[name].observe(seconds)
        if is_answer:
            self._histograms["request_prompt_tokens"].observe(record.prompt_tokens)
            self._histograms["request_generation_tokens"].observe(record.completion_tokens)

    def observe_transfer(self, how: str, num_bytes: int, seconds: float) -> None:
        """Count a KV transfer that has ended.

        Args:
            how: ``fetched`` by a decode instance, ``dropped`` because it will not be fetched, ``expired``,
                or ``closed`` with the server.
            num_bytes: its bytes on all hosts.
            seconds: how long it was available.
        """
        self._transfers.labels(self.model, how).inc()
        self._transfer_bytes.labels(self.model, how).inc(num_bytes)
        if how == "fetched":
            self._histograms["kv_transfer_wait_seconds"].observe(seconds)

    def total(self, name: str) -> float:
        """Return a counter's value, by its name without the prefix."""
        return self._registry.get_sample_value(f"apbv:{name}_total", {"model_name": self.model})

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram's observations, by its name without the prefix; None: there are none."""
        labels = {"model_name": self.model}
        total, count = (self._registry.get_sample_value(f"apbv:{name}_{of}", labels) for of in ("sum", "count"))
        return total / count if count else None

    def render(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _new(self, kind: type, name: str, what: str, **options):
        figure = kind(f"apbv:{name}", what, ["model_name"], registry=self._registry, **options)
        return figure.labels(self.model)

    def _labelled(self, name: str, label: str, what: str, values: Iterable[str]) -> Counter:
        counter = Counter(f"apbv:{name}", what, ["model_name", label], registry=self._registry)
        for value in values:  # a series that appears with its first event would hide that event from rate()
            counter.labels(self.model, value)
        return counter
