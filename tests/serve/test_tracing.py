"""Traces of requests, as a real collector gets them."""

import json
import logging
import os
import signal
import socket
import sys
import time

import openai
import pytest

from apbv.launch.serve import parse_arguments
from apbv.serve.times import EndedRequest, RequestTimes
from apbv.serve.tracing import Tracer, require_traceable

from collector import collecting, values_of
from pool import exit_statuses
from servers import serving

# All moments lie apart by another distance.
MOMENTS = {"ready": 0.5, "began": 1.75, "first_token": 4.0, "last_token": 9.0, "ended": 9.25}


@pytest.fixture
def collector():
    with collecting() as started:
        yield started


def times_up_to(last: str) -> RequestTimes:
    """The times of a request that ended behind that moment."""
    arrived, reached = time.monotonic() - 100, list(MOMENTS)[: list(MOMENTS).index(last) + 1]
    return RequestTimes(arrived, **{name: arrived + MOMENTS[name] for name in {*reached, "ended"}})


def request(last: str = "ended", **fields) -> EndedRequest:
    given = {"id": "chatcmpl-1", "status": 200, "outcome": "stop", "times": times_up_to(last), **fields}
    return EndedRequest(**given)


def traced(collector, *requests: EndedRequest) -> list[str]:
    tracer = Tracer(collector.url, "a model")
    ids = [tracer.trace(each) for each in requests]
    tracer.close()
    return ids


def seconds(span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_is_a_span_and_its_phases_are_spans_inside(collector):
    sampling = {"max_tokens": 64, "temperature": 0.5, "top_p": 0.9}
    speculation = {"rounds": 3, "num_drafted": 12, "num_accepted": 7}
    asked = request(prompt_tokens=300, completion_tokens=20, sampling=sampling, speculation=speculation)
    (trace_id,) = traced(collector, asked)
    (whole,) = collector.named("llm_request")
    assert whole.trace_id.hex() == trace_id and not whole.parent_span_id
    assert abs(whole.start_time_unix_nano / 1e9 - (time.time() - 100)) < 50
    phases = {span.name: span for span in collector.spans if span is not whole}
    expected = {"read": 0.5, "queue": 1.25, "prefill": 2.25, "decode": 5.0}
    assert {name: pytest.approx(seconds(span)) for name, span in phases.items()} == expected
    assert seconds(whole) == pytest.approx(9.25)
    assert {span.parent_span_id for span in phases.values()} == {whole.span_id}
    assert {span.trace_id for span in phases.values()} == {whole.trace_id}
    assert phases["read"].start_time_unix_nano == whole.start_time_unix_nano
    for earlier, later in (("read", "queue"), ("queue", "prefill"), ("prefill", "decode")):
        assert phases[earlier].end_time_unix_nano == phases[later].start_time_unix_nano
    said = values_of(whole.attributes)
    assert said == {
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "a model",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 300,
        "gen_ai.usage.completion_tokens": 20,
        "gen_ai.latency.time_in_queue": pytest.approx(1.25),
        "gen_ai.latency.time_to_first_token": pytest.approx(4.0),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2.25),
        "gen_ai.latency.time_in_model_decode": pytest.approx(5.0),
        "gen_ai.latency.e2e": pytest.approx(9.25),
        "http.response.status_code": 200,
        "apbv.outcome": "stop",
        "apbv.speculation.num_drafted": 12,
        "apbv.speculation.num_accepted": 7,
    }
    assert collector.resources[0]["service.name"] == "apbv"


def test_a_trace_that_a_client_began_goes_on_unless_it_is_not_recorded(collector):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    recorded, ignored = f"00-{trace}-{span}-01", f"00-{trace[::-1]}-{span}-00"
    ids = traced(collector, request(traceparent=recorded), request(traceparent=ignored), request(traceparent="x"))
    assert ids[:2] == [trace, trace[::-1]]
    first, second = collector.named("llm_request", 2)
    assert first.trace_id.hex() == trace and first.parent_span_id.hex() == span
    assert second.trace_id.hex() == ids[2] not in (trace, trace[::-1])  # nonsense is as good as none


@pytest.mark.parametrize(
    ("last", "phases"),
    [
        ("ready", {"read": 0.5, "queue": 8.75}),
        ("began", {"read": 0.5, "queue": 1.25, "prefill": 7.5}),
        ("first_token", {"read": 0.5, "queue": 1.25, "prefill": 2.25, "decode": 5.25}),
    ],
)
def test_the_phase_in_which_a_request_broke_off_lasts_up_to_its_end(collector, last, phases):
    traced(collector, request(last, status=503, outcome="failed"))
    (whole,) = collector.named("llm_request")
    found = {span.name: pytest.approx(seconds(span)) for span in collector.spans if span is not whole}
    assert found == phases
    assert whole.status.code == whole.status.STATUS_CODE_ERROR and whole.status.message == "failed"
    assert "gen_ai.response.finish_reasons" not in values_of(whole.attributes)


