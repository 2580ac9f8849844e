"""Each kind of error, raised on each of two hosts: from the library, the command line, the server
and a file of requests every host has the same class, status and message."""

import json
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from apbv import Engine, HostGroup, SamplingParams, errors

from apbv_tests.engines import build_engine
from apbv_tests.fresh_hosts import Store, run_fresh
from apbv_tests.patience import GROUP_TIMEOUT, HANGING
from apbv_tests.planted import PLANTED, planted, script_with
from apbv_tests.scripts import ROOT, run_hosts
from apbv_tests.servers import InProcess, asking, follow_server

INFER = ROOT / "launch" / "infer.py"
BATCH = ROOT / "launch" / "batch.py"
CHAT = "/v1/chat/completions"
BOTH = pytest.mark.parametrize("bad", [0, 1])


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """The class and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def planted_here(hosts: HostGroup, name: str, place: str, bad: int):
    return planted(name, place) if hosts.rank == bad else nullcontext()


def expected_of(name: str, bad: int, stage: str) -> list[tuple[str, str]]:
    """What each of two hosts raises."""
    error = PLANTED[name]
    own = raised(error.go_off)
    if error.kind is not None:
        return [(error.kind.__name__, own[1])] * 2
    quoted = ("HostError", f"host {bad} failed in {stage}: {own[0]}: {own[1]}")
    return [own if host == bad else quoted for host in range(2)]


# ---- the library ----


def entries_job(hosts: HostGroup, name: str, bad: int) -> list[tuple[str, str]]:
    """What the entries of the library raise, and that the hosts can go on."""
    engine = build_engine(hosts, "llama")
    one_token = SamplingParams(max_new_tokens=1)

    def answer_all() -> None:
        for _, answer in engine.generate_all([{"prompt": "Why?"}], sampling=one_token):
            if isinstance(answer, Exception):
                raise answer

    entries = [
        lambda: engine.generate("Why?", max_new_tokens=1),
        lambda: engine.prefill("Why?"),
        lambda: list(engine.stream("Why?", max_new_tokens=1)),
        answer_all,
    ]
    with planted_here(hosts, name, "reading", bad):
        found = [raised(entry) for entry in entries]
    assert len(engine.generate("Why?", max_new_tokens=1).token_ids) == 1
    return found


# A HostError in a stage without exchanges means that the group is broken.
@BOTH
@pytest.mark.parametrize("name", [name for name in PLANTED if name != "host"])
def test_every_entry_of_the_library_raises_it_on_every_host(pool, name, bad):
    found = pool.run(2, entries_job, name, bad)
    for host, expected in enumerate(expected_of(name, bad, "reading the prompt")):
        assert found[host] == [expected] * 4


def prefill_job(hosts: HostGroup, name: str, bad: int) -> tuple[str, str]:
    engine = build_engine(hosts, "llama")
    with planted_here(hosts, name, "prefill", bad):
        found = raised(lambda: engine.prefill("Why?"))
    assert hosts.is_broken
    return found


@BOTH
@pytest.mark.parametrize("name", ["video", "allocator", "full disk", "lengths"])
def test_within_exchanges_it_breaks_the_group_by_the_same_error(tmp_path, name, bad):
    outcomes = run_fresh(Store(tmp_path), 2, prefill_job, name, bad)
    found = [outcome.result for outcome in outcomes]
    kinds = [kind for kind, _ in expected_of(name, bad, "prefill")]
    assert [kind for kind, _ in found] == kinds
    own = raised(PLANTED[name].go_off)[1]
    assert all(own in message for _, message in found) or name == "allocator"
    assert name == "lengths" or found[0] == found[1]


WRONG_TYPES = {
    "generate": lambda engine, wrong: engine.generate("Why?", num_frames=wrong, max_new_tokens=1),
    "prefill": lambda engine, wrong: engine.prefill("Why?", num_frames=wrong),
    "stream": lambda engine, wrong: list(engine.stream("Why?", num_frames=wrong)),
    "generate_all": lambda engine, wrong: list(
        engine.generate_all(iter([{"prompt": "Why?", "num_frames": wrong}]))
    ),
}


def wrong_type_job(hosts: HostGroup, entry: str, bad: int) -> list[tuple[str, str]]:
    """What a wrong type on one host raises; three entries raise it, and one yields it."""
    engine = build_engine(hosts, "llama")
    wrong = "three" if hosts.rank == bad else None

    def call() -> None:
        results = WRONG_TYPES[entry](engine, wrong)
        if isinstance(results, list) and isinstance(results[0][1], Exception):
            raise results[0][1]

    return [raised(call), raised(lambda: engine.prefill("Why?"))]


@BOTH
@pytest.mark.parametrize("entry", WRONG_TYPES)
def test_a_wrong_type_on_one_host_is_said_by_all_at_once(pool, entry, bad):
    found = pool.run(2, wrong_type_job, entry, bad)
    assert found[0] == found[1]
    (kind, message), afterwards = found[0]
    assert kind == "InvalidRequestError" and message.startswith("num_frames must ")
    assert afterwards == ("nothing", "")


# ---- the command line ----


@BOTH
@pytest.mark.parametrize(
    ("name", "place"),
    [("video", "reading"), ("memory", "reading"), ("allocator", "prefill"), ("lengths", "prefill")],
)
def test_a_script_says_it_on_every_host_and_ends_with_its_status(tmp_path, name, place, bad):
    script = script_with(tmp_path, INFER, name, place, bad)
    options = ["--model", "demo", "--prompt", "Why?", "--timeout", GROUP_TIMEOUT]
    results = run_hosts(script, *options, hosts=2, timeout=HANGING)
    error = PLANTED[name]
    own = raised(error.go_off)[1]
    for host, result in enumerate(results):
        told = [line for line in result.stderr.splitlines() if line.startswith("error")]
        has_traceback = "Traceback" in result.stderr
        if error.kind is None and host == bad:
            # A fault of ours, where it happened.
            assert result.returncode == error.exit_status and not told
            assert has_traceback and "planted.py" in result.stderr and own in result.stderr
            continue
        assert not has_traceback and len(told) == 1, result.stderr
        assert told[0].startswith(f"error (host {bad}): ")
        expected_status = error.exit_status
        if error.kind is None:
            expected_status = errors.HostError.exit_status
            assert f"host {bad} failed in prefill: ValueError: zip()" in told[0]
        assert result.returncode == expected_status


def test_the_exit_status_tells_kinds_apart():
    kinds = [PLANTED[name] for name in PLANTED if PLANTED[name].kind is not None]
    for error in kinds:
        assert error.kind.exit_status == error.exit_status
        assert error.kind.http_status == error.http_status
    documented = (ROOT / "docs" / "library.md").read_text()
    for kind in errors.ApbvError.__subclasses__():
        row = f"| `{kind.__name__}` | {kind.exit_status} | {kind.http_status} | "
        assert row in documented, row


# ---- the server, and files of requests ----


def server_job(hosts: HostGroup, name: str, bad: int) -> tuple[int, str] | None:
    """The status and the message of a reply; and that the server answers the next request."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    folder = Path(__file__).parent
    if not hosts.is_leader:
        with planted_here(hosts, name, "reading", bad):
            return follow_server(engine, folder)
    with closing(InProcess(model=engine, hands_over=True)) as app:
        with planted_here(hosts, name, "reading", bad):
            reply = app.request("POST", CHAT, content=asking(), timeout=None)
        failed = reply.status_code, reply.json()["error"]["message"]
        again = app.request("POST", CHAT, content=asking(), timeout=None)
        assert again.status_code == (200 if bad == 0 else failed[0])
        return failed


