"""launch/serve.py as its users see it: the demo model on two real hosts, and the real OpenAI
client.

The tests go on with one server, in this order; the last one ends it.
"""

import json
import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch

from apbv import demo
from apbv.kv.remote import RemoteKV, drop
from apbv.kv.ticket import Ticket

from apbv_tests.patience import HANGING, wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.servers import HAND_OVER, KEY, Server, Stream, data_url, part, serving, text
from apbv_tests.video_files import packets_of

DESCRIBE = "describe the clip shot by shot"
CLIP = "clips/a clip.mp4"
DEMO_TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, numbers, bytes of each


@pytest.fixture(scope="module")
def server(tmp_path_factory, media):
    """Computing exactly, with everything allowed that is safe to allow, and KV that nobody fetches
    in a hurry.

    The hosts split prompts of 64 frames, and prefill shorter ones each alone.
    """
    words = (
        "--model demo --dtype float32 --passing-len 4096 --kv-transfer tcp --kv-seconds 3600 "
        "--log-format json"
    )
    words += (
        f" --grace {HANGING} --media-dir {media} --max-media-mib 0.5 --max-body-mib 1 "
        "--min-host-tokens 64"
    )
    words = [*words.split(), "--api-key", KEY]
    with serving(tmp_path_factory.mktemp("server") / "out", *words, key=KEY) as started:
        yield started


def waiting_kv(server: Server) -> tuple[float, float]:
    return server.metric("apbv:kv_offers_waiting"), server.metric("apbv:kv_cache_bytes")


