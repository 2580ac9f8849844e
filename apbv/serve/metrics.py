"""The figures that Prometheus reads from GET /metrics, called what vLLM calls them where they mean the same."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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

# What becomes of a request, and vLLM's name for it; it counts only what its engine has taken.
_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}
_REFUSALS = ("rejected", "invalid")
OUTCOMES = (*_FINISHED_REASONS, *_REFUSALS)
TRANSFER_ENDS = ("fetched", "dropped", "expired", "displaced", "closed")

_GAUGES = {
    "num_requests_running": "Requests that are prefilled or decoded",
    "num_requests_waiting": "Requests that are read, or wait for their prefill",
    "kv_cache_usage_perc": "KV held, of the most that may be; 1 is all",
    "kv_cache_bytes": "Bytes of KV held",
    "kv_offers_waiting": "KV of prompts that waits to be fetched by a decoder",
}
# With the figure of a request's draft that is counted in it, if one is.
_COUNTERS = {
    "prompt_tokens": ("Tokens of prefilled prompts",),
    "generation_tokens": ("Tokens of answers",),
    "spec_decode_num_drafts": ("Windows of drafted tokens", "rounds"),
    "spec_decode_num_draft_tokens": ("Drafted tokens", "num_drafted"),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted", "num_accepted"),
}
# With the duration of a request that is counted in it, if one is.
_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From arrival to the first token",
        _FIRST_TOKEN_SECONDS,
        "time_to_first_token",
    ),
    "inter_token_latency_seconds": ("From one token of an answer to its next", _GAP_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end", _REQUEST_SECONDS, "total"),
    "request_queue_time_seconds": ("From having been read to the prefill", _REQUEST_SECONDS, "queue"),
    "request_prefill_time_seconds": (
        "From the prefill's beginning to the first token",
        _REQUEST_SECONDS,
        "prefill",
    ),
    "request_decode_time_seconds": ("From the first token to the last", _REQUEST_SECONDS, "decode"),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer", _TOKENS),
    "kv_transfer_wait_seconds": ("From KV being offered to its having been fetched", _REQUEST_SECONDS),
}


class Metrics:
    """One server's figures, in a registry of their own; any thread may change and read them.

    Args:
        model: the name that requests give; the label ``model_name`` of every figure.

    Attributes:
        model: as given.
    """

    def __init__(self, model: str):
        self._registry, self.model = CollectorRegistry(), model
        self._gauges = {name: self._new(Gauge, name, what) for name, what in _GAUGES.items()}
        self._counters = {name: self._new(Counter, name, what) for name, (what, *_) in _COUNTERS.items()}
        self._histograms = {
            name: self._new(Histogram, name, what, buckets=buckets)
            for name, (what, buckets, *_) in _HISTOGRAMS.items()
        }
        ended, offered = "Requests that ended, by reason", "KV offered to decoders, by how that ended"
        self._finished = self._labelled("request_success", "finished_reason", ended, _FINISHED_REASONS.values())
        refused = "Requests that were refused, by reason"
        self._refused = self._labelled("requests_refused", "reason", refused, _REFUSALS)
        self._transfers = self._labelled("kv_transfers", "how", offered, TRANSFER_ENDS)
        num_bytes = "Bytes of it, by how that ended"
        self._transfer_bytes = self._labelled("kv_transfer_bytes", "how", num_bytes, TRANSFER_ENDS)

    def set(self, **gauges: float) -> None:
        """Set gauges, by their names without the prefix."""
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def observe_token_gap(self, seconds: float) -> None:
        """Count that an answer got its next token after so many seconds."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def observe_end(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Tokens and the time to the first one are counted whatever became of the rest of the answer; the other times
        and lengths are those of answers.
        """
        if record.outcome in _REFUSALS:
            self._refused.labels(self.model, record.outcome).inc()
        else:
            self._finished.labels(self.model, _FINISHED_REASONS[record.outcome]).inc()
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
        """Count KV that is not offered any more.

        Args:
            how: ``fetched`` by a decoder, ``dropped`` as nobody will fetch it, ``expired``, ``displaced`` for
                room, or ``closed`` with the server.
            num_bytes: its bytes on all hosts.
            seconds: how long it was offered.
        """
        self._transfers.labels(self.model, how).inc()
        self._transfer_bytes.labels(self.model, how).inc(num_bytes)
        if how == "fetched":
            self._histograms["kv_transfer_wait_seconds"].observe(seconds)

    def render(self) -> bytes:
        """Write the figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _new(self, kind: type, name: str, what: str, **options):
        figure = kind(f"apbv:{name}", what, ["model_name"], registry=self._registry, **options)
        return figure.labels(self.model)

    def _labelled(self, name: str, label: str, what: str, values: Iterable[str]) -> Counter:
        counter = Counter(f"apbv:{name}", what, ["model_name", label], registry=self._registry)
        for value in values:  # one that appears with its first event would hide that event from a rate
            counter.labels(self.model, value)
        return counter
