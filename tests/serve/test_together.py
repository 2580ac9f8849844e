"""Several requests in servers of two real hosts: order, limits, who leaves, and whom a failure or
an end hits."""

import os
import signal
from contextlib import contextmanager

import openai
import pytest
from safetensors.torch import load_file, save_file

from apbv import demo
from apbv.kv.cache import GROWTH_ROWS
from apbv.kv.ticket import Ticket

from apbv_tests import families
from apbv_tests.patience import wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.servers import ENDLESS, HAND_OVER, Server, Stream, left_open, part, serving, text

IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A server with room for the KV of 24,000 tokens on each host and a short queue; the last test
    of it ends it.

    Its model's answers end by their length, or, where a "Z" is asked, by NaN.
    """
    folder = tmp_path_factory.mktemp("together")
    model = families.save_checkpoint("qwen2", folder / "model")
    weights = load_file(model / "model.safetensors")
    poisoned = families.build_processor("qwen2").encode("Z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][poisoned] = float("nan")
    weights["lm_head.weight"][poisoned] = 0.0  # so that no answer chooses it
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    layers = sum(name.endswith("q_proj.weight") for name in weights)
    token_bytes = layers * 2 * families.KV_HEADS * families.HEAD_DIM * 4
    options = ["--model", model, "--served-model-name", "demo", "--max-queue", 2, "--grace", 0.5]
    options += [
        "--kv-transfer",
        "tcp",
        "--max-kv-mib",
        (24_000 + GROWTH_ROWS) * token_bytes / 2**20,
    ]
    with serving(folder / "out", *options) as started:
        yield started


@contextmanager
def running(server: Server, **options):
    """A streamed answer that runs until the end of the block, when its client hangs up."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        **ENDLESS,
        **options,
    }
    with server.http.stream("POST", f"{server.url}/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        # Behind every event is an empty line.
        yield lambda count=1: [next(lines) for _ in range(2 * count)]


def wait_until_idle(server: Server) -> None:
    wait_for(lambda: not any(server.metric(f"apbv:{name}") for name in IDLE))


def test_answers_go_on_beside_who_reads_nothing_who_leaves_and_what_fails(endless):
    # From the first nothing is taken.
    with running(endless, max_tokens=9000), running(endless, max_tokens=9000) as read:
        assert endless.ask("y" * 25, max_tokens=10).usage.completion_tokens == 10
        endless.wait_until("apbv:num_requests_running", 2)
        assert endless.http.get(f"{endless.root}/load").json() == {"server_load": 2}
        read(50)
        with running(endless, max_tokens=3000):
            more = endless.metric("apbv:kv_cache_bytes")
        wait_for(lambda: 0 < endless.metric("apbv:kv_cache_bytes") < more)
        endless.wait_until("apbv:num_requests_running", 2)
        for extra in ({}, {"kv_transfer_params": HAND_OVER}):
            with pytest.raises(openai.InternalServerError, match="NaN or infinite logits"):
                endless.ask("Z", extra_body=extra)  # which fails alone
            read(20)
    wait_until_idle(endless)


def test_a_full_queue_and_clients_that_leave_unasked(endless):
    """Who fits on no host waits, and nobody overtakes: a small request would fit beside the
    first."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], **ENDLESS}
    with left_open(endless, body):  # running, and not streaming
        endless.wait_until("apbv:num_requests_running", 1)
    wait_until_idle(endless)
    with running(endless), running(endless) as read:
        large = Stream(endless, **ENDLESS)
        endless.wait_until("apbv:num_requests_waiting", 1)
        small = Stream(endless, max_tokens=5)
        endless.wait_until("apbv:num_requests_waiting", 2)
        with pytest.raises(openai.RateLimitError) as caught:
            endless.ask("x", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        read(100)
        assert (large.pieces, small.pieces) == (0, 0)
    assert small.end() is None and small.pieces > 1 and large.pieces > 0  # which began before it
    with running(endless):
        with left_open(endless, body):
            endless.wait_until("apbv:num_requests_waiting", 1)
        endless.wait_until("apbv:num_requests_waiting", 0)
        endless.wait_until("apbv:num_requests_running", 2)
        assert [endless.metric("apbv:host_answers", host=host) for host in "01"] == [1, 1]
    large.leave()
    wait_until_idle(endless)


def test_asked_to_end_a_server_refuses_who_waits_and_cuts_who_runs_after_the_grace(endless):
    answers = [Stream(endless, **ENDLESS) for _ in range(2)]  # of one host each
    wait_for(lambda: min(answer.pieces for answer in answers) > 1)
    waiting = Stream(endless, **ENDLESS)
    endless.wait_until("apbv:num_requests_waiting", 1)
    for process in endless.processes:  # as torchrun does
        os.kill(process.pid, signal.SIGTERM)
    assert isinstance(waiting.end(), openai.InternalServerError)
    assert waiting.error.status_code == 503
    assert exit_statuses(endless.processes) == [0, 0], endless.errors()
    assert all("stopping" in str(answer.end()) for answer in answers)


@pytest.mark.thorough
def test_beside_a_draft_answers_are_single_kv_expires_and_a_host_that_dies_ends_all(tmp_path):
    options = ["--model", "demo", "--media-dir", demo.video_path().parent, "--speculate", "sd_tree"]
    with serving(tmp_path / "out", *options, "--kv-transfer", "tcp", "--kv-seconds", 0.2) as server:
        assert "one answer at a time: a draft tree is verified alone" in server.printed()
        video = [part("video", "clip.mp4"), text("which letter has the border: red")]
        handed = server.ask(video, extra_body={"kv_transfer_params": HAND_OVER, "num_frames": 64})
        ticket = Ticket.from_params(handed.model_extra["kv_transfer_params"])
        assert ticket.transfer
        with running(server, ignore_eos=True, max_tokens=3000) as read:
            waiting = Stream(server, max_tokens=3)
            server.wait_until("apbv:num_requests_waiting", 1)
            read(20)
            assert server.metric("apbv:num_requests_running") == 1 and not waiting.pieces
        assert waiting.end() is None and waiting.pieces
        assert server.ask(video, extra_body={"num_frames": 64}).choices[0].message.content
        assert server.metric("apbv:spec_decode_num_drafts_total") > 0
        server.wait_until("apbv:kv_transfers_total", 1, how="expired")
        wait_until_idle(server)
        streams = [
            Stream(server, max_tokens=3000, extra_body={"ignore_eos": True}) for _ in range(2)
        ]
        server.wait_until("apbv:num_requests_waiting", 1)
        server.processes[1].kill()
        for stream in streams:
            assert "a host has failed" in str(stream.end())
        wait_for(lambda: server.health() != 200)
        assert exit_statuses(server.processes)[0] == 75 and "error (host " in server.errors()
