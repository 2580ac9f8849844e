"""The figures that Prometheus reads from GET /metrics, called what vLLM calls them where they mean the same."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .times import RequestTimes

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


class Metrics:
    """One server's figures, in a registry of their own; any thread may change and read them.

    Args:
        model: the name that requests give; the label ``model_name`` of every figure.

    Attributes:
        model: as given.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str):
        self._registry, self.model = CollectorRegistry(), model
        self._running = self._gauge("num_requests_running", "Requests that are prefilled or decoded")
        self._waiting = self._gauge("num_requests_waiting", "Requests that are read, or wait for their prefill")
        self._kv_used = self._gauge("kv_cache_usage_perc", "KV held, of the most that may be; 1 is all")
        self._kv_bytes = self._gauge("kv_cache_bytes", "Bytes of KV held")
        self._offers = self._gauge("kv_offers_waiting", "KV of prompts that waits to be fetched by a decoder")

        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prefilled prompts")
        self._generated_tokens = self._counter("generation_tokens", "Tokens of answers")
        self._finished = self._counter("request_success", "Requests that ended, by reason", "finished_reason")
        self._refused = self._counter("requests_refused", "Requests that were refused, by reason", "reason")
        for reason in _FINISHED_REASONS.values():
            self._finished.labels(model, reason)
        for reason in _REFUSALS:
            self._refused.labels(model, reason)

        self._to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_SECONDS
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds", "From one token of an answer to its next", _GAP_SECONDS
        )
        self._total = self._histogram("e2e_request_latency_seconds", "From arrival to the end", _REQUEST_SECONDS)
        self._queue = self._histogram(
            "request_queue_time_seconds", "From having been read to the prefill", _REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the prefill's beginning to the first token", _REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _REQUEST_SECONDS
        )
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answer_lengths = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)

        self._drafts = self._counter("spec_decode_num_drafts", "Windows of drafted tokens")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")

        self._transfers = self._counter("kv_transfers", "KV offered to decoders, by how that ended", "how")
        self._transfer_bytes = self._counter("kv_transfer_bytes", "Bytes of it, by how that ended", "how")
        self._transfer_seconds = self._histogram(
            "kv_transfer_wait_seconds", "From KV being offered to its having been fetched", _REQUEST_SECONDS
        )
        for how in TRANSFER_ENDS:
            self._transfers.labels(model, how)
            self._transfer_bytes.labels(model, how)

    def set_load(self, waiting: int, running: int) -> None:
        """Say how many requests wait and run now."""
        self._waiting.set(waiting)
        self._running.set(running)

    def set_kv(self, used_bytes: int, limit_bytes: int) -> None:
        """Say how many bytes of KV are held now, and how many may be; a limit of 0 bytes is no limit."""
        self._kv_bytes.set(used_bytes)
        self._kv_used.set(used_bytes / limit_bytes if limit_bytes else 0)

    def set_offers(self, waiting: int) -> None:
        """Say how many prompts' KV waits now to be fetched by a decoder."""
        self._offers.set(waiting)

    def observe_token_gap(self, seconds: float) -> None:
        """Count that an answer got its next token after so many seconds."""
        self._token_gap.observe(seconds)

    def observe_end(
        self,
        outcome: str,
        times: RequestTimes,
        prompt_tokens: int,
        completion_tokens: int,
        speculation: dict[str, Any] | None,
    ) -> None:
        """Count a request that has ended.

        Tokens and the time to the first one are counted whatever became of the rest of the answer; the other times
        and lengths are those of answers.

        Args:
            outcome: answered up to a ``stop`` or the ``length`` asked for, ``cancelled`` by the client,
                ``rejected`` because of a full queue or a stopping server, ``invalid``, or ``failed``.
            prompt_tokens, completion_tokens: tokens that were prefilled, and of the answer.
            speculation: the answer's figures of that name (see ``apbv.speculate.way.Answered``); None: no draft.
        """
        if outcome in _REFUSALS:
            self._refused.labels(self.model, outcome).inc()
        else:
            self._finished.labels(self.model, _FINISHED_REASONS[outcome]).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(completion_tokens)
        if speculation is not None:
            self._drafts.inc(speculation["rounds"])
            self._drafted.inc(speculation["num_drafted"])
            self._accepted.inc(speculation["num_accepted"])
        _observe(self._to_first_token, times.to_first_token)
        if outcome in ("stop", "length"):
            _observe(self._queue, times.queue)
            _observe(self._prefill, times.prefill)
            _observe(self._decode, times.decode)
            _observe(self._total, times.total)
            self._prompt_lengths.observe(prompt_tokens)
            self._answer_lengths.observe(completion_tokens)

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
            self._transfer_seconds.observe(seconds)

    def render(self) -> bytes:
        """Write the figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"apbv:{name}", what, ["model_name"], registry=self._registry).labels(self.model)

    def _counter(self, name: str, what: str, by: str | None = None) -> Counter:
        labels = ["model_name"] if by is None else ["model_name", by]
        counter = Counter(f"apbv:{name}", what, labels, registry=self._registry)
        return counter.labels(self.model) if by is None else counter

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"apbv:{name}", what, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self.model)


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
