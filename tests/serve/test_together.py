"""Several requests in one server of two hosts: answers, order, limits, and whom a failure hits."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
from safetensors.torch import load_file, save_file

from apbv.kv.growing import GROWTH_ROWS

import families
from patience import HANGING, wait_for
from pool import exit_statuses
from servers import ENDLESS, Server, Stream, part, serving, text

# A token of the random models' KV: K and V of 2 heads of 16 numbers, fp32, in every layer.
TOKEN_BYTES = 2 * families.KV_HEADS * families.HEAD_DIM * 4


@pytest.fixture(scope="module")
def endless(tmp_path_factory, endless_model):
    """A model whose answers end by their length, with room for the KV of 24,000 tokens."""
    most = mib(24_000 + GROWTH_ROWS, endless_model)
    options = ["--model", endless_model, "--served-model-name", "demo", "--max-kv-mib", most]
    with serving(tmp_path_factory.mktemp("together") / "out", *options) as started:
        yield started
        os.kill(started.processes[0].pid, signal.SIGTERM)
        assert exit_statuses(started.processes) == [0, 0], started.errors()


def mib(num_tokens: int, checkpoint) -> float:
    layers = len({name.split(".layers.")[1].split(".")[0] for name in decoder_weights(checkpoint)})
    return num_tokens * TOKEN_BYTES * layers / 2**20


def decoder_weights(checkpoint) -> list[str]:
    return [name for name in load_file(checkpoint / "model.safetensors") if name.endswith("q_proj.weight")]


@contextmanager
def running(server: Server, **options):
    """A streamed answer that runs until the end of the block, when its client hangs up."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS, **options}
    with server.http.stream("POST", f"{server.url}/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        yield lambda count=1: [next(lines) for _ in range(2 * count)]  # behind every event is an empty line


def is_idle(server: Server) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes")
    return not any(server.metric(f"apbv:{name}") for name in names)


REQUESTS = [
    ("name the letters in order", {}),
    ("describe the clip shot by shot", {"max_tokens": 40}),
    ("how many letters are shown", {"ignore_eos": True, "max_tokens": 25}),
    ("describe the clip shot by shot", {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 30}),
    ("which letter has the border: red", {"min_tokens": 6, "max_tokens": 9}),
    ("describe the clip shot by shot", {"stop": "letter", "max_tokens": 60}),
    ("name the letters in order", {"temperature": 1.3, "seed": 2**63, "max_tokens": 12}),
    ("which letter has the border: red", {"ignore_eos": True, "max_tokens": 64}),
]


def test_answers_to_several_at_once_are_those_to_each_alone(server):
    def answer(request) -> tuple[list[int], str, str]:
        question, options = request
        extra = {name: options[name] for name in ("ignore_eos", "min_tokens") if name in options}
        usual = {name: value for name, value in options.items() if name not in extra}
        content = [part("video", "clips/a clip.mp4"), text(question)]
        body = {**extra, "num_frames": 64, "return_token_ids": True}
        chunks = list(server.ask(content, stream=True, extra_body=body, **usual))
        tokens = [token for chunk in chunks for token in chunk.choices[0].model_extra.get("token_ids") or []]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return tokens, said, chunks[-1].choices[0].finish_reason

    alone = [answer(request) for request in REQUESTS]
    assert len({tuple(tokens) for tokens, _, _ in alone}) > 4 and all(said for _, said, _ in alone)
    with ThreadPoolExecutor(len(REQUESTS)) as clients:
        for _ in range(2):
            assert list(clients.map(answer, REQUESTS)) == alone


def test_prompts_are_prefilled_and_answered_while_another_answer_goes_on(endless):
    with running(endless) as read:
        for number in range(3):
            read(20)
            assert endless.ask("y" * 5**number, max_tokens=10).usage.completion_tokens == 10
        assert endless.metric("apbv:num_requests_running") == 1
        read(20)
    wait_for(lambda: is_idle(endless))


def test_a_client_that_leaves_frees_its_place_and_no_other(endless):
    with running(endless, max_tokens=9000) as stays:
        with running(endless, max_tokens=9000) as leaves:
            leaves(5)
            assert endless.metric("apbv:num_requests_running") == 2
            both = endless.metric("apbv:kv_cache_bytes")
        endless.wait_until("apbv:num_requests_running", 1)
        assert 0 < endless.metric("apbv:kv_cache_bytes") < both
        stays(50)
    wait_for(lambda: is_idle(endless))


def test_a_client_that_reads_nothing_keeps_nobody_waiting(endless):
    with running(endless):  # and takes nothing from its connection
        assert endless.ask("x", max_tokens=300).usage.completion_tokens == 300
    wait_for(lambda: is_idle(endless))


def test_who_does_not_fit_waits_and_nobody_overtakes(endless):
    """A small request would fit beside the first, but comes behind a large one."""
    with running(endless) as read:
        large = Stream(endless, **ENDLESS)
        endless.wait_until("apbv:num_requests_waiting", 1)
        small = Stream(endless, max_tokens=5)
        endless.wait_until("apbv:num_requests_waiting", 2)
        read(100)
        assert (large.pieces, small.pieces) == (0, 0)
        assert endless.metric("apbv:num_requests_waiting") == 2
    assert small.end() is None and small.pieces > 1
    assert large.pieces > 0  # which began before it
    assert endless.metric("apbv:num_requests_running") == 1
    large.leave()
    wait_for(lambda: is_idle(endless))


def test_what_can_never_fit_is_refused_at_once(endless):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 24000 tokens") as caught:
        endless.ask("x", max_tokens=25_000)
    assert caught.value.code == "context_length_exceeded"
    assert [model.max_model_len for model in endless.client.models.list()] == [24_000]


def test_an_answer_that_fails_fails_alone(tmp_path):
    """A token that the model makes NaN of ends the answers of those whose prompt has it."""
    path = families.save_checkpoint("qwen2", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    poisoned = families.build_processor("qwen2").encode("Z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][poisoned] = float("nan")
    weights["lm_head.weight"][poisoned] = 0.0  # so that no answer chooses it
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with serving(tmp_path / "out", "--model", path, "--served-model-name", "demo") as server:
        with running(server, ignore_eos=True) as read:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="NaN or infinite logits"):
                    server.ask("Z")
                read(10)
            assert server.ask("x", max_tokens=5).usage.completion_tokens == 5
            assert server.metric("apbv:num_requests_running") == 1
        wait_for(lambda: is_idle(server))


def test_answers_are_single_where_they_cannot_be_decoded_together(tmp_path, endless_model):
    options = ["--model", endless_model, "--served-model-name", "demo", "--kv", "sharded"]
    with serving(tmp_path / "out", *options) as server:
        with running(server) as read:
            waiting = threading.Thread(target=server.ask, args=("x",), kwargs={"max_tokens": 3})
            waiting.start()
            server.wait_until("apbv:num_requests_waiting", 1)
            read(20)
            assert server.metric("apbv:num_requests_running") == 1
        waiting.join(HANGING)
        assert not waiting.is_alive()
        assert "one answer at a time: all hosts take part in every token" in server.printed()
