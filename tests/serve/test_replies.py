"""What the app replies in this process: answers, streams, hand-overs, tokens, and what operators
ask."""

import gzip
import json
from contextlib import ExitStack, closing

import pytest

from apbv.config import SamplingParams
from apbv.kv.facts import digest_of_tokens
from apbv.kv.ticket import Ticket
from apbv.request.request import Question, Request, RequestSettings
from apbv.serve.control.job import Job, Piece
from apbv.serve.protocols.replies import Replies
from apbv.serve.protocols.requests import ChatRequest, CompletionRequest
from apbv.stats import StageTimer

from apbv_tests.scripts import ROOT
from apbv_tests.servers import (
    HAND_OVER,
    InProcess,
    asking,
    chunks,
    data_url,
    part,
    post,
    text,
    token_ids_of,
)

PROMPT = "name the letters in order"
CHAT = [{"role": "user", "content": "x"}]
ENDPOINTS = {"/v1/chat/completions": {"messages": CHAT}, "/v1/completions": {"prompt": PROMPT}}


def complete(app, prompt=PROMPT, **fields) -> dict:
    reply = post(app, "/v1/completions", prompt=prompt, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def prompt_ids(app) -> list[int]:
    return app.engine.tokenizer(PROMPT)["input_ids"]


def test_a_prompt_may_be_text_or_token_ids(app, prompt_ids):
    fields = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    whole = complete(app, **fields)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    request = Request(
        Question(token_ids=prompt_ids),
        StageTimer(app.engine.hosts),
        RequestSettings(sampling=sampling),
    )
    expected = app.engine.answer(request)
    (choice,) = whole["choices"]
    assert choice["prompt_token_ids"] == prompt_ids
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    assert whole["model"] == "demo"
    num = len(prompt_ids)
    assert whole["usage"] == {"prompt_tokens": num, "completion_tokens": 6, "total_tokens": num + 6}
    for prompt in ([PROMPT], prompt_ids, [prompt_ids]):
        assert complete(app, prompt, **fields)["choices"] == whole["choices"]


def test_a_stream_without_a_client_ends_silently(app):
    """The server logs what a stream raises, with a traceback."""

    async def no_more():
        for event in ():
            yield event

    async def left_early() -> list[str]:
        replies = Replies([Job()], ChatRequest.parse(asking(stream=True)), "demo")
        return [chunk async for chunk in replies.stream(Piece("x", [1]), no_more())]

    assert "[DONE]" not in app.loop.run_until_complete(left_early())[-1]


def test_without_a_limit_an_answer_has_sixteen_tokens_or_what_there_is_room_for(app, prompt_ids):
    prompt = (prompt_ids * 48)[: app.reader.max_model_len - 3]
    for given, count in ((PROMPT, 16), (prompt, 3)):
        assert complete(app, given, ignore_eos=True)["usage"]["completion_tokens"] == count
    error = post(app, "/v1/completions", prompt=prompt, max_tokens=4).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_has_the_tokens_text_and_usage_of_the_whole_answer(app, path):
    fields = {**ENDPOINTS[path], "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
    whole = post(app, path, **fields).json()

    def streamed(**options) -> list[dict]:
        return chunks(post(app, path, **fields, stream=True, **options))

    got = streamed(stream_options={"include_usage": True, "continuous_usage_stats": True})
    *said, last = got
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in said]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 9
    assert all(chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] for chunk in said)
    choices = [chunk["choices"][0] for chunk in said]
    (answer,) = whole["choices"]
    is_chat = "messages" in fields
    opening, owner = (said, whole) if is_chat else (choices, answer)
    told = "".join(
        each["delta"].get("content", "") if is_chat else each["text"] for each in choices
    )
    assert told == (answer["message"]["content"] if is_chat else answer["text"])
    if is_chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
    assert opening[0]["prompt_token_ids"] == owner["prompt_token_ids"]
    assert "prompt_token_ids" not in opening[1]
    ids = [choice.get("token_ids", []) for choice in choices]
    assert token_ids_of(choices) == answer["token_ids"]
    assert max(map(len, ids)) == 1, "each token comes as it is made"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in got}) == 1
    usages = [chunk["usage"] for chunk in streamed(stream_options={"include_usage": True})]
    assert usages == [None] * len(said) + [whole["usage"]]
    assert not any("usage" in chunk for chunk in streamed())


