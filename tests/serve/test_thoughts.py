"""The thought with which a model begins an answer: separated from it, whole and streamed."""

import json
import random
from contextlib import closing

import jsonschema
import openai
import pytest
import torch

from apbv import Engine, HostGroup, SamplingParams
from apbv.config import REASONING_TAGS
from apbv.decode.thoughts import (
    CLOSING_TAGS,
    ThoughtParser,
    ThoughtParsing,
    behind_thought,
    separate,
)
from apbv.grammar.grammars import Grammars, json_rule, quoted
from apbv.serve.protocols.request_reader import Reader

from apbv_tests import families
from apbv_tests.servers import InProcess, chunks, post

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "name the letters in order"}], "max_tokens": 200}
COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["count"],
}
WELL = "Well, a < b, or so."


def parsed(answer: str, parser: str = "auto", prompt: str = "x", seed: int = 0) -> tuple[str, str]:
    """The thought and the text of an answer that comes in pieces of any length."""
    parsing = ThoughtParsing.of_prompt(parser, prompt)
    if parsing is None:
        return "", answer
    chance = random.Random(seed)
    thoughts = ThoughtParser(parsing)
    thought = ""
    text = ""
    while answer:
        length = chance.choice((1, 1, 2, 5, 40))
        piece = thoughts.add(answer[:length], is_last=length >= len(answer))
        answer = answer[length:]
        thought += piece.thought
        text += piece.text
    return thought, text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tag", CLOSING_TAGS)
def test_a_thought_is_found_however_an_answer_comes_in_pieces(tag, seed):
    end = CLOSING_TAGS[tag]
    opened = f"assistant\n{tag}\n"
    cases = [
        (f"{tag}\n{WELL}\n{end}\n\nYes. ", "x", (WELL, "Yes. ")),
        (f"\n{tag}{WELL}{end}Yes", "x", (WELL, "Yes")),
        (f"{tag}\n\n{end}\n\nYes", "x", ("", "Yes")),
        (f"{tag}{WELL}", "x", (WELL, "")),
        (f"{tag}{WELL}{end[:-1]}", "x", (f"{WELL}{end[:-1]}", "")),
        (f"{WELL}{end}Yes{end}", opened, (WELL, f"Yes{end}")),
        (f"{tag}{WELL}{end}Yes", opened, (WELL, "Yes")),
        (f"{WELL}\n", opened, (WELL, "")),
        (f"{tag[:-1]} Yes", "x", ("", f"{tag[:-1]} Yes")),
        (tag[:-1], "x", ("", tag[:-1])),
        (f"Yes {tag}no{end}", "x", ("", f"Yes {tag}no{end}")),
        (f" Yes\n{end} ", "x", ("", f" Yes\n{end} ")),
        (f"Yes {end}", f"{tag}\n\n{end}\n\n", ("", f"Yes {end}")),
    ]
    for answer, prompt, expected in cases:
        assert parsed(answer, prompt=prompt, seed=seed) == expected, (answer, prompt)


def test_a_parser_with_a_name_looks_for_its_tags_alone():
    for parser, tag in REASONING_TAGS.items():
        end = CLOSING_TAGS[tag]
        assert parsed(f"{tag}{WELL}{end}Yes", parser) == (WELL, "Yes")
        other = next(each for each in CLOSING_TAGS if each != tag)
        told = f"{other}{WELL}{CLOSING_TAGS[other]}Yes"
        if parser != "deepseek_r1":
            assert parsed(told, parser) == ("", told)
        assert parsed(f"{WELL}{end}Yes", parser, f"x{tag}") == (WELL, "Yes")
        assert parsed(f"{tag}{WELL}{end}Yes", "off") == ("", f"{tag}{WELL}{end}Yes")
    # Of this one the answer is a thought from its beginning, unless the prompt has closed it.
    assert parsed(f"{WELL}</think>Yes", "deepseek_r1") == (WELL, "Yes")
    assert parsed("Yes", "deepseek_r1", "<think>\n\n</think>\n\n") == ("", "Yes")


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("tag", CLOSING_TAGS)
def test_a_schema_holds_behind_a_thought(tag, has_tokens):
    tokenizer = families.build_tokenizer("qwen3")
    end = CLOSING_TAGS[tag]
    if has_tokens:
        tokenizer.add_tokens([tag, end])
    eos = tokenizer.convert_tokens_to_ids(families.EOS)
    grammars = Grammars(tokenizer, len(tokenizer), (eos,))
    grammar = f"start: json\njson: {json_rule(COUNT)}"

    def allows(said: str, prompt: str) -> bool:
        parsing = ThoughtParsing.of_prompt("auto", prompt)
        tokens = tokenizer.get_added_vocab()
        wrapped = behind_thought(grammar, parsing, [tag], tokens)
        matcher = grammars.begin(None, wrapped)
        for token in (*tokenizer.encode(said, add_special_tokens=False), eos):
            if not matcher.masked(torch.zeros(1, len(tokenizer)))[0, token].isfinite():
                return False
            matcher.take(token)
        return True

    answer = '{"count": 3}'
    assert allows(f"{tag}\n{WELL} {{}}\n{end}\n\n{answer}", "x")
    assert allows(f"{tag}{end}{answer}", "x")
    assert allows(answer, "x")
    assert allows(f"{WELL}\n{end}\n\n{answer}", f"x{tag}\n")
    for wrong in (f"{tag}{WELL}", f"{tag}{WELL}{end}", f"{tag}{WELL}{end}{{}}", f"{WELL}{answer}"):
        assert not allows(wrong, "x"), wrong
    assert not allows(answer, f"x{tag}\n")
    # What looks like the end of a thought is its end: no second one follows.
    assert not allows(f"{tag}{WELL}{end}{WELL}{end}{answer}", "x")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")


