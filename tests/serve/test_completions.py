"""Raw prompts, token ids and vLLM's fields, asked of a real engine in this process, also by OpenAI's client."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import asdict

import httpx2
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from apbv import demo
from apbv.config import SamplingConfig
from apbv.input.request import Question, Request
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV
from apbv.kv.ticket import Ticket, digest_of_tokens
from apbv.serve.media import MediaSettings
from apbv.serve.requests import ChatRequest, CompletionRequest
from apbv.serve.text import AnswerText
from apbv.stats import StageTimer

from patience import HANGING
from servers import InProcess, part, post, text

PROMPT = "name the letters in order"
CHAT = [{"role": "user", "content": "x"}]
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def complete(app, prompt=PROMPT, **fields) -> dict:
    reply = post(app, "/v1/completions", prompt=prompt, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(reply) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and lines.pop() == "[DONE]", reply.text
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def prompt_ids(app) -> list[int]:
    return app.engine.tokenizer(PROMPT)["input_ids"]


def test_a_prompt_may_be_text_or_token_ids(app, prompt_ids):
    fields = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    whole = complete(app, **fields)
    question = Request(
        Question(token_ids=prompt_ids),
        StageTimer(app.engine.hosts),
        sampling=SamplingConfig(max_new_tokens=6, ignore_eos=True),
    )
    expected = app.engine.answer(question)
    assert len(expected.token_ids) == 6
    choice = whole["choices"][0]
    assert choice["prompt_token_ids"] == prompt_ids and choice["token_ids"] == list(expected.token_ids)
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (expected.text, "length", None)
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-") and whole["model"] == "demo"
    assert whole["usage"] == {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": 6,
        "total_tokens": len(prompt_ids) + 6,
    }
    for prompt in ([PROMPT], prompt_ids, [prompt_ids]):
        assert complete(app, prompt, **fields)["choices"] == whole["choices"]
    assert complete(app, max_tokens=6, ignore_eos=True)["choices"][0].keys() == choice.keys() - {
        "prompt_token_ids",
        "token_ids",
    }


def test_without_a_limit_an_answer_has_sixteen_tokens_or_what_there_is_room_for(app, prompt_ids):
    assert complete(app, ignore_eos=True)["usage"]["completion_tokens"] == 16
    most = app.worker.max_model_len
    prompt = (prompt_ids * most)[: most - 3]
    assert complete(app, prompt, ignore_eos=True)["usage"]["completion_tokens"] == 3
    reply = post(app, "/v1/completions", prompt=prompt, max_tokens=4)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("endpoint", ["chat", "raw"])
def test_a_stream_has_the_tokens_text_and_usage_of_the_whole_answer(app, endpoint):
    fields = {"max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
    path = "/v1/completions"
    if endpoint == "chat":
        path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}
    else:
        prompt = {"prompt": PROMPT}
    whole = post(app, path, **prompt, **fields).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(post(app, path, **prompt, **fields, stream=True, stream_options=options))
    *said, last = got
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in said]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 9
    assert all(chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] for chunk in said)
    choices = [chunk["choices"][0] for chunk in said]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    one_by_one = [len(choice.get("token_ids", [])) for choice in choices]
    if endpoint == "chat":
        assert (
            "".join(choice["delta"].get("content", "") for choice in choices)
            == (whole["choices"][0]["message"]["content"])
        )
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert said[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "prompt_token_ids" not in said[1]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
        assert "prompt_token_ids" not in choices[1]
    assert ids == whole["choices"][0]["token_ids"] and max(one_by_one) == 1, "each token comes as it is made"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in got}) == 1
    only_last = chunks(post(app, path, **prompt, **fields, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in only_last[:-1]] == [None] * (len(only_last) - 1)
    assert only_last[-1]["usage"] == whole["usage"]
    plain = chunks(post(app, path, **prompt, **fields, stream=True))
    assert not any("usage" in chunk for chunk in plain) and len(plain) == len(said)


def test_stop_tokens_end_an_answer_and_are_no_part_of_its_text(app):
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    token_ids = complete(app, **fields)["choices"][0]["token_ids"]
    at = next(index for index in range(1, 12) if token_ids[index] not in token_ids[:index])
    stopped = complete(app, **fields, stop_token_ids=[token_ids[at], 7])
    choice = stopped["choices"][0]
    assert choice["token_ids"] == token_ids[: at + 1] and choice["finish_reason"] == "stop"
    assert choice["text"] == app.engine.tokenizer.decode(token_ids[:at], skip_special_tokens=True)
    assert stopped["usage"]["completion_tokens"] == at + 1


def test_an_answer_has_at_least_as_many_tokens_as_are_asked_for(app):
    chat = {"messages": CHAT, "max_tokens": 8}
    free = post(app, "/v1/chat/completions", **chat).json()
    assert free["usage"]["completion_tokens"] < 6 and free["choices"][0]["finish_reason"] == "stop"
    held = post(app, "/v1/chat/completions", **chat, min_tokens=6).json()
    assert held["usage"]["completion_tokens"] >= 6


@example(data="baa", stop=["a", "bab"], least=2, stop_token=None)
@given(data=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
       least=st.integers(0, 8), stop_token=st.sampled_from(["a", "b", None]))  # fmt: skip
def test_where_a_stop_string_or_token_ends_an_answer(data, stop, least, stop_token):
    """Every letter is a token; a string ends the answer with the first letter behind the least to complete it."""
    expected, stopped = data, False
    for end in range(1, len(data) + 1):
        if data[end - 1] == stop_token:
            expected, stopped = data[: end - 1], True
            break
        found = [string for string in stop if data[:end].endswith(string)] if end > least else []
        if found:
            expected, stopped = data[: end - max(map(len, found))], True
            break
    tokens = [ord(letter) for letter in data]
    ids = [] if stop_token is None else [ord(stop_token)]
    answer = AnswerText(lambda these: "".join(map(chr, these)), stop, ids, least)
    said = [answer.update(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert "".join(said) + answer.finish(tokens) == expected and answer.stopped == stopped
    at_once = AnswerText(lambda these: "".join(map(chr, these)), stop, ids, least)
    assert at_once.finish(tokens) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1, 6]}, "prompt"),  # a placeholder of the video
        ({"prompt": "<|video_pad|>"}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 0}, "logprobs"),
        ({"prompt": "x", "logprobs": 5}, "logprobs"),
        ({"prompt": "x", "num_frames": 8}, "num_frames"),
        ({"prompt": "x", "messages": [1]}, "messages"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "stop_token_ids": [1], "min_tokens": 1}, "stop_token_ids"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "model": "another"}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_is_named(app, fields, param):
    reply = post(app, "/v1/completions", **fields)
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param and reply.json()["error"]["message"]


def test_neutral_fields_are_accepted(app):
    neutral = {
        "echo": False,
        "best_of": 1,
        "suffix": "",
        "logprobs": None,
        "use_beam_search": False,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "cache_salt": "salt",
        "request_id": "x",
        "priority": 3,
        "stop": None,
        "kv_transfer_params": None,
    }
    assert complete(app, max_tokens=1, **neutral)["usage"]["completion_tokens"] == 1
    reply = post(
        app,
        "/v1/chat/completions",
        messages=CHAT,
        max_tokens=1,
        mm_processor_kwargs={},
        add_special_tokens=False,
        include_reasoning=True,
    )
    assert reply.status_code == 200


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest], ids=["chat", "raw"])
def test_a_router_asks_for_the_prompts_kv(body):
    """What the routers send: one token, and their own connector's empty fields."""
    prompt = {"prompt": "x"} if body is CompletionRequest else {"messages": CHAT}
    asked = {**prompt, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
    request = body.parse(json.dumps({**asked, "min_tokens": 100}).encode())
    assert request.hands_over and request.token_limit == 1
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": None}, {"remote_host": "h"}):
        assert not body.parse(json.dumps({**asked, "kv_transfer_params": params}).encode()).hands_over


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "does not load KV"),
        ({"kv_transfer_params": ASKED, "stream": True}, "stream", "stream must be false"),
        ({"kv_transfer_params": ASKED, "n": 2}, "n", "n must be 1"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params", "do_remote_decode must be"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params", "should be an object"),
    ],
    ids=["loads", "streams", "several", "no bool", "no object"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hand_overs_that_cannot_be(app, path, fields, param, message):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    error = post(app, path, **prompt, **fields).json()["error"]
    assert error["param"] == param and message in error["message"]


def test_a_hand_over_makes_one_token_of_an_order(app):
    request = CompletionRequest.parse(
        json.dumps({"prompt": "x", "max_tokens": 9, "min_tokens": 5, "kv_transfer_params": ASKED}).encode()
    )
    with ExitStack() as stack:
        order = app.worker.reader.read(request, stack).order
    assert (order.hands_over, order.max_new_tokens, order.min_tokens) == (True, 1, 1)
    assert asdict(order)["prompt_token_ids"] == app.engine.tokenizer("x")["input_ids"]


@pytest.fixture(scope="module")
def handing_over():
    app = InProcess(
        MediaSettings(folder=demo.video_path().parent),
        offers=lambda hosts, on_end: Offers(hosts, host="127.0.0.1", seconds=HANGING, on_end=on_end),
    )
    with app.offers:
        yield app
    app.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_router_gets_all_that_the_other_server_needs(handing_over, path):
    about_a_video = [{"role": "user", "content": [part("video", "clip.mp4"), text("which letter")]}]
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": about_a_video}
    alone = post(handing_over, path, **prompt, max_tokens=1, return_token_ids=True).json()
    assert "kv_transfer_params" not in alone
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    reply = post(handing_over, path, **prompt, **limits, return_token_ids=True, kv_transfer_params=ASKED)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    params = answer.pop("kv_transfer_params")
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert answer["usage"] == alone["usage"] and answer["choices"][0].keys() == alone["choices"][0].keys()
    if "prompt" in prompt:  # behind a video the positions are the other server's, and so may be the token
        assert answer["choices"] == alone["choices"]
    prompt_ids = (answer if "prompt_token_ids" in answer else answer["choices"][0])["prompt_token_ids"]
    ticket = Ticket.from_params(params)
    assert ticket.num_tokens == answer["usage"]["prompt_tokens"] == len(prompt_ids)
    assert ticket.tokens_sha256 == digest_of_tokens(prompt_ids)
    with RemoteKV.open(ticket, timeout=HANGING) as kv:
        layers = [keys.shape[1] for keys, _ in kv.layers(range(ticket.num_tokens), range(ticket.num_kv_heads))]
        assert layers == [ticket.num_tokens] * ticket.num_layers
        kv.confirm()
    # Sent back to this server, they are refused.
    refused = post(handing_over, path, **prompt, kv_transfer_params=params).json()["error"]
    assert refused["param"] == "kv_transfer_params" and "does not load KV" in refused["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_for_the_other_server_is_left_to_it(handing_over, path):
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    of_the_decoder = {
        "logprobs": 3 if path == "/v1/completions" else True,
        "top_k": 5,
        "presence_penalty": 0.5,
        "structured_outputs": {"choice": ["a", "b"]},
        "stop": ["a", "b", "c", "d", "e" * 2000],
        "stop_token_ids": [3],
        "min_tokens": 2,
    }
    asked = {**prompt, "max_tokens": 1, **of_the_decoder}
    reply = post(handing_over, path, **asked, kv_transfer_params=ASKED)
    assert reply.status_code == 200 and "kv_transfer_params" in reply.json(), reply.text
    assert post(handing_over, path, **asked).status_code == 400
    # What changes the prompt is no other server's alone.
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert post(handing_over, path, **asked, tools=tools, kv_transfer_params=ASKED).status_code == 400


def test_a_server_that_hands_nothing_over_says_so(app):
    error = post(app, "/v1/completions", prompt="x", max_tokens=1, kv_transfer_params=ASKED).json()["error"]
    assert error["param"] == "kv_transfer_params" and "--kv-transfer" in error["message"]


def test_openais_client_asks_both_endpoints(app, prompt_ids):
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app.app))
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)
    extra = {"ignore_eos": True}

    async def ask() -> None:
        whole = await client.completions.create(model="demo", prompt=prompt_ids, max_tokens=5, extra_body=extra)
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 5)
        stream = await client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        got = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in got[:-1]) == whole.choices[0].text
        assert got[-1].usage == whole.usage and got[-2].choices[0].finish_reason == "length"
        chat = await client.chat.completions.create(
            model="demo", messages=CHAT, max_completion_tokens=5, extra_body=extra
        )
        assert chat.usage.completion_tokens == 5 and chat.choices[0].message.role == "assistant"
        with pytest.raises(openai.BadRequestError, match="echo is not supported") as error:
            await client.completions.create(model="demo", prompt="x", echo=True)
        assert error.value.param == "echo"
        assert [model.id async for model in client.models.list()] == ["demo"]
        await http.aclose()

    app.loop.run_until_complete(asyncio.wait_for(ask(), HANGING))
