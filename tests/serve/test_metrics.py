"""The figures of /metrics: their names, what counts, and what does not."""

import pytest

from apbv.serve.metrics import OUTCOMES, TRANSFER_ENDS, Metrics
from apbv.serve.times import RequestTimes

from servers import metric_in

ANSWERED = RequestTimes(arrived=10.0, ready=10.5, began=12.5, first_token=16.5, last_token=24.5, ended=25.0)
# The sums of an answer's histograms, in seconds and tokens.
SUMS = {
    "time_to_first_token_seconds": 6.5,
    "request_queue_time_seconds": 2.0,
    "request_prefill_time_seconds": 4.0,
    "request_decode_time_seconds": 8.0,
    "e2e_request_latency_seconds": 15.0,
    "request_prompt_tokens": 300.0,
    "request_generation_tokens": 20.0,
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics('a "model"\nof mine')


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metric_in(metrics.render().decode(), f"apbv:{name}", **labels)


@pytest.mark.parametrize("outcome", ["stop", "length"])
def test_an_answer_is_counted_with_its_times_and_lengths(metrics, outcome):
    metrics.observe_end(outcome, ANSWERED, 300, 20, {"rounds": 5, "num_drafted": 25, "num_accepted": 14})
    for name, total in SUMS.items():
        assert value(metrics, f"{name}_sum") == total and value(metrics, f"{name}_count") == 1, name
    assert value(metrics, "request_success_total", finished_reason=outcome) == 1
    assert value(metrics, "prompt_tokens_total") == 300 and value(metrics, "generation_tokens_total") == 20
    assert value(metrics, "spec_decode_num_drafts_total") == 5
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 25
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 14


@pytest.mark.parametrize(("outcome", "reason"), [("cancelled", "abort"), ("failed", "error")])
def test_of_an_answer_that_broke_off_only_what_was_reached_counts(metrics, outcome, reason):
    metrics.observe_end(outcome, ANSWERED, 300, 7, None)
    assert value(metrics, "request_success_total", finished_reason=reason) == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 6.5
    assert value(metrics, "generation_tokens_total") == 7
    for name in set(SUMS) - {"time_to_first_token_seconds"}:
        assert value(metrics, f"{name}_count") == 0, name


@pytest.mark.parametrize("outcome", ["rejected", "invalid"])
def test_a_refused_request_is_no_finished_one(metrics, outcome):
    metrics.observe_end(outcome, RequestTimes(arrived=1.0, ended=2.0), 0, 0, None)
    assert value(metrics, "requests_refused_total", reason=outcome) == 1
    for reason in ("stop", "length", "abort", "error"):
        assert value(metrics, "request_success_total", finished_reason=reason) == 0
    for name in SUMS:
        assert value(metrics, f"{name}_count") == 0, name


def test_every_outcome_is_counted_once_and_an_unknown_one_is_an_error(metrics):
    for outcome in OUTCOMES:
        metrics.observe_end(outcome, ANSWERED, 1, 1, None)
    counted = [
        *(
            value(metrics, "request_success_total", finished_reason=of)
            for of in ("stop", "length", "abort", "error")
        ),
        *(value(metrics, "requests_refused_total", reason=of) for of in ("rejected", "invalid")),
    ]
    assert counted == [1] * len(OUTCOMES)
    with pytest.raises(KeyError):
        metrics.observe_end("success", ANSWERED, 1, 1, None)


def test_gaps_between_tokens_count_once_for_each_answer(metrics):
    for _ in range(4):
        metrics.observe_token_gap(0.03)
    metrics.observe_token_gap(0.4)
    assert value(metrics, "inter_token_latency_seconds_count") == 5
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.52)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.05") == 4


def test_load_and_kv_are_what_was_said_last(metrics):
    metrics.set_load(waiting=3, running=2)
    metrics.set_load(waiting=1, running=4)
    metrics.set_kv(300, 400)
    metrics.set_offers(2)
    assert value(metrics, "num_requests_waiting") == 1 and value(metrics, "num_requests_running") == 4
    assert value(metrics, "kv_cache_usage_perc") == 0.75 and value(metrics, "kv_cache_bytes") == 300
    assert value(metrics, "kv_offers_waiting") == 2
    metrics.set_kv(300, 0)
    assert value(metrics, "kv_cache_usage_perc") == 0


def test_transfers_are_counted_by_how_they_ended_but_only_fetched_ones_have_times(metrics):
    for number, how in enumerate(TRANSFER_ENDS, 1):
        metrics.observe_transfer(how, 1000 * number, 0.25)
    for number, how in enumerate(TRANSFER_ENDS, 1):
        assert value(metrics, "kv_transfers_total", how=how) == 1
        assert value(metrics, "kv_transfer_bytes_total", how=how) == 1000 * number
    assert value(metrics, "kv_transfer_wait_seconds_count") == 1


def test_what_has_not_happened_yet_is_zero_and_not_missing(metrics):
    """A rate over a counter that appears with its first event misses that event."""
    text = metrics.render().decode()
    for reason in ("stop", "length", "abort", "error"):
        assert metric_in(text, "apbv:request_success_total", finished_reason=reason) == 0
    for how in TRANSFER_ENDS:
        assert metric_in(text, "apbv:kv_transfers_total", how=how) == 0
    assert 'model_name="a \\"model\\"\\nof mine"' in text
