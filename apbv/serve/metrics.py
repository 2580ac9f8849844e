"""The figures that Prometheus reads from GET /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
OUTCOMES = ("stop", "length", "cancelled", "rejected", "invalid", "failed")


class Metrics:
    """One server's figures, in a registry of their own.

    Attributes:
        ttft, latency: seconds from a request's arrival to its first token, and to its end; of answered requests.
        waiting, running: requests now.
        requests: by outcome: answered up to a ``stop`` or the ``length`` asked for, ``cancelled`` by the client,
            ``rejected`` because of a full queue or a stopping server, ``invalid``, or ``failed``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self):
        self._registry = registry = CollectorRegistry()
        self.ttft = Histogram(
            "apbv_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "apbv_request_latency_seconds", "From arrival to the end", buckets=_SECONDS, registry=registry
        )
        self.waiting = Gauge("apbv_requests_waiting", "Requests in the queue", registry=registry)
        self.running = Gauge("apbv_requests_running", "Requests in the engine", registry=registry)
        self.prompt_tokens = Counter("apbv_prompt_tokens", "Tokens of answered prompts", registry=registry)
        self.generated_tokens = Counter("apbv_generated_tokens", "Tokens of answers", registry=registry)
        self.drafted_tokens = Counter("apbv_draft_tokens", "Tokens that a draft proposed", registry=registry)
        self.accepted_tokens = Counter("apbv_draft_tokens_accepted", "Of them accepted", registry=registry)
        self.requests = Counter("apbv_requests", "Requests by outcome", ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    def render(self) -> bytes:
        """Write the figures in Prometheus' text format."""
        return generate_latest(self._registry)
