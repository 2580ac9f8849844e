"""What is told of requests that have ended: the figures of /metrics, and lines of the log."""

import json
import logging
import time
import warnings
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest

from apbv.kv.offers import ENDINGS
from apbv.serve.metrics.log import OncePerPeriod, log_to_stderr
from apbv.serve.metrics.prometheus import FINISHED_REASONS, REFUSALS, Metrics
from apbv.serve.metrics.record import RequestRecord
from apbv.serve.metrics.report import report

BEGAN = time.monotonic() // 1 - 100
ANSWERED = RequestRecord(
    # All moments lie apart by another distance.
    arrived=BEGAN,
    ready=BEGAN + 0.5,
    began=BEGAN + 2.25,
    first_token=BEGAN + 6.5,
    last_token=BEGAN + 14.5,
    ended=BEGAN + 15,
    id="chatcmpl-7",
    status=200,
    outcome="stop",
    prompt_tokens=300,
    completion_tokens=20,
    speculation={"rounds": 5, "num_drafted": 25, "num_accepted": 14},
)
WHY = {"error": "it is wrong:\n\x1b[31m " + "x" * 1000, "param": "prompt"}
REFUSED = RequestRecord(id="cmpl-8", status=400, outcome="invalid", arrived=1.0, ended=1.25, **WHY)
PHASES = {"read": 0.5, "queue": 1.75, "prefill": 4.25, "decode": 8.0}  # the seconds of each
# The sums of an answer's histograms, in seconds and tokens.
SUMS = {f"request_{name}_time_seconds": PHASES[name] for name in ("queue", "prefill", "decode")}
SUMS |= {"time_to_first_token_seconds": 6.5, "e2e_request_latency_seconds": 15.0}
SUMS |= {"request_prompt_tokens": 300.0, "request_generation_tokens": 20.0}
SPECULATION = {"drafts": 5, "draft_tokens": 25, "accepted_tokens": 14}
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "failed": "error"}


# ---- metrics ----


@pytest.fixture
def metrics() -> Metrics:
    return Metrics('a "model"\nof mine')


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(
        f"apbv:{name}", {"model_name": metrics.model, **labels}
    )


@pytest.mark.parametrize("outcome", [*FINISHED_REASONS, *REFUSALS])
def test_of_every_outcome_counts_what_was_reached(metrics, outcome):
    """Of refused requests nothing; of an answer that broke off only its tokens, and when the first
    came."""
    is_answer = outcome in ("stop", "length")
    is_refused = outcome not in FINISHED
    metrics.observe_end(replace(REFUSED if is_refused else ANSWERED, outcome=outcome))
    for name, total in SUMS.items():
        counts = is_answer or (name == "time_to_first_token_seconds" and not is_refused)
        assert value(metrics, f"{name}_count") == counts, name
        assert value(metrics, f"{name}_sum") == counts * total, name
    counters = {f"spec_decode_num_{name}_total": count for name, count in SPECULATION.items()}
    counters |= {"prompt_tokens_total": 300, "generation_tokens_total": 20}
    for name, count in counters.items():
        assert value(metrics, name) == (0 if is_refused else count), name
    for each, reason in FINISHED.items():
        assert value(metrics, "request_success_total", finished_reason=reason) == (each == outcome)
    for each in ("rejected", "invalid"):
        assert value(metrics, "requests_refused_total", reason=each) == (each == outcome)


def test_what_was_said_last_and_what_has_not_happened_yet(metrics):
    """A rate over a counter that appears with its first event misses that event: it is zero, and
    not missing."""
    assert 'model_name="a \\"model\\"\\nof mine"' in metrics.render().decode()
    for reason in FINISHED.values():
        assert value(metrics, "request_success_total", finished_reason=reason) == 0
    names = {"num_requests_waiting": 1, "num_requests_running": 4, "kv_offers_waiting": 2}
    metrics.set(**names)
    assert {name: value(metrics, name) for name in names} == names
    for seconds in (0.03, 0.03, 0.4):
        metrics.observe_token_gap(seconds)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.46)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.05") == 2


