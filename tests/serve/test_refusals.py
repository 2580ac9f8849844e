"""Requests that are wrong: the field is named, and no input is an error of the server."""

import json
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apbv.input.prompts.prompt_reader import PromptReader
from apbv.serve.api_error import ApiError
from apbv.serve.protocols.requests import ChatRequest

from apbv_tests.servers import HAND_OVER, InProcess, asking, part, post, text

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"


def chat(*content, **fields) -> dict:
    return {"messages": [{"role": "user", "content": list(content) or "x"}], **fields}


def image(**fields) -> dict:
    return {"type": "image_url", "image_url": {"url": "picture.png", **fields}}


REFUSED = {
    CHAT: [
        (chat(model="gpt"), "model"),
        (chat(n=129), "n"),
        (chat(top_logprobs=1), "top_logprobs"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (chat(fps=1e308), "fps"),
        (chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
        (chat(num_frames=17), "num_frames"),
        (chat(text("<|video_pad|>")), "messages"),
        (chat(part("video", "broken.mp4"), text("x")), "messages"),
        (chat(text("x"), part("video", "../x.mp4")), "messages.0.content.1.video_url"),
        (
            chat(part("video", "data:video/mp4;base64," + "A" * 900_000)),
            "messages.0.content.0.video_url",
        ),
        (chat(image(detail="best")), "messages.0.content.0.image_url.detail"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages.0.tool_calls.0",
        ),
        (
            chat(kv_transfer_params={"do_remote_prefill": True}),
            "kv_transfer_params",
            "cannot load KV",
        ),
        (chat(kv_transfer_params=HAND_OVER, stream=True), "stream", "stream must be false"),
        (chat(kv_transfer_params=HAND_OVER), "kv_transfer_params", "--kv-transfer"),
    ],
    RAW: [
        ({}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
        ({"prompt": ["a"] * 6}, "prompt", "at most 5 prompts are allowed, not 6"),
        (
            {"prompt": ["a"] * 10**5},
            "prompt",
            "at most 1024 prompts are allowed",
        ),  # before any is copied
        (
            {"prompt": ["a", "b"], "kv_transfer_params": HAND_OVER},
            "prompt",
            "one prompt per request",
        ),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [1, 6]}, "prompt"),  # a placeholder of the video
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias", "go from 0 to"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "x", "stop_token_ids": [1], "min_tokens": 1}, "stop_token_ids"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"prompt": "x", "kv_transfer_params": {"do_remote_decode": 1}},
            "kv_transfer_params.do_remote_decode",
        ),
        ({"prompt": "x", "stop": [*"abcde"]}, "stop", "at most 4"),
    ],
    TOKENIZE: [
        ({}, "prompt"),
        (chat(continue_final_message=True), "messages"),
        (chat(chat_template_kwargs={"continue_final_message": "x"}), "chat_template_kwargs"),
    ],
    DETOKENIZE: [({}, "tokens")],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_wrong_is_named(app, media, path):
    for fields, param, *messages in REFUSED[path]:
        reply = post(app, path, **fields)
        error = reply.json()["error"]
        expected = 404 if param == "model" else 400
        assert reply.status_code == expected, (fields, error)
        assert error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error" and error["message"]
        assert all(message in error["message"] for message in messages), error
        assert str(media) not in error["message"] and "apbv-" not in error["message"]


def test_a_field_that_nobody_knows_is_ignored_with_a_warning(app, caplog):
    assert post(app, CHAT, **chat(text("x"), no_such_field={"a": 1})).status_code == 200
    assert "request field: 'no_such_field'" in caplog.text


def test_what_is_no_request(app):
    for body in (b"", b"[]", b"\xff", b"[" * 100_000, b'{"model": NaN}'):
        reply = app.request("POST", CHAT, content=body)
        assert reply.status_code == 400
        param = reply.json()["error"]["param"]
        if b"NaN" in body:
            assert param == "model"
        else:
            assert param is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"chat_template_kwargs": {"x": [%s]}', "chat_template_kwargs"),
        (
            '"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": %s}}}',
            "response_format",
        ),
        (
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"minimum": '
            "%s}}}]",
            "tools.0.function.parameters",
        ),
        ('"temperature": %s', "temperature"),
    ],
)
def test_numbers_that_json_has_not_are_refused(app, fields, number, param):
    content = '{"messages": [{"role": "user", "content": "x"}], ' + fields % number + "}"
    error = app.request("POST", CHAT, content=content).json()["error"]
    assert error["param"] == param, error
    assert "not JSON" in error["message"] or "finite" in error["message"], error