def test_stop_tokens_end_an_answer_and_are_no_part_of_its_text(app):
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    token_ids = complete(app, **fields)["choices"][0]["token_ids"]
    at = next(index for index in range(1, 12) if token_ids[index] not in token_ids[:index])
    stopped = complete(app, **fields, stop_token_ids=[token_ids[at], 7])
    (choice,) = stopped["choices"]
    assert choice["token_ids"] == token_ids[: at + 1] and choice["finish_reason"] == "stop"
    assert choice["text"] == app.engine.tokenizer.decode(token_ids[:at], skip_special_tokens=True)
    assert stopped["usage"]["completion_tokens"] == at + 1


def test_a_hand_over_makes_one_token_and_what_is_for_the_other_server_is_left_to_it(handing_over):
    """Whatever says how tokens are chosen; but not what changes the prompt."""
    of_the_decoder = {
        "top_k": 5,
        "structured_outputs": {"choice": ["a", "b"]},
        "stop": ["e" * 2000],
    }
    of_the_decoder |= {"regex": "a", "no_repeat_ngram_size": 3}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for (path, prompt), logprobs in zip(ENDPOINTS.items(), (True, 3), strict=True):
        asked = {**prompt, **of_the_decoder, "max_tokens": 1, "logprobs": logprobs}
        reply = post(handing_over, path, **asked, kv_transfer_params=HAND_OVER)
        assert reply.status_code == 200 and "kv_transfer_params" in reply.json(), reply.text
        assert post(handing_over, path, **asked).status_code == 400
        assert (
            post(handing_over, path, **asked, tools=tools, kv_transfer_params=HAND_OVER).status_code
            == 400
        )
        body = CompletionRequest if "prompt" in prompt else ChatRequest
        for params in (
            None,
            {},
            {"do_remote_decode": False, "do_remote_prefill": None},
            {"remote_host": "h"},
        ):
            assert not body.parse(
                json.dumps({**prompt, "kv_transfer_params": params}).encode()
            ).hands_over
        asked = {**prompt, "kv_transfer_params": HAND_OVER, "min_tokens": 100, "seed": -5}
        request = body.parse(json.dumps(asked).encode())
        with ExitStack() as stack:
            order = handing_over.reader.read(request, stack).order
        chosen = order.settings.sampling
        assert order.hands_over is True
        assert chosen.max_new_tokens == 1
        assert chosen.min_tokens == 1
        assert chosen.seed == 2**64 - 5


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_router_gets_all_that_the_other_server_needs(handing_over, path):
    asked = {**ENDPOINTS[path], "max_tokens": 1, "return_token_ids": True}
    alone = post(handing_over, path, **asked).json()
    assert "kv_transfer_params" not in alone
    answer = post(handing_over, path, **asked, kv_transfer_params=HAND_OVER).json()
    params = answer.pop("kv_transfer_params")
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert answer["usage"] == alone["usage"] and answer["choices"] == alone["choices"]
    prompt_ids = (answer if "prompt_token_ids" in answer else answer["choices"][0])[
        "prompt_token_ids"
    ]
    ticket = Ticket.from_params(params)
    assert ticket.num_tokens == answer["usage"]["prompt_tokens"] == len(prompt_ids)
    assert ticket.tokens_sha256 == digest_of_tokens(prompt_ids)


def test_a_first_token_that_ends_the_answer_is_said_to_end_it(handing_over):
    """Its prompt's; other prompts' first tokens do not."""
    for question, reason in (("x", "stop"), (PROMPT, "length")):
        first = handing_over.engine.generate(question, max_new_tokens=1)
        assert first.finish_reason == reason
        messages = [{"role": "user", "content": question}]
        reply = post(
            handing_over, "/v1/chat/completions", messages=messages, kv_transfer_params=HAND_OVER
        ).json()
        assert reply["choices"][0]["finish_reason"] == reason