def test_videos_images_chats_and_samples_are_those_of_the_engine(server, media, app):
    """In any order, in several turns, by path and inline."""
    clip = media / CLIP
    picture = media / "picture.png"
    first = [
        part("video", clip),
        text("before"),
        part("image", data_url(picture)),
        part("video", data_url(clip)),
    ]
    last = [text("and "), part("image", picture), text(DESCRIBE)]
    last[1]["image_url"]["detail"] = "low"
    chat = [
        ("system", [text("be brief")]),
        ("user", first),
        ("assistant", [text("yes")]),
        ("user", last),
    ]
    files = {
        "video_url": {"type": "video", "video": clip},
        "image_url": {"type": "image", "image": picture},
    }

    def said(parts: list[dict]) -> list[dict]:
        """The parts as the library takes them."""
        return [files.get(each["type"], each) for each in parts]

    conversation = [{"role": role, "content": said(parts)} for role, parts in chat]
    sampling = {"temperature": 0.9, "top_p": 0.95}
    expected = app.engine.generate(
        messages=conversation, num_frames=8, max_new_tokens=12, seed=2**64 - 5, **sampling
    )
    messages = [{"role": role, "content": content} for role, content in chat]
    asked = {"max_completion_tokens": 12, "seed": -5, **sampling, "extra_body": {"num_frames": 8}}
    answer = server.client.chat.completions.create(model="demo", messages=messages, **asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.stats["num_input_tokens"]
    for extra in ({"num_frames": 8}, {"fps": 0.25}):
        few = server.ask(
            [part("video", CLIP), text("x")], max_tokens=1, extra_body={**extra, "ignore_eos": True}
        )
        assert few.usage.prompt_tokens < 60 and few.choices[0].finish_reason == "length"


REQUESTS = [
    ("name the letters in order", {}),
    (DESCRIBE, {"max_tokens": 40}),
    (DESCRIBE, {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 30}),
    ("which letter has the border: red", {"min_tokens": 6, "max_tokens": 9, "ignore_eos": True}),
]


def test_answers_to_several_at_once_are_those_to_each_alone(server):
    def answer(request) -> tuple[list[int], str, str]:
        question, options = request
        body = {**options, "num_frames": 64, "return_token_ids": True}
        chunks = list(
            server.ask([part("video", CLIP), text(question)], stream=True, extra_body=body)
        )
        tokens = []
        for chunk in chunks:
            tokens += chunk.choices[0].model_extra.get("token_ids") or []
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return tokens, said, chunks[-1].choices[0].finish_reason

    def seconds() -> Counter:
        names = ("inter_token_latency", "e2e_request_latency", "time_to_first_token")
        return Counter({name: server.metric(f"apbv:{name}_seconds_sum") for name in names})

    before = seconds()
    alone = [answer(request) for request in REQUESTS]
    spent = seconds()
    spent.subtract(before)
    behind_the_first = spent["e2e_request_latency"] - spent["time_to_first_token"]
    assert 0 < spent["inter_token_latency"] <= behind_the_first
    assert len({tuple(tokens) for tokens, _, _ in alone}) == 4 and all(said for _, said, _ in alone)
    whole = alone[1][1]
    for stop in (whole[10:13], whole[31:47]):  # wherever tokens end
        _, cut, reason = answer((DESCRIBE, {"stop": ["never", stop], "max_tokens": 40}))
        assert (cut, reason) == (whole[: whole.index(stop)], "stop")
    with ThreadPoolExecutor(len(REQUESTS)) as clients:
        assert list(clients.map(answer, REQUESTS)) == alone


def test_a_video_that_only_the_second_host_finds_damaged(server, media):
    """Its second half is, where the hosts split it: they agree, and go on."""
    data = bytearray((media / CLIP).read_bytes())
    for pos, size, *_ in packets_of(media / CLIP)[-20:]:
        data[pos + 5 : pos + size] = bytes(size - 5)
    (media / "half.mp4").write_bytes(data)
    for url in ("half.mp4", data_url(media / "half.mp4")):
        with pytest.raises(openai.BadRequestError) as caught:
            server.ask([part("video", url), text("x")], extra_body={"num_frames": 64})
        assert "cannot be decoded" in caught.value.message and caught.value.param == "messages"
        assert str(media) not in caught.value.message and "apbv-" not in caught.value.message
    assert server.ask("x", max_tokens=1).usage.completion_tokens == 1


def test_keys_bodies_and_paths(server):
    for key in ("wrong", "ein Schlüssel", KEY[:-1], KEY):
        reply = server.http.get(
            f"{server.url}/models", headers={"Authorization": f"Bearer {key}".encode()}
        )
        assert reply.status_code == (200 if key == KEY else 401)
    headers = {"Authorization": f"Bearer {KEY}"}
    pieces = (b" " * 2**18 for _ in range(8))  # without a length: it shows while it is read
    for body in (b" " * 2**21, pieces):
        try:
            reply = server.http.post(
                f"{server.url}/chat/completions", content=body, headers=headers
            )
            assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
        except (
            httpx.WriteError
        ):  # the answer came, and the connection was closed, before all was sent
            pass
    assert [model.id for model in server.client.models.list()] == ["demo"]
    assert server.health() == 200


def test_bad_connections_do_not_flood_the_log(server):
    address = urlsplit(server.root)
    for _ in range(3):
        with socket.create_connection((address.hostname, address.port), HANGING) as connection:
            connection.sendall(b"no HTTP at all\r\n\r\n")
            assert b" 400 " in connection.recv(1000)
    assert server.errors().count("Invalid HTTP request") == 1


@pytest.mark.parametrize("about", ["video", "text"])
def test_the_kv_is_that_of_full_attention_at_vllms_positions(server, app, about):
    engine = app.engine
    question = text(DESCRIBE)
    if about == "video":
        asked = [part("video", "clip.mp4"), question]
        content = [{"type": "video", "video": demo.video_path()}, question]
    else:
        asked = DESCRIBE
        content = DESCRIBE
    extra = {"kv_transfer_params": HAND_OVER, "num_frames": 64}
    reply = server.ask(asked, max_tokens=1, extra_body=extra)
    state = engine.prefill(
        messages=[{"role": "user", "content": content}], num_frames=64, positions="vllm"
    )
    first = engine.decode(state, max_new_tokens=1).token_ids
    assert reply.choices[0].message.content == engine.tokenizer.decode(
        first, skip_special_tokens=True
    )
    assert reply.choices[0].finish_reason == (
        "stop" if first[0] in engine.parts.eos_token_ids else "length"
    )
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (state.num_tokens, 1)

    ticket = Ticket.from_params(reply.model_extra["kv_transfer_params"])
    assert len(ticket.sources) == (2 if about == "video" else 1) and ticket.exact
    assert waiting_kv(server) == (1, state.num_tokens * DEMO_TOKEN_BYTES)
    with RemoteKV(ticket, HANGING, 1) as kv:
        layers = kv.layers(range(ticket.num_tokens), range(ticket.num_kv_heads))
        for (keys, values), layer in zip(layers, state.to_dynamic_cache().layers, strict=True):
            expected = layer.keys[0], layer.values[0]
            torch.testing.assert_close((keys, values), expected, rtol=1e-3, atol=1e-3)
        kv.confirm()
    wait_for(lambda: waiting_kv(server) == (0, 0))


def test_every_request_is_logged(server):
    """A refused request, too, and which KV was handed over, without its secret."""
    reply = server.ask("x", max_tokens=3, extra_headers={"X-Request-Id": "answered"})
    with pytest.raises(openai.BadRequestError):
        server.ask("x", max_tokens=10**6, extra_headers={"X-Request-Id": "refused"})
    extra = {
        "extra_body": {"kv_transfer_params": HAND_OVER},
        "extra_headers": {"X-Request-Id": "handed-over"},
    }
    handed = server.ask("x", max_tokens=1, **extra)
    ticket = Ticket.from_params(handed.model_extra["kv_transfer_params"])
    drop(ticket)
    names = ["chatcmpl-answered", "chatcmpl-refused", "chatcmpl-handed-over"]

    def told() -> dict:
        lines = [
            json.loads(line) for line in server.errors().splitlines() if '"request_id"' in line
        ]
        return {line["request_id"]: line for line in lines}

    wait_for(lambda: told().keys() >= set(names))
    lines = told()
    assert [lines[name]["status"] for name in names] == [200, 400, 200]
    answered = lines["chatcmpl-answered"]
    handed_over = lines["chatcmpl-handed-over"]
    assert answered["prompt_tokens"] == reply.usage.prompt_tokens
    assert handed_over["transfer"] == ticket.transfer and ticket.token not in server.errors()


def test_sigterm_lets_the_running_answer_end_and_kv_be_fetched(server):
    """Any host may be asked; host 0 hears of it, and each host's answer ends."""
    asked = {"max_tokens": 1, "extra_body": {"kv_transfer_params": HAND_OVER, "num_frames": 64}}
    reply = server.ask([part("video", "clip.mp4"), text(DESCRIBE)], **asked)
    ticket = Ticket.from_params(reply.model_extra["kv_transfer_params"])
    streams = [Stream(server, max_tokens=150, extra_body={"ignore_eos": True}) for _ in range(2)]
    wait_for(lambda: min(running.pieces for running in streams) > 1)
    os.kill(server.processes[1].pid, signal.SIGTERM)
    wait_for(lambda: server.health() == 503)
    with pytest.raises(openai.InternalServerError, match="stopping"):
        server.ask("x")
    assert all(running.end() is None and running.pieces > 50 for running in streams)
    assert server.health() == 503
    with RemoteKV(ticket, HANGING, 1) as kv:
        assert (
            sum(1 for _ in kv.layers(range(ticket.num_tokens), range(ticket.num_kv_heads)))
            == ticket.num_layers
        )
        kv.confirm()
    assert exit_statuses(server.processes) == [0, 0], server.errors()
