"""Answers that are more than a text: several to a prompt, with log probabilities, and by a JSON
schema."""

import json
from contextlib import closing
from dataclasses import replace
from itertools import chain
from threading import Semaphore
from typing import Literal

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig
from apbv.grammar.grammars import Grammars

from apbv_tests.hard_schemas import many_patterns
from apbv_tests.servers import InProcess, choices_at, chunks, post, token_ids_of

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
PROMPT = "name the letters in order"
SCHEMA = {
    "type": "object",
    "properties": {
        "letter": {"enum": ["X", "J"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["letter", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "told", "schema": SCHEMA}}
DRAFTS = [
    None,
    SpeculativeConfig(strategy="ngram"),
    SpeculativeConfig(strategy="vanilla", num_draft_tokens=3),
]


@pytest.fixture(
    scope="module", params=DRAFTS, ids=lambda draft: draft.strategy if draft else "alone"
)
def engine(request) -> Engine:
    hosts = HostGroup.single("cpu")
    return Engine.from_pretrained("demo", hosts=hosts, dtype="float32", speculate=request.param)


@pytest.fixture(scope="module")
def app():
    with closing(InProcess(max_model_len=400, max_running=3)) as app:
        yield app


def drop_rounded(choice: dict) -> None:
    """Forget the figures whose rounding differs with the number of rows."""
    del choice["logprobs"]["token_logprobs"]
    del choice["logprobs"]["top_logprobs"]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_log_probabilities_are_those_of_the_models_logits(engine, temperature):
    """Drafted or not, before temperature and bias; and only of the tokens that the answer has."""
    sampling = SamplingParams(
        max_new_tokens=9,
        temperature=temperature,
        seed=3,
        ignore_eos=True,
        logprobs=2,
        logit_bias=((40, 5.0),),
    )
    told = engine.generate(PROMPT, sampling=sampling)
    prompt = engine.prefill(PROMPT).inputs.input_ids[0].tolist()
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([prompt + told.token_ids])).logits[0].double()
    expected = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    assert len(told.logprobs) == len(told.token_ids) == 9
    for row, token, given in zip(expected, told.token_ids, told.logprobs, strict=True):
        assert given.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(2)
        assert [value for _, value in given.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert row[[token for token, _ in given.top]].tolist() == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_by_a_schema_is_json_that_fits_it(engine, temperature):
    """With a draft, which is switched off, the same."""
    settings = {
        "max_new_tokens": 40,
        "temperature": temperature,
        "seed": 5,
        "json_schema": json.dumps(SCHEMA),
    }
    told = engine.generate(PROMPT, sampling=SamplingParams(**settings))
    jsonschema.validate(json.loads(told.text), SCHEMA)
    assert told.finish_reason == "stop"
    alone = Engine(engine.model, engine.processor, hosts=HostGroup.single("cpu"))
    assert alone.generate(PROMPT, sampling=SamplingParams(**settings)).token_ids == told.token_ids
    if told.stats["speculation"] is not None:
        assert "JSON schema" in told.stats["speculation"]["switched_off"]
    assert engine.generate(PROMPT, max_new_tokens=9).text != told.text


def test_objects_have_no_other_properties_than_a_schema_names():
    """As OpenAI's strict schemas and vLLM have it: else a weak model never comes to an end."""
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")
    grammars = Grammars(engine.tokenizer, engine.parts.vocab_size, engine.parts.eos_token_ids)
    named = {
        "type": "object",
        "properties": {"count": {"type": "integer"}, "properties": {"type": "object"}},
    }
    inner = {"$defs": {"named": named}, "$ref": "#/$defs/named"}
    joined = {"allOf": [named, {"properties": {"other": {}}}]}
    for schema, has_others in (
        (named, False),
        (inner, False),
        ({**named, "additionalProperties": True}, True),
        (joined, True),
        ({"type": "object"}, True),
    ):
        grammar = grammars.begin(json.dumps(schema))
        for token in engine.tokenizer.encode('{"count": 3, "', add_special_tokens=False):
            grammar.take(token)
        follows = grammar.masked(torch.zeros(1, engine.parts.vocab_size))[0].isfinite()
        allowed = [
            follows[engine.tokenizer.encode(letter, add_special_tokens=False)[0]].item()
            for letter in "po"
        ]
        assert allowed == [True, has_others], schema


def test_several_answers_are_those_of_the_next_seeds(app):
    fields = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 1.8,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    fields |= {"stop": ["qq"], "logprobs": 1}
    together = post(app, RAW, **fields, n=3, seed=7).json()
    for index, choice in enumerate(together["choices"]):
        (alone,) = post(app, RAW, **fields, seed=7 + index).json()["choices"]
        for each in (choice, alone):
            drop_rounded(each)
        assert choice == {**alone, "index": index}
    assert together["usage"]["completion_tokens"] == 18
    assert together["usage"]["prompt_tokens"] == len(together["choices"][0]["prompt_token_ids"])
    streamed = chunks(
        post(app, RAW, **fields, n=3, seed=7, stream=True, stream_options={"include_usage": True})
    )
    assert streamed[-1]["usage"] == together["usage"]
    for index, choice in enumerate(together["choices"]):
        own = choices_at(index, streamed[:-1])
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == "length"
        logprobs = [each["logprobs"] for each in own if each["logprobs"]]
        for name in ("tokens", "text_offset"):
            told = chain.from_iterable(each[name] for each in logprobs)
            assert list(told) == choice["logprobs"][name]


def test_several_prompts_are_answered_as_each_alone(app):
    prompts = [PROMPT, "the letters", "J X P"]
    fields = {"max_tokens": 6, "temperature": 1.8, "n": 2}
    fields |= {"ignore_eos": True, "return_token_ids": True, "seed": 7, "logprobs": 0}
    together = post(app, RAW, **fields, prompt=prompts).json()
    in_pieces = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(post(app, RAW, **fields, prompt=prompts, **in_pieces))
    alone = [post(app, RAW, **fields, prompt=prompt).json() for prompt in prompts]
    for reply in (together, *alone):
        for choice in reply["choices"]:
            drop_rounded(choice)
    expected = list(chain.from_iterable(reply["choices"] for reply in alone))
    assert together["choices"] == [
        {**choice, "index": index} for index, choice in enumerate(expected)
    ]
    usages = [reply["usage"] for reply in alone]
    assert together["usage"].keys() == usages[0].keys()
    for name, count in together["usage"].items():
        assert count == sum(usage[name] for usage in usages), name
    assert streamed[-1]["usage"] == together["usage"]
    for index, choice in enumerate(together["choices"]):
        own = choices_at(index, streamed[:-1])
        assert token_ids_of(own) == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert own[-1]["finish_reason"] == "length"
    failed = post(app, RAW, **fields, prompt=[[20, 21], [1, 6], [20]])
    assert failed.status_code == 400 and failed.json()["error"]["param"] == "prompt"
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="-", http_client=app.client)
    told = app.loop.run_until_complete(
        client.completions.create(model="demo", prompt=prompts[:2], max_tokens=3)
    )
    assert [choice.index for choice in told.choices] == [0, 1]


def test_a_chat_tells_the_log_probabilities_of_each_token(app):
    fields = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    (choice,) = post(app, CHAT, **fields, logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        values = [other["logprob"] for other in token["top_logprobs"]]
        assert len(values) == 2 and values[0] == token["logprob"] > values[1]
    (choice,) = post(app, CHAT, **fields, logprobs=True).json()["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[]] * 4


class Told(BaseModel):
    letters: list[Literal["X", "J"]] = Field(max_length=2)
    count: int = Field(ge=0, le=9)


def test_openais_client_parses_an_answer(app):
    """Each of several answers is JSON, too."""
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="-", http_client=app.client)
    asked = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300}
    told = app.loop.run_until_complete(client.chat.completions.parse(**asked, response_format=Told))
    assert isinstance(told.choices[0].message.parsed, Told)
    reply = post(
        app, RAW, prompt=PROMPT, response_format=FORMAT, n=2, max_tokens=40, temperature=1.0
    ).json()
    for choice in reply["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_an_answer_is_a_constant_that_looks_like_a_schema(app):
    constant = {"type": "t", "properties": {}}
    schema = {"type": "object", "properties": {"v": {"const": constant}}, "required": ["v"]}
    for form, expected in ((schema, {"v": constant}), (True, None)):
        asked = {**FORMAT, "json_schema": {"name": "x", "schema": form}}
        reply = post(app, RAW, prompt=PROMPT, response_format=asked, max_tokens=60)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert expected is None or json.loads(choice["text"]) == expected


def test_what_no_answer_can_follow_is_refused(app):
    with pytest.raises(ValueError, match="at most 65536 characters"):
        app.engine.generate(
            "x", sampling=SamplingParams(json_schema=json.dumps({"enum": ["x" * 70_000]}))
        )
    for settings, message in (
        ({"json_schema": "{}", "grammar": "x"}, "not both"),
        ({"grammar": 'start: "a"', "min_tokens": 1}, "excludes min_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**settings)
    with pytest.raises(ValueError, match="grammar is not supported"):
        app.engine.generate("x", sampling=SamplingParams(grammar="start: other"))
    schemas = [
        {"type": 7},
        {"$ref": "#/none"},
        {"type": "string", "pattern": "("},
        {"$ref": "#"},
        False,
    ]
    schemas += [
        {"const": "a<|im_end|>b"},
        {"properties": {"<|video_pad|>": {}}},
        {"enum": [["<|im_end|>"]]},
    ]
    schemas += [many_patterns()]
    formats = [{**FORMAT, "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    for form in (*formats, {"type": "json_schema"}, {"type": "grammar"}):
        reply = post(app, RAW, prompt="x", response_format=form)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "response_format"), form
    for fields in ({"min_tokens": 1}, {"ignore_eos": True}):
        assert post(app, RAW, prompt="x", response_format=FORMAT, **fields).status_code == 400


def test_a_schema_is_checked_once_and_compiled_once(app, monkeypatch):
    """By the reader and by the decode host of its answers."""
    calls = []

    def note(name: str) -> None:
        method = getattr(Grammars, name)

        def noted(*args, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(Grammars, name, noted)

    note("check")
    note("compile")
    assert post(app, RAW, prompt="x", response_format=FORMAT, n=2, max_tokens=3).status_code == 200
    assert calls == ["check", "compile"]


def test_a_schema_that_cannot_be_checked_now_may_be_sent_again(app, monkeypatch):
    checks = app.engine.grammars.checks
    monkeypatch.setattr(
        checks, "lanes", [replace(checks.lanes[0], places=Semaphore(0), max_wait=0.0)]
    )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"const": "never seen before"}},
    }
    reply = post(app, RAW, prompt="x", response_format=form)
    assert reply.status_code == 429 and reply.headers["Retry-After"] == "1"


def test_no_more_answers_are_asked_for_than_may_run(app):
    error = post(app, RAW, prompt="x", n=4).json()["error"]
    assert error["param"] == "n" and "at most 3" in error["message"]