@pytest.fixture(scope="module")
def app(engine, media):
    """The demo model with a template that opens a thought where it is told to, and knows its
    tags."""
    template = engine.processor.chat_template
    history = "{{ '<think>' + message.reasoning + '</think>' if message.reasoning }}"
    thinks = "{{ '<think>\\n' if add_generation_prompt and enable_thinking }}"
    thinks += "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false }}"
    engine.processor.chat_template = template.replace("<|im_end|>", history + "<|im_end|>") + thinks
    with closing(InProcess(model=engine, max_model_len=2500, media_dir=media)) as app:
        yield app
    engine.processor.chat_template = template


@pytest.fixture
def script(monkeypatch):
    """What the model is made to say, request by request."""
    said = []
    monkeypatch.setattr(
        Reader,
        "constraint_of",
        lambda reader, request, is_wanted: {"grammar": f"start: {quoted(said.pop(0))}"},
    )
    return said


THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("fields", "answer", "thought", "content"),
    [
        ({}, f"<think>\n{WELL}\n</think>\n\nYes.", WELL, "Yes."),
        ({}, "Yes <think>", None, "Yes <think>"),
        (THINKING, f"{WELL}\n</think>\n\nYes.", WELL, "Yes."),
        (THINKING, WELL, WELL, None),
        (NOT_THINKING, "Yes.", None, "Yes."),
    ],
)
def test_replies_have_the_thought_apart(app, script, fields, answer, thought, content):
    script += [answer, answer]
    (choice,) = post(app, CHAT, **ASK, **fields).json()["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert message.get("reasoning") == message.get("reasoning_content") == thought
    streamed = chunks(post(app, CHAT, **ASK, **fields, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (thought or "")
    assert "".join(delta.get("content", "") for delta in deltas) == (content or "")


def test_a_completion_is_as_the_model_wrote_it(app, script):
    answer = f"<think>{WELL}</think>Yes."
    script.append(answer)
    reply = post(app, "/v1/completions", prompt="x", max_tokens=200).json()
    assert reply["choices"][0]["text"] == answer


def test_a_schema_constrains_the_answer_and_not_the_thought(app):
    """The model is led to the end of its thought, and not into JSON."""
    described = {"type": "json_schema", "json_schema": {"name": "told", "schema": COUNT}}
    encode = app.engine.tokenizer.encode
    bias = dict.fromkeys(map(str, set(encode("</think>"))), 20)
    for fields in ({}, THINKING, NOT_THINKING):
        body = {**ASK, **fields, "response_format": described, "logit_bias": bias}
        (choice,) = post(app, CHAT, **body).json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), COUNT)
        else:  # it thought until its end
            assert choice["message"]["content"] is None and choice["message"]["reasoning"]


def test_openais_client_keeps_up_a_conversation_that_thinks(app, script):
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="-", http_client=app.client)
    script += [f"<think>{WELL}</think>Yes.", "<think>No.</think>Oh."]
    messages = list(ASK["messages"])
    asked = {"model": "demo", "max_tokens": 200}
    first = app.loop.run_until_complete(client.chat.completions.create(messages=messages, **asked))
    said = first.choices[0].message
    assert (said.reasoning, said.content) == (WELL, "Yes.")
    earlier = {"role": "assistant", "content": said.content, "reasoning": said.reasoning}
    messages += [earlier, {"role": "user", "content": "and then?"}]

    async def streamed() -> tuple[str, str]:
        thought = ""
        content = ""
        stream = await client.chat.completions.create(messages=messages, **asked, stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
        return thought, content

    assert app.loop.run_until_complete(streamed()) == ("No.", "Oh.")


def test_a_result_of_the_library_has_both_parts(engine):
    sampling = SamplingParams(max_new_tokens=200, grammar=f"start: {quoted('<think>a</think> b')}")
    answer = engine.generate("name the letters in order", sampling=sampling)
    assert (answer.reasoning, answer.content) == ("a", "b")
    assert answer.text == "<think>a</think> b"
    plain = engine.generate("name the letters in order", max_new_tokens=5)
    assert plain.reasoning is None and plain.content == plain.text


def test_special_tokens_are_seen_as_tags():
    tokenizer = families.build_tokenizer("qwen3")
    tokenizer.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer.encode("[THINK]a[/THINK]b", add_special_tokens=False)
    assert separate(tokens, tokenizer, []) == ("a", "b")
    opened = tokenizer.encode("x[THINK]", add_special_tokens=False)
    assert separate(tokens[1:], tokenizer, opened) == ("a", "b")