@BOTH
@pytest.mark.parametrize("name", [name for name in PLANTED if name != "host"])
def test_the_server_answers_with_its_status_wherever_it_happened(pool, name, bad):
    status, message = pool.run(2, server_job, name, bad)[0]
    error = PLANTED[name]
    assert status == error.http_status
    assert raised(error.go_off)[1] in message
    assert ("(request chatcmpl-" in message) == (status == 500)


@BOTH
@pytest.mark.parametrize("name", ["video", "full disk", "lengths"])
def test_a_file_of_requests_has_its_status(tmp_path, name, bad):
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    (tmp_path / "asked.jsonl").write_text(json.dumps(line) + "\n")
    script = script_with(tmp_path, BATCH, name, "reading", bad)
    options = ["--model", "demo", "--min-host-tokens", "1", "--timeout", GROUP_TIMEOUT]
    out = tmp_path / "answers.jsonl"
    results = run_hosts(script, tmp_path / "asked.jsonl", "--out", out, *options, hosts=2)
    (answer,) = [json.loads(text) for text in out.read_text().splitlines()]
    error = PLANTED[name]
    assert answer["response"]["status_code"] == error.http_status
    assert raised(error.go_off)[1] in answer["response"]["body"]["error"]["message"]
    # A fault leaves its traceback on the host where it happened.
    assert ("Traceback" in results[bad].stderr) == (error.kind is None)
    assert "Traceback" not in results[1 - bad].stderr


# ---- what crosses hosts ----


def every_class() -> list[type[errors.ApbvError]]:
    classes = list(errors.ApbvError.__subclasses__())
    for kind in classes:
        classes += kind.__subclasses__()
    return classes


def made(kind: type[errors.ApbvError]) -> errors.ApbvError:
    """An error of a class, whatever else its constructor takes."""
    error = kind.__new__(kind)
    error.args = ("it is so",)
    return error


def test_an_error_crosses_hosts_by_the_code_of_its_class():
    for kind in every_class():
        original = made(kind)
        report = errors.ErrorReport.from_json(
            json.loads(json.dumps(errors.ErrorReport.of(original).to_json()))
        )
        arrived = report.error("host 3", "reading")
        assert type(arrived) is kind and str(arrived) == "it is so"
        assert (arrived.host, arrived.stage) == ("host 3", "reading")
    unknown = errors.ErrorReport(["invalid_request/OfLater", "invalid_request"], "it is so")
    assert type(unknown.error("host 3", "reading")) is errors.InvalidRequestError
    assert len({kind.code for kind in every_class()}) == len(every_class())


def test_what_was_a_value_error_is_one_still():
    for kind in every_class():
        assert issubclass(kind, RuntimeError if issubclass(kind, errors.HostError) else ValueError)