def test_transfers_are_counted_by_how_they_ended_but_only_fetched_ones_have_times(metrics):
    for number, how in enumerate(ENDINGS, 1):
        assert value(metrics, "kv_transfers_total", how=how) == 0
        metrics.observe_transfer(how, 1000 * number, 0.25)
        assert value(metrics, "kv_transfers_total", how=how) == 1
        assert value(metrics, "kv_transfer_bytes_total", how=how) == 1000 * number
    assert value(metrics, "kv_transfer_wait_seconds_count") == 1


# ---- the log ----


@pytest.fixture
def log(capsys):
    """Sets the log up as a server does; returns a function that reads what it wrote since."""
    root = logging.getLogger()
    ours = logging.getLogger("apbv.serve")
    before = list(root.handlers)
    level = ours.level

    def start(form: str):
        log_to_stderr(form)
        return lambda: capsys.readouterr().err.splitlines()

    yield start
    root.handlers[:] = before
    ours.setLevel(level)
    logging.captureWarnings(False)


def test_a_request_is_an_object_with_all_its_times(log):
    written = log("json")
    for request in (ANSWERED, REFUSED):
        report(request, Metrics("a model"))
    answered, refused = map(json.loads, written())
    told = {"request_id": ANSWERED.id, "model": "a model", "status": 200, "outcome": "stop"}
    told |= {"prompt_tokens": 300, "completion_tokens": 20, "num_drafted": 25, "num_accepted": 14}
    told |= {f"{name}_seconds": taken for name, taken in PHASES.items()}
    told |= {"time_to_first_token_seconds": 6.5, "total_seconds": 15.0}
    assert told.items() <= answered.items()
    assert refused["outcome"] == "invalid" and refused["queue_seconds"] is None
    assert refused["param"] == "prompt" and "error" not in answered


@pytest.mark.parametrize("form", ["text", "json"])
def test_why_a_request_failed_is_told_in_a_line_that_is_not_too_long(log, form):
    written = log(form)
    report(REFUSED, Metrics("a model"))
    (line,) = written()
    assert "it is wrong: \N{REPLACEMENT CHARACTER}[31m xxx" in line and len(line) < 1200
    assert "400 invalid (prompt: it is wrong" in line
    assert "\x1b" not in line
    assert "u001b" not in line


def test_what_libraries_warn_of_and_an_error_with_its_traceback_are_each_a_line_of_the_same_form(
    log,
):
    written = log("json")
    warnings.warn("this goes wrong", stacklevel=1)
    logging.getLogger("some.library").info("of no interest")
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("ASGI\nfailed")
    warned, failed = map(json.loads, written())
    assert "this goes wrong" in warned["message"]
    assert (failed["level"], failed["message"]) == ("ERROR", "ASGI\nfailed")
    assert failed["traceback"].endswith("ValueError: broken\nin two")
    assert (
        abs(datetime.fromisoformat(failed["time"].replace("Z", "+00:00")).timestamp() - time.time())
        < 600
    )


def test_a_warning_is_logged_once_per_period(monkeypatch):
    now = 0.0
    messages = []
    monkeypatch.setattr("apbv.serve.metrics.log.time", SimpleNamespace(monotonic=lambda: now))
    logger = logging.Logger("a server's")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addFilter(OncePerPeriod(60.0))
    logger.addHandler(handler)
    for second in range(150):
        now = float(second)
        logger.warning("bad request")
        if second < 2:
            logger.error("worse")
    assert messages == ["bad request", "worse", "worse", "bad request", "bad request"]


def test_different_warnings_are_logged_up_to_a_number_per_period(monkeypatch):
    """What they say differs, though the template is the same."""
    now = 0.0
    messages = []
    monkeypatch.setattr("apbv.serve.metrics.log.time", SimpleNamespace(monotonic=lambda: now))
    logger = logging.Logger("a server's")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addFilter(OncePerPeriod(60.0, most=3))
    logger.addHandler(handler)
    for moment in (0.0, 1.0, 61.0):
        now = moment
        for name in "abcd":
            logger.warning("ignored %r", name)
    assert messages == ["ignored 'a'", "ignored 'b'", "ignored 'c'"] * 2