def test_neutral_fields_and_such_without_effect_are_taken(app):
    neutral = dict.fromkeys(
        ("n", "logprobs", "stop", "kv_transfer_params", "response_format", "tools")
    )
    neutral |= {
        "best_of": 1,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "echo": False,
        "cache_salt": "salt",
    }
    for path, prompt in ENDPOINTS.items():
        assert (
            post(app, path, **prompt, **neutral, max_tokens=1).json()["usage"]["completion_tokens"]
            == 1
        )


def test_content_is_read_as_people_write_it(app, media):
    """The parts of OpenAI's, Qwen's, transformers' and vLLM's examples: each form has the tokens of
    OpenAI's."""
    name = "picture.png"
    inline = data_url(media / "picture.png")
    bare = inline.partition(",")[2]
    clip = f"file://{media / 'clip.mp4'}"

    def tokens(*content, status=200):
        body = {
            "messages": [{"role": "user", "content": [*content, text("which")]}],
            "num_frames": 2,
        }
        reply = post(app, "/tokenize", **body)
        assert reply.status_code == status, reply.text
        return reply.json().get("tokens")

    pictures = [
        {"type": "image", "image": name},
        {"type": "image", "url": name},
        {"type": "image", "path": name},
    ]
    pictures += [
        {"image": name},
        {"image_url": name},
        {"image_url": {"url": name, "detail": "low"}},
    ]
    pictures += [
        {"type": "image_url", "image_url": name},
        {"type": "input_image", "image_url": inline},
    ]
    pictures += [
        {"type": "image", "base64": bare},
        {"type": "image", "image": f"data:image;base64,{bare}"},
    ]
    pictures += [{"type": "image", "image": f"file://{media / name}"}]
    videos = [
        {"type": "video", "video": clip, "max_pixels": 151200, "fps": 1.0},
        {"type": "video", "url": clip},
    ]
    videos += [{"video": "clip.mp4"}, {"type": "video_url", "video_url": "clip.mp4"}]
    for kind, forms in (("image", pictures), ("video", videos)):
        expected = tokens(part(kind, name if kind == "image" else "clip.mp4"))
        for form in forms:
            assert tokens(form) == expected, form
    for form in ("hello", {"text": "hello"}, {"type": "input_text", "text": "hello"}):
        assert tokens(form) == tokens(text("hello"))
    wrong = [
        {"image": name, "video": "clip.mp4"},
        {"type": "image"},
        {"type": "video", "video": [name]},
    ]
    for form in [
        *wrong,
        {"kind": 1},
        {"type": "file", "file": {"file_id": "a"}},
        {"type": ["image"]},
        5,
    ]:
        tokens(form, status=400)


def test_bodies_are_utf8(app):
    """A byte order mark is no part of it; what is compressed or in another encoding is not read."""
    body = json.dumps({"prompt": "J \u00e9"}, ensure_ascii=False).encode()
    for data, headers, status in (
        (b"\xef\xbb\xbf" + body, {}, 200),
        (body, {"content-type": "application/json; charset=UTF-8"}, 200),
        (body, {"content-type": "application/json; charset=latin-1"}, 200),
        (body.decode().encode("utf-16"), {"content-type": "application/json; charset=utf-16"}, 400),
        (gzip.compress(body), {"content-encoding": "gzip"}, 415),
        (body.decode().encode("latin-1"), {}, 400),
    ):
        reply = app.request("POST", "/tokenize", content=data, headers=headers)
        assert reply.status_code == status, reply.text
        assert (status == 200) == ("error" not in reply.json())


