"""launch/batch.py: two real hosts that are killed midway, and batches in this process that are
stopped."""

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from apbv import HostGroup
from apbv.launch.batch import failures, parse_arguments, summary
from apbv.serve.batch import runner
from apbv.serve.batch.files import Answers, Requests
from apbv.serve.batch.runner import Batch
from apbv.serve.server import run_worker

from apbv_tests.configs import server_settings
from apbv_tests.hard_schemas import many_patterns
from apbv_tests.patience import wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.scripts import ROOT, run_hosts, started_hosts
from apbv_tests.servers import part, serving, text

BATCH = ROOT / "launch" / "batch.py"
URL = "/v1/chat/completions"
QUESTIONS = (
    "name the letters in order",
    "which letter has the border: red",
    "how many letters are shown",
)
CLIP = [part("video", "clip.mp4")]
TWO = [part("video", "clip.mp4"), part("video", "clips/a clip.mp4")]
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
TOO_COMPLEX = {"name": "x", "schema": many_patterns()}


def line(custom_id: str, content="hi", url: str = URL, method: str = "POST", **fields) -> dict:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        **fields,
    }
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def questions(number: int) -> list[dict]:
    """Texts, one clip with several questions, and several clips, which both hosts prefill."""
    lines = []
    for place in range(number):
        asked = text(QUESTIONS[place // 3 % len(QUESTIONS)])
        content = [asked["text"], [*CLIP, asked], [*TWO, asked]][place % 3]
        lines.append(line(f"question {place}", content, num_frames=32))
    return lines


REFUSED = {
    "no such file": line("no such file", [part("video", "missing.mp4"), text("x")]),
    "no such field": line("no such field", temperature=3),
    "no such model": line("no such model", model="another"),
    "too long": line("too long", max_tokens=2**20),
    "no messages": line("no messages") | {"body": {"model": "demo"}},
    "no body": {"custom_id": "no body", "method": "POST", "url": URL},
    "half a character": line("half a character", "\ud800"),
    "not a number": line("not a number", temperature=float("nan")),
    "too complex": line(
        "too complex", response_format={"type": "json_schema", "json_schema": TOO_COMPLEX}
    ),
}
ELSEWHERE = {
    "other place": (line("other place", url="/v1/embeddings"), 404),
    "not posted": (line("not posted", method="GET"), 404),
    "streamed": (line("streamed", stream=True), 400),
}
BROKEN = {
    b'{"custom_id": "half': "invalid_json",
    b"\xff\xfe\xfd": "invalid_json",
    b"[" * 100_000: "invalid_json",
    b"[1]": "no_custom_id",
    json.dumps({**line("x"), "custom_id": 7}).encode(): "no_custom_id",
    json.dumps(line("question 0")).encode(): "duplicate_custom_id",
    b'{"custom_id": "%s"}' % (b"x" * 2**21): "line_too_long",
}


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def answers_in(path: Path) -> dict[str, dict]:
    """The answers with custom ids, none of which is there twice."""
    assert path.read_bytes()[-1:] in (b"", b"\n")
    answers = [json.loads(each) for each in lines_of(path)]
    named = [each for each in answers if each["custom_id"] is not None]
    found = {each["custom_id"]: each["response"] for each in named}
    assert len(found) == len(named) and all(each["error"] is None for each in named)
    return found


def encoded(lines: list[dict]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def said(body: dict) -> dict:
    """A reply without what differs from one time to the next."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@contextmanager
def fed_batch(folder: Path, lines: list[dict], *options):
    """A batch on two hosts, which reads from a pipe that does not end."""
    pipe = folder / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    (folder / "out").mkdir(exist_ok=True)
    arguments = [str(each) for each in (pipe, *options)]
    with (
        started_hosts(BATCH, arguments, 2, folder / "out") as processes,
        pipe.open("wb", buffering=0) as end,
    ):
        end.write(encoded(lines))
        yield processes


def test_a_batch_that_is_killed_answers_each_line_once_and_as_the_server_does(tmp_path, media):
    lines = [*questions(12), *REFUSED.values(), *(each for each, _ in ELSEWHERE.values())]
    options = [
        "--model",
        "demo",
        "--media-dir",
        media,
        "--max-body-mib",
        "1",
        "--min-host-tokens",
        "64",
    ]
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_bytes(encoded(lines) + b"\n" + b"\n".join(BROKEN))
    with fed_batch(tmp_path, lines[:9], "--out", out, *options) as processes:
        wait_for(lambda: len(lines_of(out)) >= 6)
        for process in processes:
            process.kill()
        exit_statuses(processes)
    before = lines_of(out)
    with out.open("ab") as file:  # as if it had been killed while it wrote
        file.write(before[-1][:90])
    results = run_hosts(BATCH, source, "--out", out, *options, hosts=2)
    assert [each.returncode for each in results] == [1, 0], results[0].stderr
    assert lines_of(out)[: len(before)] == before
    found = answers_in(out)
    assert set(found) == {each["custom_id"] for each in lines}
    for name, (_, status) in ELSEWHERE.items():
        assert found[name]["status_code"] == status and found[name]["body"]["error"]["message"]
    errors = [json.loads(each)["error"] for each in lines_of(out)]
    codes = {each["line"]: each["code"] for each in errors if each is not None}
    assert codes == dict(enumerate(BROKEN.values(), start=len(lines) + 2))
    with serving(tmp_path / "server", *options) as server:
        for each in [*lines[:12], *REFUSED.values()]:
            response = found[each["custom_id"]]
            body = json.dumps(each.get("body"))
            reply = server.http.post(server.root + URL, content=body, timeout=httpx.Timeout(60))
            assert response["status_code"] == reply.status_code
            assert said(response["body"]) == said(reply.json())
    assert {found[name]["status_code"] for name in REFUSED} == {400, 404}
    num_failed = len(REFUSED) + len(ELSEWHERE) + len(BROKEN)
    assert (
        f"{num_failed} of {num_failed + 12} requests were answered with errors: see {out}\n"
        in results[0].stderr
    )
    assert (
        f"failed               {len(REFUSED) + len(ELSEWHERE) + len(BROKEN)}\n" in results[0].stderr
    )


def test_torchruns_signal_ends_a_batch_whose_pipe_does_not(tmp_path, media):
    out = tmp_path / "out.jsonl"
    with fed_batch(
        tmp_path, questions(3), "--out", out, "--model", "demo", "--media-dir", media
    ) as processes:
        wait_for(lambda: len(lines_of(out)) == 3)
        for process in processes:
            process.terminate()
        assert exit_statuses(processes) == [128 + signal.SIGTERM, 0]
    assert len(answers_in(out)) == 3
    assert "the same command continues" in (tmp_path / "out" / "0.stderr").read_text()


@pytest.fixture
def run(tmp_path, app, media):
    """Answers lines with the engine of this process; returns the batch, and what is in the file."""

    def answer(
        lines: list[dict],
        meanwhile: Callable[[Batch], None] | None = None,
        retry: bool = False,
        **limits,
    ) -> tuple[Batch, dict[str, dict]]:
        (tmp_path / "in.jsonl").write_bytes(encoded(lines))
        limits = {"num_frames": 8, "media_dir": media, "max_kv_bytes": 2**26, **limits}
        out = tmp_path / "out.jsonl"
        settings = server_settings(**limits)
        with closing(Answers(out, retry)) as answers:
            batch = Batch(Requests(tmp_path / "in.jsonl"), answers, settings, lambda _: None)
            if meanwhile is not None:
                threading.Thread(target=meanwhile, args=(batch,), daemon=True).start()
            run_worker(app.engine, HostGroup.single("cpu"), settings, batch.open)
        return batch, answers_in(out)

    return answer


def once_running(*signals: int) -> Callable[[Batch], None]:
    """Send signals when a request runs: the next as soon as it has an effect of its own."""

    def send(batch: Batch) -> None:
        # Before it is opened it has no number.
        wait_for(lambda: getattr(batch, "num_running", 0) > 0)
        for number in signals:
            os.kill(os.getpid(), number)
            wait_for(lambda: batch.stopped_by is not None)

    return send


def test_a_signal_finishes_what_runs_and_starts_nothing(run):
    lines = [line(f"line {number}", max_tokens=100, ignore_eos=True) for number in range(80)]
    batch, found = run(lines, once_running(signal.SIGTERM), max_running=1)
    assert batch.stopped_by == signal.SIGTERM and batch.was_stopped
    assert 1 <= len(found) < 40 and all(each["status_code"] == 200 for each in found.values())
    # Those that were read ahead, and one that waited for room.
    assert batch.num_read <= len(found) + 32 + 1
    assert "stopped" in summary(batch)
    batch, found = run(lines[: len(found) + 3])
    assert not batch.was_stopped and batch.total == batch.num_answered == 3 < len(found)
    assert batch.metrics.total("generation_tokens") == 300


def test_a_second_signal_ends_what_runs(run, monkeypatch):
    monkeypatch.setattr(runner, "SAME_SIGNAL_SECONDS", 0.0)
    batch, found = run([line("endless", **ENDLESS)], once_running(signal.SIGINT, signal.SIGINT))
    assert batch.was_stopped and batch.num_left == 1 and not found


def test_a_signal_that_arrives_twice_is_one(run, monkeypatch):
    """As Ctrl-C does under torchrun, from the terminal and from torchrun; however slow the machine
    is."""
    monkeypatch.setattr(runner, "SAME_SIGNAL_SECONDS", 3600.0)
    batch, found = run(
        [line("long", max_tokens=300, ignore_eos=True)], once_running(signal.SIGINT, signal.SIGINT)
    )
    assert batch.stopped_by == signal.SIGINT and found["long"]["status_code"] == 200


def test_more_prompts_than_may_wait_are_answered_one_after_the_other(run):
    """The server would answer some of them with 429."""
    body = {"model": "demo", "prompt": ["a", "b", "c"], "max_tokens": 20, "ignore_eos": True}
    lines = [line(str(number), url="/v1/completions") | {"body": body} for number in range(6)]
    batch, found = run(lines, max_queue=2, max_running=1)
    assert batch.num_failed == 0
    assert {len(each["body"]["choices"]) for each in found.values()} == {3}


def test_what_may_pass_is_asked_again_and_the_rest_is_not(run, media, tmp_path):
    lines = [
        line("text"),
        line("wrong", temperature=3),
        line("file", [part("video", "later/clip.mp4"), text("x")]),
    ]
    folder = tmp_path / "media"
    folder.symlink_to(tmp_path / "unmounted")
    _, first = run(lines, media_dir=folder)
    assert {name: each["status_code"] for name, each in first.items()} == {
        "text": 200,
        "wrong": 400,
        "file": 503,
    }
    (tmp_path / "unmounted" / "later").mkdir(parents=True)
    (tmp_path / "unmounted" / "later" / "clip.mp4").symlink_to(tmp_path / "unmounted" / "clip.mp4")
    (tmp_path / "unmounted" / "clip.mp4").write_bytes((media / "clip.mp4").read_bytes())
    batch, second = run(lines, media_dir=folder)
    assert second == first and batch.num_answered == 0 and batch.num_failed == 2
    batch, third = run(lines, retry=True, media_dir=folder)
    assert third["file"]["status_code"] == 200 and batch.num_answered == batch.num_failed == 1
    assert {**third, "file": None} == {**first, "file": None}


def test_why_requests_failed_is_told(run):
    lines = [line("good"), line("wrong", temperature=3), line("better")]
    batch, _ = run(lines)
    reason, number = failures(batch, Path("answers.jsonl")).splitlines()
    assert reason == "  wrong: 400, temperature: Input should be less than or equal to 2"
    assert number == "1 of 3 requests were answered with errors: see answers.jsonl"
    lines += [line(f"nowhere {number}", url="/x") for number in range(9)]
    batch, _ = run(lines)
    told = failures(batch, Path("answers.jsonl")).splitlines()
    assert len(told) == 6
    assert told[-1] == "10 of 12 requests were answered with errors: see answers.jsonl"


def test_a_full_disk_leaves_whole_lines(run, tmp_path):
    _, found = run([line("first")])
    size = (tmp_path / "out.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
    try:
        with pytest.raises(ValueError, match="cannot write the answers"):
            run([line("first"), line("second")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert answers_in(tmp_path / "out.jsonl") == found
    assert set(run([line("first"), line("second")])[1]) == {"first", "second"}


def test_a_file_of_answers_is_one_and_belongs_to_one_batch(tmp_path):
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_bytes(encoded(questions(2)))
    for path in (source, tmp_path / "no folder" / "out.jsonl", Path("/dev/null")):
        content = source.read_bytes()
        with pytest.raises(
            ValueError, match=r"is not an answer|cannot write|must be a regular file"
        ):
            Answers(path)
        assert source.read_bytes() == content
    with closing(Answers(out)), pytest.raises(ValueError, match="in use"):
        Answers(out, retry_errors=True)
    Answers(out).close()


def test_shards_have_every_line_once(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"0\n1\n\n3\n4\n5\n6")
    shards = [Requests(source, (index, 3)) for index in range(3)]
    for shard, expected in zip(shards, ([0, 3, 6], [1, 4], [5]), strict=True):
        assert [int(line) for _, line in shard.lines(9)] == expected
    assert [shard.count() for shard in shards] == [3, 2, 1]
    assert list(Requests(source, (5, 7)).lines(9)) == [(6, b"5\n")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("in --model demo --out out --shard 2/2", "--shard: must be I/N with 0 <= I < N, not 2/2"),
        ("in --model demo --out out --shard x", "--shard: must be I/N"),
        ("in --model demo", "required: --out"),
        ("in --model demo --out out --media-dir nowhere", "--media-dir nowhere is not a directory"),
        (
            "in --model demo --out out --reuse kv --reduce dycoke",
            "dycoke selects visual tokens anew",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(options.split())
    assert message in capsys.readouterr().err
