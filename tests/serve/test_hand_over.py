"""Requests whose KV another server continues from: what they are answered, and what becomes of the KV."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from apbv import demo
from apbv.kv.remote import RemoteKV, drop
from apbv.kv.ticket import Ticket
from apbv.launch.serve import parse_arguments
from apbv.launch.transfer import transfer_settings

from patience import HANGING, wait_for
from pool import exit_statuses
from servers import HAND_OVER, Server, asking, part, serving, text

QUESTION = "describe the clip shot by shot"
TOKENS = 500  # of KV that the server may hold
DEMO_TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, numbers, bytes of each


@pytest.fixture(scope="module")
def prefiller(tmp_path_factory):
    """The demo model on two hosts, computing exactly, whose KV nobody has to fetch in a hurry."""
    options = ["--model", "demo", "--dtype", "float32", "--media-dir", demo.video_path().parent]
    options += ["--kv-transfer", "tcp", "--kv-seconds", 3600, "--passing-len", 4096, "--grace", 1]
    options += ["--max-kv-mib", TOKENS * DEMO_TOKEN_BYTES / 2**20]
    with serving(tmp_path_factory.mktemp("prefiller") / "out", *options) as started:
        yield started
        assert ticket_for(started, "x").num_tokens  # which nobody fetches
        os.kill(started.processes[0].pid, signal.SIGTERM)
        assert exit_statuses(started.processes) == [0, 0], started.errors()


def handed_over(server: Server, content, **options):
    extra = {"kv_transfer_params": HAND_OVER, "num_frames": 64, **options}
    return server.ask(content, max_tokens=1, extra_body=extra)


def ticket_for(server: Server, content) -> Ticket:
    return Ticket.from_params(handed_over(server, content).model_extra["kv_transfer_params"])


def waiting_kv(server: Server) -> tuple[float, float]:
    return server.metric("apbv:kv_offers_waiting"), server.metric("apbv:kv_cache_bytes")


@pytest.mark.parametrize("about", ["video", "text"])
def test_the_kv_is_that_of_full_attention_at_vllms_positions(prefiller, engine, about):
    question, clip = text(QUESTION), {"type": "video", "video": str(demo.video_path())}
    sources = {"video": ([part("video", "clip.mp4"), question], [clip, question]), "text": (QUESTION, QUESTION)}
    asked, messages = sources[about][0], [{"role": "user", "content": sources[about][1]}]
    reply = handed_over(prefiller, asked)
    state = engine.prefill(messages=messages, num_frames=64, positions="vllm")
    first = engine.decode(state, max_new_tokens=1).token_ids
    assert reply.choices[0].message.content == engine.tokenizer.decode(first, skip_special_tokens=True)
    assert reply.choices[0].finish_reason == ("stop" if first[0] in engine.parts.eos_token_ids else "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (state.num_tokens, 1)

    ticket = Ticket.from_params(reply.model_extra["kv_transfer_params"])
    assert len(ticket.sources) == (2 if about == "video" else 1) and ticket.exact
    assert waiting_kv(prefiller) == (1, state.num_tokens * DEMO_TOKEN_BYTES)
    expected = state.to_dynamic_cache().layers
    with RemoteKV.open(ticket, HANGING, 1) as kv:
        layers = kv.layers(range(ticket.num_tokens), range(ticket.num_kv_heads))
        for (keys, values), layer in zip(layers, expected, strict=True):
            torch.testing.assert_close(keys, layer.keys[0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(values, layer.values[0], rtol=1e-3, atol=1e-3)
        kv.confirm()
    wait_for(lambda: waiting_kv(prefiller) == (0, 0))


def test_a_first_token_that_ends_the_answer_is_said_to_end_it(prefiller, engine):
    first = engine.generate("x", max_new_tokens=1)
    assert first.token_ids[0] in engine.parts.eos_token_ids and first.finish_reason == "stop"
    reply = handed_over(prefiller, "x")
    assert reply.choices[0].finish_reason == "stop"
    drop(Ticket.from_params(reply.model_extra["kv_transfer_params"]))
    wait_for(lambda: waiting_kv(prefiller) == (0, 0))


def test_kv_that_waits_keeps_others_waiting_at_the_limit(prefiller):
    video = [part("video", "clip.mp4"), text(QUESTION)]
    tickets = [ticket_for(prefiller, video) for _ in range(3)]
    assert waiting_kv(prefiller)[0] == 3 and 4 * tickets[0].num_tokens > TOKENS
    replies = []
    fourth = threading.Thread(target=lambda: replies.append(ticket_for(prefiller, video)))
    fourth.start()
    prefiller.wait_until("apbv:num_requests_waiting", 1)
    assert not replies
    drop(tickets[0])
    fourth.join(HANGING)
    assert len(replies) == 1
    for ticket in [*tickets[1:], *replies]:
        drop(ticket)
    wait_for(lambda: waiting_kv(prefiller) == (0, 0))
    assert prefiller.ask("x", max_tokens=2).usage.completion_tokens  # and answers go on as ever


def test_kv_in_a_folder_ends_by_itself_beside_a_draft(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    options = ["--model", "demo", "--media-dir", demo.video_path().parent, "--speculate", "vanilla"]
    with serving(tmp_path / "out", *options, "--kv-transfer", folder, "--kv-seconds", 2) as server:
        video = [part("video", "clip.mp4"), text("which letter has the border: red")]
        ticket = ticket_for(server, video)
        assert folder.resolve() == Path(ticket.path).parent
        assert server.ask(video, extra_body={"num_frames": 64}).choices[0].message.content
        wait_for(lambda: waiting_kv(server) == (0, 0))
        assert not any(folder.iterdir())
        assert server.metric("apbv:kv_transfers_total", how="expired") == 1


def test_a_server_that_ends_waits_for_its_kv_to_be_fetched(tmp_path):
    options = ["--model", "demo", "--kv-transfer", "tcp", "--kv-seconds", 3600, "--grace", 3600]
    with serving(tmp_path / "out", *options, hosts=1) as server:
        ticket = ticket_for(server, "x")
        os.kill(server.processes[0].pid, signal.SIGTERM)
        wait_for(lambda: server.health() == 503)
        for _ in range(20):  # far longer than a server takes that waits for nothing
            time.sleep(0.1)
            assert server.health() == 503
        with RemoteKV.open(ticket, HANGING, 1) as kv:
            layers = kv.layers(range(ticket.num_tokens), range(ticket.num_kv_heads))
            assert sum(1 for _ in layers) == ticket.num_layers
            kv.confirm()
        assert exit_statuses(server.processes) == [0], server.errors()


def test_without_a_transfer_nothing_is_handed_over(app):
    reply = app.request("POST", "/v1/chat/completions", content=asking(kv_transfer_params=HAND_OVER))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "kv_transfer_params"
    assert "--kv-transfer" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--kv-port 5000", "--kv-port needs --kv-transfer"),
        ("--kv-host ::1", "--kv-host needs --kv-transfer"),
        ("--kv-seconds 5", "--kv-seconds needs --kv-transfer"),
        ("--kv-transfer /no/such/folder", "no folder, and not tcp"),
        ("--kv-transfer tcp --kv-port 65535", "--kv-port must leave a port up to 65535 for each process"),
        ("--kv-transfer tcp --kv-port -1", "--kv-port must leave a port"),
        ("--kv-transfer tcp --kv-port 7999", "--port 8000 is one of the ports from --kv-port 7999 on"),
        ("--kv-transfer tcp --kv-seconds 0", "--kv-seconds must lie in 0 .. 86400"),
        ("--max-kv-mib 0", "--max-kv-mib must be positive"),
        ("--max-running -2", "--max-running must be positive"),
    ],
)
def test_options_that_make_no_sense_are_refused(monkeypatch, capsys, options, complaint):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "demo", *options.split()])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, "", "127.0.0.1"),
        ({}, "--host localhost", "127.0.0.1"),
        ({}, "--host 192.0.2.7", "192.0.2.7"),
        ({}, "--host 192.0.2.7 --kv-host 192.0.2.8", "192.0.2.8"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "", "127.0.0.1"),
    ],
)
def test_where_consumers_find_a_process(monkeypatch, environment, options, expected):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = parse_arguments(["--model", "demo", "--kv-transfer", "tcp", *options.split()])
    assert transfer_settings(options).host == expected


def test_with_hosts_on_other_machines_consumers_are_not_told_of_loopback(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    options = parse_arguments(["--model", "demo", "--kv-transfer", "tcp"])
    assert not transfer_settings(options).host.startswith("127.")
