"""launch/serve.py as its users see it: real processes on two hosts, and the real OpenAI client."""

import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from apbv import demo
from apbv.demo.clips import make_clip, questions
from apbv.input.video import probe
from apbv.launch.torchrun import shutdown_timeout

import families
from patience import HANGING, wait_for
from pool import exit_statuses
from scripts import run_script, started_hosts
from servers import ENDLESS, KEY, SERVE, Server, Stream, Torchrun, data_url, left_open, part, serving, text


def answer_to(question: str) -> str:
    return next(a for _, q, a in questions(make_clip(*demo.DEMO_CLIP)) if q == question)


def test_a_model_that_gives_nan_is_the_servers_failure(tmp_path):
    path = families.save_checkpoint("llama", tmp_path / "broken")
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with serving(tmp_path / "out", "--model", path, "--served-model-name", "demo") as server:
        for _ in range(2):  # the hosts stay ready
            with pytest.raises(openai.InternalServerError, match="NaN or infinite logits"):
                server.ask([text("Why?")])


@pytest.mark.parametrize("how", ["path", "file URL", "inline data", "streaming"])
def test_the_client_asks_about_a_video(server, media, how):
    clip = media / "clips" / "a clip.mp4"
    url = {"path": clip, "file URL": "file:clips/a%20clip.mp4", "inline data": data_url(clip)}.get(how, clip)
    question = "name the letters in order"
    content = [part("video", url), text(question)]
    if how != "streaming":
        answer = server.ask(content)
        assert answer.choices[0].message.content == answer_to(question)
        assert answer.choices[0].finish_reason == "stop"
        assert (
            answer.usage.prompt_tokens > 256
            and answer.usage.completion_tokens == len(answer_to(question).split()) + 1
        )
        return
    chunks = list(server.ask(content, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer_to(question)
    assert len(chunks) > 5 and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_images_chats_and_samples_are_those_of_the_engine(server, media, engine):
    picture, question = media / "picture.png", "describe the clip shot by shot"
    expected = engine.generate(question, images=[picture], max_new_tokens=20).text
    for url in (picture, data_url(picture)):
        assert (
            server.ask([part("image", url), text(question)], max_tokens=20).choices[0].message.content == expected
        )
    chat = [
        {"role": "system", "content": "name the letters"},
        {"role": "user", "content": "which letter"},
        {"role": "assistant", "content": "J"},
        {"role": "user", "content": [text("how many "), text("letters are shown")]},
    ]
    expected = engine.generate(messages=chat, max_new_tokens=12, temperature=0.9, top_p=0.95, seed=2**64 - 5).text
    answer = server.client.chat.completions.create(
        model="demo", messages=chat, max_completion_tokens=12, temperature=0.9, top_p=0.95, seed=-5
    )
    assert answer.choices[0].message.content == expected
    few = server.ask(
        [part("video", media / "clips" / "a clip.mp4"), text("x")], max_tokens=1, extra_body={"num_frames": 8}
    )
    assert few.usage.prompt_tokens < 60 and few.choices[0].finish_reason == "length"
    slow = server.ask(
        [part("video", media / "clips" / "a clip.mp4"), text("x")], max_tokens=1, extra_body={"fps": 0.25}
    )
    assert slow.usage.prompt_tokens < 60


def test_several_videos_and_images_are_those_of_the_engine(server, media, engine):
    """In any order, in several turns, by path and inline."""
    clip, picture = media / "clips" / "a clip.mp4", media / "picture.png"
    first = [part("video", clip), text("before"), part("image", data_url(picture)), part("video", data_url(clip))]
    last = [text("and "), part("image", picture), text("describe the clip shot by shot")]
    chat = [("user", first), ("assistant", [text("yes")]), ("user", last)]
    files = {"video_url": {"type": "video", "video": clip}, "image_url": {"type": "image", "image": picture}}
    said = [
        {"role": role, "content": [files.get(each["type"], each) for each in content]} for role, content in chat
    ]
    expected = engine.generate(messages=said, num_frames=8, max_new_tokens=12)
    answer = server.client.chat.completions.create(
        model="demo",
        messages=[{"role": role, "content": content} for role, content in chat],
        max_tokens=12,
        extra_body={"num_frames": 8},
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.stats["num_input_tokens"]
    assert [len(video.frames) for video in expected.videos] == [8, 8]


def test_a_stop_string_cuts_the_answer_wherever_tokens_end(server):
    content = [part("video", "clips/a clip.mp4"), text("describe the clip shot by shot")]
    whole = server.ask(content, max_tokens=60).choices[0].message.content
    for start, stop in ((10, 13), (21, 22), (31, 47)):
        cut = whole[: whole.index(whole[start:stop])]
        for wanted in (whole[start:stop], ["never", whole[start:stop]]):
            answer = server.ask(content, max_tokens=60, stop=wanted)
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (cut, "stop")
        chunks = server.ask(content, max_tokens=60, stop=whole[start:stop], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut


@pytest.mark.parametrize(
    ("content", "options", "error", "param"),
    [
        ("x", {"model": "gpt"}, openai.NotFoundError, "model"),
        ("x", {"n": 2}, openai.BadRequestError, "n"),
        ("x", {"logprobs": True}, openai.BadRequestError, "logprobs"),
        ("x", {"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ("x", {"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ("x", {"temperature": -1}, openai.BadRequestError, "temperature"),
        ("x", {"stop": list("abcde")}, openai.BadRequestError, "stop"),
        ("x", {"extra_body": {"num_frames": 10**6}}, openai.BadRequestError, "num_frames"),
        ("word " * 70000, {}, openai.BadRequestError, "messages"),
        ("x", {"max_tokens": 70000}, openai.BadRequestError, "messages"),
        (" ", {}, openai.BadRequestError, "messages"),
        ("<|video_pad|>", {}, openai.BadRequestError, "messages"),
        ([part("video", "broken.mp4"), text("x")], {}, openai.BadRequestError, "messages"),
        ([part("image", "broken.png"), text("x")], {}, openai.BadRequestError, "messages"),
        ([part("image", "broken.mp4"), text("x")], {}, openai.BadRequestError, "messages"),
        (
            [part("video", "clips/a clip.mp4"), part("image", "picture.png")],
            {},
            openai.BadRequestError,
            "messages",
        ),
        ([part("video", "nowhere.mp4")], {}, openai.BadRequestError, "messages.0.content.0.video_url"),
        ([text("x"), part("video", "../x.mp4")], {}, openai.BadRequestError, "messages.0.content.1.video_url"),
        ([part("video", "link.mp4")], {}, openai.BadRequestError, "messages.0.content.0.video_url"),
        ([part("image", "/etc/hostname")], {}, openai.BadRequestError, "messages.0.content.0.image_url"),
        ([part("video", "https://example.com/a")], {}, openai.BadRequestError, "messages.0.content.0.video_url"),
        (
            [part("video", "data:video/mp4;base64," + "A" * 900_000)],
            {},
            openai.BadRequestError,
            "messages.0.content.0.video_url",
        ),
        ([part("video", "data:video/mp4,abc")], {}, openai.BadRequestError, "messages.0.content.0.video_url"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_what_is_wrong_is_said_and_harms_nobody(server, content, options, error, param):
    with pytest.raises(error) as caught:
        server.ask(content, **options)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert not re.search(r"/tmp|/etc", caught.value.message) or "/etc" in str(content)
    assert server.ask("x", max_tokens=1).usage.completion_tokens == 1


def test_a_video_that_only_the_second_host_finds_damaged(server, media):
    """Its second half is: the hosts agree, and go on."""
    data = bytearray((media / "clips" / "a clip.mp4").read_bytes())
    info = probe(media / "clips" / "a clip.mp4")
    for pos, size in zip(info.packets.pos[-20:].tolist(), info.packets.size[-20:].tolist(), strict=True):
        data[pos + 5 : pos + size] = bytes(size - 5)
    (media / "half.mp4").write_bytes(data)
    for url in ("half.mp4", data_url(media / "half.mp4")):
        with pytest.raises(openai.BadRequestError) as caught:
            server.ask([part("video", url), text("x")])
        assert "host 1" in caught.value.message
        assert str(media) not in caught.value.message and "apbv-" not in caught.value.message
    assert server.ask("x", max_tokens=1).usage.completion_tokens == 1


def test_keys_bodies_and_paths(server):
    for key in ("wrong", "ein Schlüssel", KEY[:-1], KEY):
        reply = server.http.get(f"{server.url}/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert reply.status_code == (200 if key == KEY else 401)
    reply = server.http.post(f"{server.url}/chat/completions", content=b"{}")
    assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": f"Bearer {KEY}"}
    pieces = (b" " * 2**18 for _ in range(8))  # without a length: it shows while it is read
    for body in (b" " * 2**21, pieces):
        try:
            reply = server.http.post(f"{server.url}/chat/completions", content=body, headers=headers)
            assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
        except httpx.WriteError:  # the answer came, and the connection was closed, before all was sent
            pass
    for path, method, status in (("/nowhere", "GET", 404), ("/v1/chat/completions", "GET", 405)):
        reply = server.http.request(method, server.root + path, headers=headers)
        assert reply.status_code == status and reply.json()["error"]["type"] == "invalid_request_error"
    assert [model.id for model in server.client.models.list()] == ["demo"]
    assert server.client.models.retrieve("demo").id == "demo"
    assert server.health() == 200


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
def test_no_request_of_many_is_lost_and_none_leaves_memory_behind(server):
    contents = [[part("video", data_url(demo.video_path())), text("how many letters are shown")], "x"]

    def answer(which: int) -> str:
        return server.ask(contents[which], max_tokens=4, extra_body={"num_frames": 24}).choices[0].message.content

    def ask(number: int) -> bool:
        return answer(number % 2) == expected[number % 2]

    expected = answer(0), answer(1)

    def num_answered() -> float:
        name = "apbv:request_success_total"
        return sum(server.metric(name, finished_reason=reason) for reason in ("stop", "length"))

    before = num_answered()
    tokens_before = server.metric("apbv:generation_tokens_total")
    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(ask, range(50)))
        early = [resident_bytes(process.pid) for process in server.processes]
        assert all(clients.map(ask, range(150)))
    late = [resident_bytes(process.pid) for process in server.processes]
    assert all(after - then < 24 * 2**20 for then, after in zip(early, late, strict=True)), (early, late)
    assert num_answered() - before == 200
    for name in (
        "apbv:num_requests_running",
        "apbv:num_requests_waiting",
    ):  # counted just after the answer is sent
        server.wait_until(name, 0)
    assert server.metric("apbv:time_to_first_token_seconds_count") >= 200
    assert server.metric("apbv:generation_tokens_total") - tokens_before >= 200


def test_a_full_queue_and_clients_that_leave(tmp_path, endless_model):
    options = ["--model", endless_model, "--served-model-name", "demo", "--max-queue", 1, "--grace", 0.5]
    options += ["--max-running", 1]
    with serving(tmp_path / "out", *options) as server:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], **ENDLESS}
        # Running and not streaming: the first leaves, and the engine is free.
        with left_open(server, body):
            server.wait_until("apbv:num_requests_running", 1)
        server.wait_until("apbv:request_success_total", 1, finished_reason="abort")
        assert server.ask("x", max_tokens=2).usage.completion_tokens == 2
        # Running and streaming, with one that waits and leaves, and one more than may wait.
        with server.http.stream("POST", f"{server.url}/chat/completions", json={**body, "stream": True}) as reply:
            lines = reply.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
            with left_open(server, body):
                server.wait_until("apbv:num_requests_waiting", 1)
                with pytest.raises(openai.RateLimitError) as caught:
                    server.ask("x", max_tokens=1)
                assert int(caught.value.response.headers["retry-after"]) >= 1
            server.wait_until("apbv:num_requests_waiting", 0)
            assert server.metric("apbv:num_requests_running") == 1
        server.wait_until("apbv:num_requests_running", 0)
        assert server.metric("apbv:request_success_total", finished_reason="abort") == 3
        assert server.metric("apbv:requests_refused_total", reason="rejected") == 1
        # Asked to end: what runs is cut after the grace, as it does not end.
        stream = Stream(server, **ENDLESS)
        wait_for(lambda: stream.pieces > 1)
        for process in server.processes:  # as torchrun does
            os.kill(process.pid, signal.SIGTERM)
        assert exit_statuses(server.processes) == [0, 0], server.errors()
        assert "stopping" in str(stream.end())


def test_sigterm_lets_the_running_answer_end(tmp_path, endless_model):
    options = ["--model", endless_model, "--served-model-name", "demo", "--speculate", "ngram"]
    with serving(tmp_path / "out", *options, "--grace", HANGING) as server:
        running = Stream(server, max_tokens=600)
        server.wait_until("apbv:num_requests_running", 1)
        waiting = Stream(server, **ENDLESS)
        server.wait_until("apbv:num_requests_waiting", 1)
        os.kill(server.processes[0].pid, signal.SIGTERM)
        assert isinstance(waiting.end(), openai.InternalServerError) and waiting.error.status_code == 503
        assert server.health() == 503
        with pytest.raises(openai.InternalServerError, match="stopping"):
            server.ask("x")
        assert running.end() is None and running.pieces > 10
        assert exit_statuses(server.processes) == [0, 0], server.errors()


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("the process that is named", marks=pytest.mark.exhaustive),
        pytest.param("torchrun", marks=pytest.mark.thorough),
    ],
)
def test_sigterm_under_torchrun_lets_the_running_answer_end(tmp_path, endless_model, asked):
    """torchrun itself exits with 1 whatever became of its processes; that it kills them too early is said."""
    patient = asked == "torchrun"
    grace = HANGING
    options = ["--model", endless_model, "--served-model-name", "demo", "--grace", grace]
    torchrun = Torchrun(tmp_path, ["--shutdown-timeout", round(2 * grace)] if patient else [], *options)
    leader = None
    try:
        server = Server([torchrun], tmp_path)
        printed = (tmp_path / "0.stdout").read_text()
        leader = int(re.search(r"SIGTERM to process (\d+) ", printed)[1])
        warning = f"warning: torchrun kills its processes 30 s after SIGTERM, but --grace is {grace:g} s"
        assert server.errors().count(warning) == (0 if patient else 1)
        running = Stream(server, max_tokens=200)
        wait_for(lambda: running.pieces > 1)
        os.kill(torchrun.pid if patient else leader, signal.SIGTERM)
        assert running.end() is None and running.pieces > 100
        assert torchrun.wait(HANGING) == (1 if patient else 0), server.errors()
        assert "forcefully" not in server.errors()
    finally:
        torchrun.kill()
        torchrun.wait()
        if leader is not None:
            with suppress(ProcessLookupError):
                os.kill(leader, signal.SIGKILL)  # which ends the other host


@pytest.mark.parametrize(
    ("options", "environment", "seconds"),
    [
        ([], {}, 30),
        (["--shutdown-timeout", "90"], {"PET_SHUTDOWN_TIMEOUT": "1"}, 90),
        (["--shutdown_timeout=90"], {}, 90),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "45"}, 45),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "45", "PET_SHUTDOWN_TIMEOUT": "50"}, 50),
        (["--shutdown-timeout", "soon"], {}, None),
        ([], {"PET_SHUTDOWN_TIMEOUT": "soon"}, None),
    ],
)
def test_torchruns_shutdown_timeout_is_known(options, environment, seconds):
    command = ["python", "/usr/bin/torchrun", "--nproc-per-node", "2", *options, "launch/serve.py", "--grace", "9"]
    assert shutdown_timeout(command, environment) == seconds


@pytest.mark.parametrize("while_", ["running", pytest.param("idle", marks=pytest.mark.thorough)])
def test_a_dead_host_ends_the_server(tmp_path, endless_model, while_):
    options = ["--model", endless_model, "--served-model-name", "demo", "--max-running", 2]
    with serving(tmp_path / "out", *options) as server:
        streams = [Stream(server, **ENDLESS) for _ in range(3)] if while_ == "running" else []
        if streams:
            server.wait_until("apbv:num_requests_waiting", 1)
        server.processes[1].kill()
        for stream in streams:
            assert "a host has failed" in str(stream.end())
        wait_for(lambda: server.health() != 200)
        assert exit_statuses(server.processes)[0] == 1
        assert "error (host 0): " in server.errors()


def test_options_that_make_no_server_are_one_error(tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    outputs = tmp_path / "out"
    outputs.mkdir()
    with taken, started_hosts(SERVE, ["--model", "demo", "--port", str(port)], 2, outputs) as processes:
        assert exit_statuses(processes) == [1, 1]
    errors = "".join(path.read_text() for path in outputs.glob("*.stderr"))
    assert errors.count("error (host") == 2 and f"cannot listen on 127.0.0.1:{port}" in errors


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--top-p=0", "--max-new-tokens=0", "--grace=inf", "--fps=1e308"]
)
def test_what_no_request_could_mean_is_refused_at_the_start(option):
    result = run_script(SERVE, "--model", "demo", "--port", 0, option, timeout=HANGING)
    assert result.returncode in (1, 2)
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert option.split("=")[0].strip("-").replace("-", "_") in line.replace("-", "_")