def test_pages_of_listed_origins_alone_may_call():
    page = {"Origin": "https://example.com"}
    asked = {"Access-Control-Request-Method": "POST"}
    for origins, allowed in (
        ((), None),
        (("https://other.com",), None),
        ((page["Origin"],), page["Origin"]),
    ):
        with closing(InProcess(cors_origins=origins)) as app:
            wrong = post(app, "/tokenize", headers=page)
            version = app.request("GET", "/version", headers=page)
            assert (wrong.status_code, version.status_code) == (400, 200)
            for reply in (
                wrong,
                version,
                app.request("OPTIONS", "/v1/chat/completions", headers=page | asked),
            ):
                assert reply.headers.get("access-control-allow-origin") == allowed


def test_tokens_are_those_of_the_tokenizer_and_those_that_are_prefilled(app, prompt_ids):
    tokenizer = app.engine.tokenizer
    told = post(app, "/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert told["tokens"] == prompt_ids
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(prompt_ids)
    assert told["count"] == len(prompt_ids)
    assert told["max_model_len"] == app.reader.max_model_len
    assert post(app, "/detokenize", tokens=prompt_ids).json() == {
        "prompt": tokenizer.decode(prompt_ids)
    }
    said = ["be brief", [text("which letter"), text("is first")], "J", "and then?"]
    roles = ["system", "user", "assistant", "user"]
    chat = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    for messages, fields in ((chat, {}), (chat[:3], opened)):
        template = {"add_generation_prompt": True, "return_dict": False, **fields}
        expected = tokenizer.apply_chat_template(messages, **template)
        assert post(app, "/tokenize", messages=messages, **fields).json()["tokens"] == expected
        asked = {"messages": messages, "return_token_ids": True, "max_tokens": 1, **fields}
        assert post(app, "/v1/chat/completions", **asked).json()["prompt_token_ids"] == expected
    about_a_video = [
        {"role": "user", "content": [text("which"), part("video", "clip.mp4")]},
        *chat[2:],
    ]
    asked = {"messages": about_a_video, "num_frames": 4}
    tokens = post(app, "/tokenize", **asked).json()["tokens"]
    reply = post(app, "/v1/chat/completions", **asked, return_token_ids=True).json()
    assert reply["prompt_token_ids"] == tokens and reply["usage"]["prompt_tokens"] == len(tokens)
    assert tokens.count(app.engine.parts.video_token_id) == 8


def test_a_requests_id_is_the_clients_and_each_is_one_line_of_the_log_without_what_was_asked(
    app, caplog
):
    path = "/v1/chat/completions"
    asked = [{"role": "user", "content": [part("image", "none.png"), text("how many letters")]}]
    with caplog.at_level("INFO", logger="apbv.serve"):
        reply = post(
            app, path, {"X-Request-Id": "router"}, messages=CHAT, max_tokens=1, ignore_eos=True
        )
        assert (reply.json()["id"], reply.headers["x-request-id"]) == ("chatcmpl-router", "router")
        refusal = post(app, path, {"X-Request-Id": "another"}, messages=asked)
        assert (refusal.status_code, refusal.headers["x-request-id"]) == (400, "another")
    answered, refused = (record.getMessage() for record in caplog.records)
    assert answered.startswith("chatcmpl-router 200 length, ")
    assert " + 1 tokens, first token " in answered
    error = refusal.json()["error"]
    assert refused.startswith(
        f"chatcmpl-another 400 invalid ({error['param']}: {error['message']}), total "
    )
    assert not any("letters" in line for line in (answered, refused))
    for unfit in ("two words", "x" * 300):
        reply = post(app, "/v1/completions", {"X-Request-Id": unfit}, prompt="x", max_tokens=1)
        assert len(reply.headers["x-request-id"]) == 32


def test_what_operators_and_routers_ask(app):
    (model,) = app.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", app.reader.max_model_len)
    others = {"/v1/models/demo": 200, "/v1/models/other": 404, "/ping": 200, "/version": 200}
    assert {path: app.request("GET", path).status_code for path in others} == others


def test_the_page_names_every_endpoint(app):
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for route in app.app.routes:
        assert f"`{route.path.partition('/{')[0]}`" in page