@pytest.mark.parametrize("field", ["messages", "stop"])
def test_of_many_errors_few_are_looked_for(field):
    with pytest.raises(ApiError) as error:
        ChatRequest.parse(asking(**{field: [1] * 1000}))
    assert error.value.__cause__.error_count() <= 2


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(max_size=9)
)
JUNK |= st.sampled_from(
    [[], {}, [[[]]], {"type": "text"}, -1, 0, 1, 2, 2**64, -(2**70), 1e308, "x" * 2000]
)
JUNK |= st.sampled_from(
    ["", "clip.mp4", "../x", "data:,", "\ud83d", "<|video_pad|>", "<|im_end|>", "http://a/"]
)
CALLED = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
KINDS = {CHAT: "chat.completion", RAW: "text_completion", TOKENIZE: None, DETOKENIZE: None}
GENERATION = {
    "model": "demo",
    "max_tokens": 1,
    "min_tokens": 1,
    "ignore_eos": True,
    "temperature": 0.5,
    "seed": 7,
}
GENERATION |= {
    "n": 1,
    "top_p": 0.9,
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
GENERATION |= {
    "return_token_ids": True,
    "kv_transfer_params": {"do_remote_decode": False, "apbv": {}},
}
OF_A_CHAT = chat(
    text("x"), part("video", "clip.mp4"), part("image", "picture.png"), num_frames=2, fps=1.0
)
OF_A_CHAT |= {"add_generation_prompt": True, "chat_template_kwargs": {"thinks": True}}
EXAMPLES = {
    CHAT: [
        {**GENERATION, **OF_A_CHAT, **chat()},
        chat(max_completion_tokens=1),
        {**OF_A_CHAT, "max_tokens": 1},
        {"messages": CALLED, "max_tokens": 1, "parallel_tool_calls": False, "tools": []},
    ],
    RAW: [
        {**GENERATION, "prompt": "which"},
        {"prompt": [[20, 21]], "stop_token_ids": [3], "max_tokens": 2},
    ],
    TOKENIZE: [
        {"prompt": "which letter", "return_token_strs": True},
        {**OF_A_CHAT, "model": "demo"},
    ],
    DETOKENIZE: [{"tokens": [20, 21], "model": "demo"}],
}


@st.composite
def bodies(draw, examples: list[dict]) -> bytes:
    """Requests, most of them with something wrong or left out, and a few that are no JSON."""
    objects = []  # of the request, at any depth

    def collect(found: dict) -> dict:
        objects.append(found)
        return found

    example = json.dumps(draw(st.sampled_from(examples)))
    request = json.loads(example, object_hook=collect)
    for _ in range(draw(st.integers(0, 3))):
        inside = draw(st.sampled_from(objects))
        key = draw(st.sampled_from([*inside, "surprise"]))
        inside[key] = draw(JUNK)
        if draw(st.booleans()):
            del inside[key]
    body = json.dumps(request).encode()
    at = draw(st.integers(0, 10 * len(body)))
    return body[:at] + draw(st.binary(max_size=4)) + body[at + 2 :] if at <= len(body) else body


@pytest.mark.parametrize("path", EXAMPLES)
def test_no_input_is_an_error_of_the_server(app, path):
    seen = {}
    count = 20

    @settings(
        max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(content=bodies(EXAMPLES[path]))
    def check(content):
        reply = app.request("POST", path, content=content)
        seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
        assert reply.status_code in (200, 400, 404), (content, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text
        else:
            assert reply.json().get("object") == KINDS[path]

    check()
    assert seen[200] and seen[400] > 0.3 * count, seen
    assert app.request("GET", "/health").status_code == 200


def test_what_is_too_long_is_refused_before_it_is_rendered_or_tokenized(app, monkeypatch):
    """By its characters if they are more than any tokens have, else by the tokens of its
    beginning."""
    tokenized = []
    tokenize = PromptReader.tokenize

    def noted(reader, text, *more):
        tokenized.append(len(text))
        return tokenize(reader, text, *more)

    monkeypatch.setattr(PromptReader, "tokenize", noted)
    monkeypatch.setattr(PromptReader, "lay_out", None)
    words = "the letters in order " * 30
    letters = "x" * 200_000
    for path, fields in (
        (CHAT, chat(text(letters))),
        (CHAT, chat(text("x"), chat_template_kwargs={"documents": [letters]})),
        (CHAT, chat(text(words))),
        (RAW, {"prompt": letters}),
        (RAW, {"prompt": words}),
        (TOKENIZE, {"prompt": letters}),
        (TOKENIZE, {"prompt": words}),
        (TOKENIZE, chat(text(words))),
    ):
        error = post(app, path, **fields).json()["error"]
        assert error["code"] == "context_length_exceeded", error
    assert tokenized == [48 * 8] * 4
    assert post(app, DETOKENIZE, tokens=[5] * 49).json()["error"]["param"] == "tokens"


def test_a_video_of_more_packets_than_allowed_is_refused_while_they_are_listed(media):
    with closing(InProcess(media_dir=media, max_packets=9)) as app:
        error = post(app, CHAT, **chat(part("video", "clip.mp4"), text("x"))).json()["error"]
    assert error["param"] == "messages" and "9 packets" in error["message"]
