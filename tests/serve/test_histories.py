"""Chats with earlier answers: their reasoning, their parts and their calls, and models that take no
chats."""

import json
from contextlib import closing

import pytest

from apbv import Engine, HostGroup

from apbv_tests.servers import InProcess, post, text

CHAT = "/v1/chat/completions"
ASKED = {"role": "user", "content": "which"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")


def prompt(app, *messages) -> str:
    """The prompt that a chat becomes."""
    reply = post(app, "/tokenize", messages=list(messages))
    assert reply.status_code == 200, reply.text
    return app.engine.tokenizer.decode(reply.json()["tokens"])


def test_reasoning_of_earlier_answers_reaches_the_template(engine, monkeypatch):
    shown = (
        "{{ '(' ~ message.reasoning ~ '|' ~ message.reasoning_content ~ ')' if message.reasoning "
        "}}<|im_end|>"
    )
    template = engine.processor.chat_template.replace("<|im_end|>", shown)
    monkeypatch.setattr(engine.processor, "chat_template", template)
    with closing(InProcess(model=engine, max_model_len=400)) as app:
        for names in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
            said = {"role": "assistant", **dict.fromkeys(names, "hm")}
            assert "\nJ(hm|hm)<|im_end|>" in prompt(app, ASKED, {**said, "content": "J"}, ASKED)
            assert "\n(hm|hm)<|im_end|>" in prompt(app, ASKED, {**said, "content": None}, ASKED)
        assert "(hm" not in prompt(app, {**ASKED, "reasoning": "hm"})
        error = post(
            app, CHAT, messages=[ASKED, {"role": "assistant", "content": "J", "reasoning": 5}]
        ).json()["error"]
        assert error["param"] == "messages.1.reasoning"


def test_parts_of_earlier_answers_are_text(app):
    expected = prompt(app, ASKED, {"role": "assistant", "content": [text("no")]}, ASKED)
    for kind, name in (
        ("output_text", "text"),
        ("input_text", "text"),
        ("refusal", "refusal"),
        ("thinking", "thinking"),
    ):
        said = {"role": "assistant", "content": [{"type": kind, name: "no", "annotations": []}]}
        assert prompt(app, ASKED, said, ASKED) == expected


def test_arguments_of_earlier_calls_are_json(app):
    for arguments in (
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": [1e999]}',
        '{"x": "\\ud800"}',
        '{"\\udfff": 1}',
    ):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for path in (CHAT, "/tokenize"):
            reply = post(
                app, path, messages=[ASKED, {"role": "assistant", "tool_calls": [call]}, ASKED]
            )
            error = reply.json()["error"]
            assert reply.status_code == 400
            assert error["param"] == "messages"
            assert "which JSON has not" in error["message"]


@pytest.mark.parametrize("half", ["\ud83d", "\ude00", "\ude00\ud83d"], ids=ascii)
def test_half_of_a_surrogate_pair_is_not_json(app, half):
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": half}}}
    for fields in (
        {"messages": [{"role": "user", "content": half}]},
        {"messages": [{**ASKED, "name": half}]},
        {"stop": half},
        {"tools": [{"type": "function", "function": {"name": "f", "description": half}}]},
        {"chat_template_kwargs": {"x": half}},
        {"response_format": schema},
    ):
        reply = app.request("POST", CHAT, content=json.dumps({"messages": [ASKED], **fields}))
        assert reply.status_code == 400, reply.text
        assert "Invalid JSON" in reply.json()["error"]["message"], reply.text


def test_a_model_without_a_chat_template_takes_no_chats(engine, monkeypatch):
    monkeypatch.setattr(engine.processor, "chat_template", None)
    with closing(InProcess(model=engine)) as app:
        for path in (CHAT, "/tokenize"):
            reply = post(app, path, messages=[{"role": "system", "content": "be brief"}, ASKED])
            error = reply.json()["error"]
            assert reply.status_code == 400
            assert error["param"] == "messages"
            assert "no chat template" in error["message"]
        assert post(app, "/v1/completions", prompt="which").status_code == 200
        assert post(app, "/tokenize", prompt="which").status_code == 200
