"""The log's lines: one for each request, to read or as JSON."""

import json
import logging
import warnings
from datetime import datetime, timezone

import pytest

from apbv.serve.log import JsonLines, log_to_stderr
from apbv.serve.metrics import Metrics
from apbv.serve.report import Reporter
from apbv.serve.times import EndedRequest, RequestTimes
from apbv.serve.tracing import Tracer

from collector import collecting

ANSWERED = EndedRequest(
    id="chatcmpl-7",
    status=200,
    outcome="stop",
    times=RequestTimes(arrived=10.0, ready=10.5, began=12.5, first_token=16.5, last_token=24.5, ended=25.0),
    prompt_tokens=300,
    completion_tokens=20,
    speculation={"rounds": 5, "num_drafted": 25, "num_accepted": 14},
)
REFUSED = EndedRequest(id="cmpl-8", status=400, outcome="invalid", times=RequestTimes(arrived=1.0, ended=1.25))


@pytest.fixture
def log(capsys):
    """Sets the log up as a server does; returns a function that reads what it wrote since."""
    root, ours = logging.getLogger(), logging.getLogger("apbv.serve")
    before, level = list(root.handlers), ours.level

    def start(form: str):
        log_to_stderr(form)
        return lambda: capsys.readouterr().err.splitlines()

    yield start
    root.handlers[:] = before
    ours.setLevel(level)
    logging.captureWarnings(False)


def test_a_request_is_a_line_to_read(log):
    written = log("text")
    reporter = Reporter(Metrics("a model"))
    reporter.tell(ANSWERED)
    reporter.tell(REFUSED)
    answered, refused = written()
    assert answered.endswith(" chatcmpl-7 200 stop, 300 + 20 tokens, first token 6.500 s, total 15.000 s")
    assert refused.endswith(" cmpl-8 400 invalid, total 0.250 s")


def test_a_request_is_an_object_with_all_its_times(log):
    written = log("json")
    with collecting() as collector:
        tracer = Tracer(collector.url, "a model")
        reporter = Reporter(Metrics("a model"), tracer)
        reporter.tell(ANSWERED)
        reporter.tell(REFUSED)
        tracer.close()
        traces = [span.trace_id.hex() for span in collector.named("llm_request", 2)]
    answered, refused = map(json.loads, written())
    assert (
        abs(
            datetime.fromisoformat(answered.pop("time").replace("Z", "+00:00")).timestamp()
            - datetime.now().timestamp()
        )
        < 100
    )
    assert answered == {
        "level": "INFO",
        "logger": "apbv.serve.report",
        "message": "chatcmpl-7 200 stop, 300 + 20 tokens, first token 6.500 s, total 15.000 s",
        "request_id": "chatcmpl-7",
        "model": "a model",
        "status": 200,
        "outcome": "stop",
        "prompt_tokens": 300,
        "completion_tokens": 20,
        "read_seconds": 0.5,
        "queue_seconds": 2.0,
        "prefill_seconds": 4.0,
        "decode_seconds": 8.0,
        "time_to_first_token_seconds": 6.5,
        "total_seconds": 15.0,
        "num_drafted": 25,
        "num_accepted": 14,
        "trace_id": traces[0],
    }
    assert refused["outcome"] == "invalid" and refused["queue_seconds"] is None
    assert refused["trace_id"] == traces[1] != traces[0]


def test_what_libraries_warn_of_is_a_line_of_the_same_form(log):
    written = log("json")
    logging.getLogger("uvicorn.error").warning("Invalid %s request\nreceived.", "HTTP")
    warnings.warn("this goes wrong", stacklevel=1)
    logging.getLogger("some.library").info("of no interest")
    invalid, warned = map(json.loads, written())
    assert (invalid["level"], invalid["logger"]) == ("WARNING", "uvicorn.error")
    assert invalid["message"] == "Invalid HTTP request\nreceived."
    assert warned["logger"] == "py.warnings" and "this goes wrong" in warned["message"]


def test_an_error_is_one_line_with_its_traceback():
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, __file__, 1, "ASGI failed", (), info)
    record.created = datetime(2026, 5, 4, 3, 2, 1, 250_000, tzinfo=timezone.utc).timestamp()
    line = JsonLines().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert said["time"] == "2026-05-04T03:02:01.250Z"
    assert said["traceback"].startswith("Traceback") and said["traceback"].endswith("ValueError: broken\nin two")


def test_what_json_does_not_know_is_told_in_words():
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "%s", ("x",), None)
    record.fields = {"path": logging.INFO, "kind": ValueError}
    assert json.loads(JsonLines().format(record))["kind"] == "<class 'ValueError'>"