def test_what_a_client_did_wrong_is_no_error_of_the_server(collector):
    times = RequestTimes(arrived=1.0, ended=2.0)
    traced(collector, request(status=400, outcome="invalid", times=times))
    (whole,) = collector.named("llm_request")
    assert whole.status.code == whole.status.STATUS_CODE_UNSET
    assert [span.name for span in collector.spans] == ["read", "llm_request"]


def test_handing_over_kv_is_a_phase_of_its_own(collector):
    traced(collector, request(outcome="length", transfer="ab" * 16, completion_tokens=1))
    (span,) = collector.named("hand_over")
    (whole,) = collector.named("llm_request")
    assert seconds(span) == pytest.approx(9.25 - 4.0)
    assert values_of(whole.attributes)["apbv.kv_transfer.id"] == "ab" * 16
    assert "decode" not in {span.name for span in collector.spans}


def test_the_environment_names_the_service(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill 7")
    traced(collector, request())
    collector.named("llm_request")
    assert collector.resources[0]["service.name"] == "prefill 7"


def test_a_collector_that_is_not_there_harms_nothing_and_is_said_to_be_away_once(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tracer = Tracer(f"http://127.0.0.1:{port}/v1/traces", "a model")
    for _ in range(10):
        assert len(tracer.trace(request())) == 32
    tracer.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "Max retries" in warnings[0].getMessage()


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http:///v1/traces", "x"])
def test_what_is_no_url_is_refused_at_the_start(url, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "demo", "--otlp-traces-endpoint", url])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--otlp-traces-endpoint" in line and url in line


@pytest.mark.parametrize(
    "missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
)
def test_without_the_extra_the_option_is_refused_at_the_start(missing, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.startswith("opentelemetry"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not there
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "demo", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "apbv[otel]" in line and missing in line
    with pytest.raises(ValueError, match="not installed"):
        require_traceable("http://localhost:4318/v1/traces")


def test_a_server_traces_and_logs_every_request(tmp_path, collector):
    """What a client began goes on; a refused request is told of, too; the log names the traces."""
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    options = ["--model", "demo", "--otlp-traces-endpoint", collector.url, "--log-format", "json"]
    hand_over = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    with serving(tmp_path / "out", *options, "--kv-transfer", "tcp") as server:
        reply = server.ask("x", max_tokens=3, extra_headers={"traceparent": f"00-{trace}-{span}-01"})
        with pytest.raises(openai.BadRequestError):
            server.ask("x", max_tokens=10**6)
        handed = server.ask("x", max_tokens=1, extra_body=hand_over)
        os.kill(server.processes[0].pid, signal.SIGTERM)
        assert exit_statuses(server.processes) == [0, 0], server.errors()
        printed = server.errors()
    lines, ticket = [json.loads(line) for line in printed.splitlines()], handed.kv_transfer_params["apbv"]
    answered, refused, handed_over = collector.named("llm_request", 3)
    assert answered.trace_id.hex() == trace and answered.parent_span_id.hex() == span
    said = values_of(answered.attributes)
    assert said["gen_ai.request.id"] == reply.id and said["gen_ai.request.max_tokens"] == 3
    assert said["gen_ai.usage.prompt_tokens"] == reply.usage.prompt_tokens
    assert said["gen_ai.usage.completion_tokens"] == reply.usage.completion_tokens
    assert inside(collector, answered) == ["decode", "prefill", "queue", "read"]
    assert values_of(refused.attributes)["http.response.status_code"] == 400
    assert inside(collector, handed_over) == ["hand_over", "prefill", "queue", "read"]
    assert values_of(handed_over.attributes)["apbv.kv_transfer.id"] == ticket["transfer"]
    told = [line for line in lines if "request_id" in line]
    assert [line["trace_id"] for line in told] == [
        each.trace_id.hex() for each in (answered, refused, handed_over)
    ]
    first, last = (each.choices[0].finish_reason for each in (reply, handed))
    outcomes = [(200, first), (400, "invalid"), (200, last)]
    assert [(line["status"], line["outcome"]) for line in told] == outcomes
    assert told[0]["request_id"] == reply.id and told[0]["completion_tokens"] == reply.usage.completion_tokens
    assert told[0]["total_seconds"] >= told[0]["time_to_first_token_seconds"] > 0
    assert told[2]["transfer"] == ticket["transfer"] and ticket["token"] not in printed


def inside(collector, whole) -> list[str]:
    return sorted(span.name for span in collector.spans if span.parent_span_id == whole.span_id)
