"""Prometheus metrics for GET /metrics, under vLLM's names where the meaning is the same."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...kv.offers import ENDINGS
from .record import RequestRecord

_TABLE = tomllib.loads(Path(__file__).with_name("prometheus.toml").read_text(encoding="utf-8"))
# Outcomes and vLLM's names for them; vLLM counts only requests that its engine has accepted.
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}
REFUSALS = ("rejected", "invalid")
_LABEL_VALUES = {
    "request_success": FINISHED_REASONS.values(),
    "requests_refused": REFUSALS,
    "kv_transfers": ENDINGS,
    "kv_transfer_bytes": ENDINGS,
}


class Metrics:
    """Metrics of one server, in their own registry; thread-safe.

    Args:
        model: the model name in requests; the label ``model_name`` of every metric.

    Attributes:
        model: the model name in requests.
        registry: of prometheus_client, with all metrics.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self.model = model
        self._gauges = {}
        for name, description in _TABLE["gauges"].items():
            self._gauges[name] = self._new(Gauge, name, description)
        self._host_gauges = []
        for name, description in _TABLE["host_gauges"].items():
            self._host_gauges.append(self._new(Gauge, name, description, ["host"]))
        self._counters = {}
        for name, entry in _TABLE["counters"].items():
            self._counters[name] = self._new(Counter, name, entry["what"])
        self._histograms = {}
        for name, entry in _TABLE["histograms"].items():
            buckets = _TABLE["buckets"][entry["buckets"]]
            self._histograms[name] = self._new(Histogram, name, entry["what"], buckets=buckets)
        for name, entry in _TABLE["labelled_counters"].items():
            counter = self._new(Counter, name, entry["what"], [entry["label"]])
            # A series that appears with its first event would hide that event from rate().
            for value in _LABEL_VALUES[name]:
                counter.labels(self.model, value)
            self._counters[name] = counter

    def set(self, **gauges: float) -> None:
        """Set gauges, by their names without the prefix."""
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def set_of_host(self, host: int, num_bytes: int, num_answers: int) -> None:
        """Set the bytes of KV that a host holds, and the number of answers that it decodes."""
        bytes_gauge, answers_gauge = self._host_gauges
        bytes_gauge.labels(self.model, host).set(num_bytes)
        answers_gauge.labels(self.model, host).set(num_answers)

    def observe_token_gap(self, seconds: float) -> None:
        """Observe the ITL of one token."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def observe_end(self, record: RequestRecord) -> None:
        """Count a finished request.

        Tokens and TTFT are counted for every request; the other times and lengths only for
        completed answers.
        """
        if record.outcome in REFUSALS:
            self._counters["requests_refused"].labels(self.model, record.outcome).inc()
        else:
            reason = FINISHED_REASONS[record.outcome]
            self._counters["request_success"].labels(self.model, reason).inc()
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["generation_tokens"].inc(record.completion_tokens)
        if record.speculation is not None:
            for name, entry in _TABLE["counters"].items():
                if "of" in entry:
                    self._counters[name].inc(record.speculation[entry["of"]])
        is_answer = record.outcome in ("stop", "length")
        for name, entry in _TABLE["histograms"].items():
            if "of" not in entry:
                continue
            seconds = record.seconds(entry["of"])
            if seconds is not None and (is_answer or entry["of"] == "time_to_first_token"):
                self._histograms[name].observe(seconds)
        if is_answer:
            self._histograms["request_prompt_tokens"].observe(record.prompt_tokens)
            self._histograms["request_generation_tokens"].observe(record.completion_tokens)

    def observe_transfer(self, how: str, num_bytes: int, seconds: float) -> None:
        """Count a KV transfer that has ended.

        Args:
            how: ``fetched`` by a decode instance, ``dropped`` because it will not be fetched,
                ``expired``, or ``closed`` with the server.
            num_bytes: its bytes on all hosts.
            seconds: how long it was available.
        """
        self._counters["kv_transfers"].labels(self.model, how).inc()
        self._counters["kv_transfer_bytes"].labels(self.model, how).inc(num_bytes)
        if how == "fetched":
            self._histograms["kv_transfer_wait_seconds"].observe(seconds)

    def total(self, name: str) -> float:
        """Return a counter's value, by its name without the prefix."""
        value = self.registry.get_sample_value(f"apbv:{name}_total", {"model_name": self.model})
        assert value is not None, f"there is no counter {name}"
        return value

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram's observations; None: there are none.

        Args:
            name: the histogram's name without the prefix.
        """
        labels = {"model_name": self.model}
        total = self.registry.get_sample_value(f"apbv:{name}_sum", labels)
        count = self.registry.get_sample_value(f"apbv:{name}_count", labels)
        if total is None or not count:
            return None
        return total / count

    def render(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _new(self, kind: type, name: str, description: str, labels: Sequence[str] = (), **options):
        """Make a metric; one without labels of its own is returned for this model."""
        all_labels = ["model_name", *labels]
        metric = kind(f"apbv:{name}", description, all_labels, registry=self.registry, **options)
        return metric if labels else metric.labels(self.model)
