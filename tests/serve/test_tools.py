"""Calls of tools: parsed from answers, whole and streamed, required by a grammar, and in a client's
loop."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, count
from types import SimpleNamespace

import jsonschema
import openai
import pytest
import torch

from apbv import Engine, HostGroup
from apbv.decode.thoughts import CLOSING_TAGS, opened_thought
from apbv.grammar.grammars import Grammars, quoted
from apbv.request.request import RequestSettings
from apbv.serve.control.answer_stream import AnswerStream
from apbv.serve.control.job import Piece
from apbv.serve.control.work_order import ReplyOptions, WorkOrder
from apbv.serve.formats.call_formats import HERMES, LLAMA, call_format
from apbv.serve.formats.tool_calls import CallParsing, ToolCallParser
from apbv.serve.protocols.request_reader import Reader

from apbv_tests import families
from apbv_tests.servers import (
    HAND_OVER,
    InProcess,
    choices_at,
    chunks,
    part,
    post,
    text,
    token_ids_of,
)

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "name the letters in order"}]}
COUNT = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}}}
COUNT |= {"required": ["count"]}
SCHEMAS = {
    "first": COUNT,
    "place_2-B": {
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "$defs": {"place": {"enum": ["x", "y"]}},
    },
    "now": None,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": schema, "description": f"Tells {name}."},
    }
    for name, schema in SCHEMAS.items()
]
HOW = {
    HERMES: 'Write <tool_call>\n{"name": …, "arguments": …}\n</tool_call>',
    LLAMA: 'Respond with {"name": function name, "parameters": dictionary of their names and '
    "values}.",
}


def written(form, name: str, arguments) -> str:
    """A call as models write it."""
    call = json.dumps({"name": name, form.key: arguments}, ensure_ascii=False)
    return f"{form.opening}{form.blank}{call}{form.blank}{form.closing}"


def parsed(form, pieces: list[str], **options) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(CallParsing(form=form, **options))
    said = ""
    calls = []
    for place, piece in enumerate(pieces, start=1):
        new, complete = parser.add(piece, is_last=place == len(pieces))
        said = said + new
        calls = calls + complete
    assert parser.num_calls == len(calls) == len({call["id"] for call in calls})
    return said, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


F = written(HERMES, "f", {"x": "ü"})
G = '<tool_call>{"arguments":{"of":[1,{}]},"name":"g"}</tool_call>'
LF = written(LLAMA, "f", {"x": "ü"})
LG = '{"parameters":{"of":[1,{}]},"name":"g"}'
THOUGHT = (
    '<think>I could call <tool_call>{"name": "rm_all", "arguments": {"p": "/"}}</tool_call> '
    "but no.</think>"
)
AS_F = ("f", '{"x": "ü"}')
AS_G = ("g", '{"of": [1, {}]}')
TAGS = written(HERMES, "f", {"x": "</tool_call> <tool_call>{}"})


def broken_calls(form) -> list[str]:
    """What looks like calls of this form, and is none."""
    return [
        written(form, "f", [1]),
        written(form, "f", "{}"),
        written(form, "f", {"x": float("nan")}),
        written(form, 7, {}),
        written(form, "f", {}).replace("{}", '{"x": "\\ud800"}'),
        written(form, "f", {}).replace("{}", "[" * 9999),
        written(form, "f", {}).replace("{}", "9" * 5000),
        written(form, "f", {}).replace(form.key, "others"),
        f"{form.opening}[]{form.closing}",
    ]


def answers_without_a_call() -> Iterator[tuple]:
    for form in HOW:
        for said in ("", " ", "a b\n", "{", "x{}", "<tool_call", "; ", *broken_calls(form)):
            yield form, said, said, []


ANSWERS = [
    *answers_without_a_call(),
    (HERMES, F, "", [AS_F]),
    (HERMES, f"Look.\n\n{F}\n{G}\n", "Look.", [AS_F, AS_G]),
    (HERMES, f"{F}{G} so\n", " so\n", [AS_F, AS_G]),
    (HERMES, f"a {F}\nb {F} c", "a\nb c", [AS_F, AS_F]),
    (HERMES, F.removesuffix("_call>"), "", [AS_F]),
    (HERMES, F.removesuffix("\n</tool_call>"), "", [AS_F]),
    (HERMES, F[:-16], F[:-16], []),
    (HERMES, f"<tool_call>{F}", "<tool_call>", [AS_F]),
    (HERMES, f"<tool_call>x</tool_call>\n{F}", "<tool_call>x</tool_call>", [AS_F]),
    (HERMES, TAGS, "", [("f", '{"x": "</tool_call> <tool_call>{}"}')]),
    (HERMES, LF, LF, []),
    (HERMES, f"{THOUGHT}The answer is 12.", f"{THOUGHT}The answer is 12.", []),
    (HERMES, f"{THOUGHT}\n\n{F}\n", THOUGHT, [AS_F]),
    (HERMES, f"{F}\n{THOUGHT}\n{G}", f"\n{THOUGHT}", [AS_F, AS_G]),
    (HERMES, f"so <think>{F}", f"so <think>{F}", []),
    (HERMES, f"[THINK]{F}</think>[/THINK]{G}", f"[THINK]{F}</think>[/THINK]", [AS_G]),
    (HERMES, f"<thinking>{F}</think></thinking>{G}", f"<thinking>{F}</think></thinking>", [AS_G]),
    (HERMES, f"</think>{F}", "</think>", [AS_F]),
    (HERMES, written(HERMES, "f", {"x": "<think>"}), "", [("f", '{"x": "<think>"}')]),
    (LLAMA, f"<think>{LF}</think>\n\n{LG}", f"<think>{LF}</think>", [AS_G]),
    (LLAMA, f"\n<think>{LF}</think> so {LG}", f"\n<think>{LF}</think> so {LG}", []),
    (LLAMA, f"so <think> </think>{LG}", f"so <think> </think>{LG}", []),
    (LLAMA, LF, "", [AS_F]),
    (LLAMA, f" {LF}; {LG}\n", "", [AS_F, AS_G]),
    (LLAMA, f"{LF}\nso {LG}", f"\nso {LG}", [AS_F]),
    (LLAMA, f"so {LF}", f"so {LF}", []),
    (LLAMA, LF.replace("parameters", "arguments"), "", [AS_F]),
    (LLAMA, LF[:-1], LF[:-1], []),
]


@pytest.mark.parametrize(("form", "answer", "content", "calls"), ANSWERS)
def test_calls_are_parsed_the_same_however_an_answer_comes_in_pieces(form, answer, content, calls):
    assert parsed(form, [answer]) == (content, calls)
    halves = [[answer[:cut], answer[cut:]] for cut in range(min(len(answer), 200))]
    for pieces in (*halves, [*answer[:300], answer[300:]]):
        assert parsed(form, pieces) == (content, calls), pieces


@pytest.mark.parametrize("form", HOW, ids=["hermes", "llama"])
@pytest.mark.parametrize("tag", CLOSING_TAGS)
def test_a_thought_that_the_prompt_began_has_no_calls(form, tag):
    call = written(form, "f", {})
    later = written(form, "g", {})
    for thought in (f"so {call}", call, " "):
        for answer, content, calls in (
            (
                f"{thought}{CLOSING_TAGS[tag]}\n{later}",
                f"{thought}{CLOSING_TAGS[tag]}",
                [("g", "{}")],
            ),
            (thought, thought, []),
        ):
            for pieces in ([answer], [*answer]):
                assert parsed(form, pieces, thought=tag) == (content, calls), pieces


def test_a_prompt_ends_in_a_thought_or_not():
    for tag, end in CLOSING_TAGS.items():
        assert opened_thought(f"x{end} {tag}\n") == tag
        assert opened_thought("x", ["a", f"b {tag}c"]) == tag
        assert opened_thought("x", [f"{end}{tag}"]) == tag
        assert opened_thought(f"{tag}x{end}\n\n") is None
        assert opened_thought(f"what is {tag}?\nassistant:") is None
        assert opened_thought("x", [f"{tag}b{end}c"]) is None
    assert opened_thought("x") is None


@pytest.mark.parametrize("form", HOW, ids=["hermes", "llama"])
def test_only_functions_that_are_offered_are_called(form):
    asked = [written(form, name, {"age": 2}) for name in ("Bob", "f")]
    offered = {"f": None}
    assert parsed(form, asked[:1], parameters=offered) == (asked[0], [])
    assert parsed(form, [*asked[0]], parameters=offered) == (asked[0], [])
    assert parsed(form, asked[1:], parameters=offered) == ("", [("f", '{"age": 2}')])
    parser = ToolCallParser(CallParsing(form=form, parameters={"f": None}))
    said, calls = parser.add(asked[0])
    assert asked[0].startswith(said), "text that is not a call is not held back"
    assert said, "text that is not a call is not held back"
    assert not calls, "text that is not a call is not held back"


def test_text_that_only_mentions_a_tag_is_not_held_back():
    parser = ToolCallParser(CallParsing(form=HERMES))
    pieces = ["a", " <tool", "_call", ">", " b", " <tool_call>", "{", '"x"}', " c"]
    assert [parser.add(piece)[0] for piece in pieces] == [
        "a",
        "",
        "",
        "",
        " <tool_call> b",
        "",
        "",
        "",
        "",
    ]
    assert parser.add("", is_last=True) == (' <tool_call>{"x"} c', [])
    for form, call in ((HERMES, F), (LLAMA, LF)):
        assert len(ToolCallParser(CallParsing(form=form)).add(call)[1]) == 1, (
            "a call comes when it is complete"
        )


def test_well_formed_calls_are_those_of_a_plain_pattern():
    said = ["", "x ", "{} ", "<tool_call>\n{]\n</tool_call> "]
    for before in said:
        for calls in ([F], [F, G], [G, TAGS, F]):
            answer = before + "\n".join(calls)
            found = [
                json.loads(each)
                for each in re.findall(r"<tool_call>\s*(\{\".*\})\s*</tool_call>", answer)
            ]
            expected = [
                (each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in found
            ]
            assert parsed(HERMES, [answer]) == (before.rstrip(), expected)
            assert len(found) == len(calls)
            assert parsed(HERMES, [answer], max_calls=1) == (before.rstrip(), expected[:1])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")


@pytest.mark.parametrize("form", HOW, ids=["hermes", "llama"])
def test_a_grammar_allows_what_is_parsed_as_calls_that_fit(engine, form):
    grammars = Grammars(engine.tokenizer, engine.parts.vocab_size, engine.parts.eos_token_ids)

    functions = [tool["function"] for tool in TOOLS]
    quoted_name = {"name": 'a "b"/ü.é', "parameters": SCHEMAS["place_2-B"]}

    def allows(said: str, is_single: bool = False, schema: dict | None = None) -> bool:
        grammar = form.grammar([*functions, quoted_name], (), is_single, schema)
        matcher = grammars.begin(None, grammar)
        for token in (*engine.tokenizer.encode(said), engine.parts.eos_token_ids[0]):
            if not matcher.masked(torch.zeros(1, engine.parts.vocab_size))[0, token].isfinite():
                return False
            matcher.take(token)
        return True

    first = ("first", {"count": 3})
    odd = ('a "b"/ü.é', {"at": "x"})
    for calls in ([first], [odd], [("now", {})], [first, odd], [odd, odd, first]):
        said = form.separator.join(written(form, *call) for call in calls)
        assert allows(said)
        assert allows(said, schema=COUNT)
        assert allows(said, is_single=True) == (len(calls) == 1)
        content, found = parsed(form, [said])
        assert content == ""
        assert found == [(name, json.dumps(arguments)) for name, arguments in calls]
    wrong = [
        ("other", {}),
        ("first", {}),
        ("first", {"count": 10}),
        (odd[0], {"at": "z"}),
        ("now", {"x": 1}),
    ]
    for said in (
        *(written(form, *call) for call in wrong),
        '{"count": 3}',
        "",
        f"so {written(form, *first)}",
    ):
        assert not allows(said), said
    named = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "other": {"type": "integer"}},
    }
    assert all(
        allows(said, schema=named)
        for said in ('{"name": "first"}', '{"other": 3}', written(form, *first))
    )
    assert allows('{"count": 3}', schema=COUNT) and not allows('{"count": "3"}', schema=COUNT)


def test_tags_with_tokens_of_their_own_are_these_tokens():
    """To be called, and to be seen if they are special; other special tokens are no text."""
    tokenizer = families.build_tokenizer("qwen3")
    tokenizer.add_special_tokens({"extra_special_tokens": [HERMES.opening]})
    tokenizer.add_tokens([HERMES.closing])
    eos = tokenizer.convert_tokens_to_ids(families.EOS)
    grammar = HERMES.grammar([TOOLS[2]["function"]], tokenizer.get_added_vocab(), is_single=True)
    matcher = Grammars(tokenizer, len(tokenizer), (eos,)).begin(None, grammar)
    call = tokenizer.encode(written(HERMES, "now", {}), add_special_tokens=False)
    for token in (*call, eos):
        assert matcher.masked(torch.zeros(1, len(tokenizer)))[0, token] == 0
        matcher.take(token)
    special = tokenizer.convert_tokens_to_ids(HERMES.opening)
    assert call[0] == special and special in tokenizer.all_special_ids
    pieces = []
    calls = [*tokenizer.encode("é "), *call, eos]
    for shown, expected in (
        ((special,), "é " + tokenizer.decode(call)),
        ((), "é " + tokenizer.decode(call[1:])),
    ):
        output = SimpleNamespace(
            is_cancelled=False, add_tokens=lambda choice, num_tokens, piece: pieces.append(piece)
        )
        order = WorkOrder(
            question_fields={},
            files=[],
            settings=RequestSettings(),
            reply=ReplyOptions(streams=True, shown_token_ids=shown),
        )
        stream = AnswerStream(output, order, tokenizer.decode)
        for number in range(1, len(calls) + 1):
            stream.take(calls[:number], [])
        stream.finish(calls, [], "stop")
        assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == expected
        pieces.clear()


def test_the_format_is_the_one_that_a_template_explains():
    assert [call_format(how) for how in HOW.values()] == list(HOW)
    doubled = (
        'within <tool_call></tool_call> tags:\n<tool_call>\n{{"arguments": <args>, "name": '
        "<name>}}\n</tool_call>"
    )
    assert call_format(doubled) == HERMES
    for unknown in (
        None,
        "[TOOL_CALLS]",
        "<tool_call>\n<function=name>\n</function>\n</tool_call>",
        '<tool_call>{"name": n, "arguments": {<arg_key>k</arg_key>}}</tool_call>',
        '<tool_call>\n{"name": <name>, "parameters": <object>}\n</tool_call>',
        "<tool_call>[name(key=value)]</tool_call>",
        'the tools are {"name": "f", "arguments": {}}: write <tool_call>NAME</tool_call>',
        'Write <|tool_call|>{"name": n, "arguments": {}}<|/tool_call|>',
        "<tools></tools>",
    ):
        assert call_format(unknown) is None, unknown


def explaining(template: str, how: str) -> str:
    """A template of the demo model's kind that shows tools and calls."""
    shown = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + how
    call = (
        "[{{ call.function.name }}{% for name in call.function.arguments %} {{ name }}{% endfor %}]"
    )
    begun = "{% if add_generation_prompt %}"
    begun += "{{ '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    end = "{% for call in message.tool_calls or () %}" + call + "{% endfor %}<|im_end|>"
    return "{% if tools %}" + shown + "{% endif %}" + template.replace("<|im_end|>", end) + begun


@pytest.fixture(scope="module", params=HOW, ids=["hermes", "llama"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def app(engine, media, form):
    template = engine.processor.chat_template
    engine.processor.chat_template = explaining(template, HOW[form])
    with closing(
        InProcess(model=engine, max_model_len=2500, max_running=3, media_dir=media)
    ) as app:
        yield app
    engine.processor.chat_template = template


@pytest.fixture
def script(app, monkeypatch):
    """What the model is made to say, request by request, unless it has to call."""
    said = []
    constraint = Reader.constraint_of

    def scripted(reader, request, is_wanted):
        if request.tool_choice in (None, "auto", "none"):
            return {"grammar": f"start: {quoted(said.pop(0))}"}
        return constraint(reader, request, is_wanted)

    monkeypatch.setattr(Reader, "constraint_of", scripted)
    return said


def ask(app, **fields) -> dict:
    body = {**ASK, "tools": TOOLS, "max_tokens": 400, **fields}
    reply = post(app, CHAT, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def functions_of(message: dict) -> list[dict]:
    return [call["function"] for call in message.get("tool_calls", ())]


def test_a_stream_has_the_text_and_calls_of_the_whole_answer(app, script, form):
    two = [written(form, "first", {"count": 2}), written(form, "now", {})]
    before, after = ("Let me see.\n", "\ndone") if form.opening else ("", " done")
    answer = before + form.separator.join(two) + after
    names = [{"name": "first", "arguments": '{"count": 2}'}, {"name": "now", "arguments": "{}"}]
    fields = {"logprobs": True, "return_token_ids": True}
    for options, calls in (
        ({"n": 2}, names),
        ({"parallel_tool_calls": False}, names[:1]),
        ({"tool_choice": "none"}, []),
    ):
        script += [answer] * 2
        whole = ask(app, **fields, **options)
        streamed = chunks(
            post(app, CHAT, **ASK, tools=TOOLS, max_tokens=400, stream=True, **fields, **options)
        )
        for choice in whole["choices"]:
            message = choice["message"]
            reason = "tool_calls" if calls else "stop"
            said = before.rstrip() + after if calls else answer
            assert message["content"] == said
            assert functions_of(message) == calls
            assert choice["finish_reason"] == reason
            own = choices_at(choice["index"], streamed)
            deltas = [each["delta"] for each in own]
            assert "".join(delta.get("content", "") for delta in deltas) == said
            told = list(chain.from_iterable(delta.get("tool_calls", ()) for delta in deltas))
            assert [call["function"] for call in told] == calls
            assert own[-1]["finish_reason"] == reason
            assert [call["index"] for call in told] == list(range(len(calls)))
            assert all(call["id"] and call["type"] == "function" for call in told)
            assert token_ids_of(own) == choice["token_ids"]
            logprobs = []
            for each in own:
                if each["logprobs"]:
                    logprobs += each["logprobs"]["content"]
            assert len(logprobs) == len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            if calls:
                early = [delta for delta in deltas if delta.get("content")]
                assert not form.opening or len(early) > 3, "text comes as it is made"


def test_an_answer_of_calls_alone_has_no_content_and_one_cut_short_is_text(app, script, form):
    call = written(form, "now", {})
    script += [call, call, call]
    whole = ask(app)["choices"][0]
    assert whole["message"]["content"] is None and len(whole["message"]["tool_calls"]) == 1
    (cut,) = ask(app, max_tokens=9)["choices"]
    assert cut["finish_reason"] == "length"
    assert cut["message"].keys() == {"role", "content", "refusal"}
    assert cut["message"]["content"] and call.startswith(cut["message"]["content"])
    handed = post(app, CHAT, **ASK, tools=TOOLS, max_tokens=400, stop=["no"])
    assert handed.json()["choices"][0]["message"]["content"] == call.split("no")[0]


def test_a_thought_calls_no_tool(app, script, form):
    """Whether the model began it, or the prompt did."""
    call = written(form, "now", {})
    inside = f"I could call {call} or {written(HERMES, 'now', {})} but no.</think>"
    thinking = {"chat_template_kwargs": {"thinks": True}}
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    continued["messages"] = [*ASK["messages"], {"role": "assistant", "content": "<think>Well."}]
    considered = inside.removesuffix("</think>")
    for fields, answer, thought in (
        ({}, f"<think>{inside}", considered),
        (thinking, inside, considered),
        (thinking, f"{call}</think>", call),
        (continued, inside, considered),
    ):
        for rest, calls in (("It is 12.", 0), (call, 1)):
            script += [answer + rest] * 2
            (choice,) = ask(app, **fields)["choices"]
            content = "" if calls else rest
            assert (choice["message"]["content"] or "") == content
            assert choice["message"]["reasoning"] == thought
            assert len(functions_of(choice["message"])) == calls
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            body = {**ASK, **fields, "tools": TOOLS, "max_tokens": 400}
            streamed = chunks(post(app, CHAT, **body, stream=True))
            deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
            assert "".join(delta.get("content", "") for delta in deltas) == content
            assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == calls


def test_a_required_call_follows_the_thought_that_the_prompt_began(app):
    bias = {app.engine.tokenizer.encode(letter)[0]: 30 for letter in "</think>"}
    asked = {"tool_choice": "required", "chat_template_kwargs": {"thinks": True}}
    (choice,) = ask(app, **asked, logit_bias=bias)["choices"]
    if choice["finish_reason"] == "length":  # it thought until its end
        assert choice["message"]["content"] is None and choice["message"]["reasoning"]
    else:
        assert functions_of(choice["message"]) and choice["finish_reason"] == "tool_calls"


def test_an_answer_by_a_schema_that_looks_like_a_call_is_content(app, form):
    said = {"name": "Bob", form.key: {"age": 2}}
    described = {"type": "json_schema", "json_schema": {"name": "told", "schema": {"const": said}}}
    bias = {app.engine.tokenizer.encode("{")[0]: 50}
    (choice,) = ask(app, response_format=described, logit_bias=bias)["choices"]
    assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == (said, "stop")


def test_a_call_that_is_required_is_made(app, script):
    asked = {"temperature": 1.5, "seed": 3}
    for choice in ask(app, tool_choice="required", n=2, **asked)["choices"]:
        called = functions_of(choice["message"])
        assert called
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert {function["name"] for function in called} <= set(SCHEMAS)
    (one,) = ask(app, tool_choice="required", parallel_tool_calls=False, **asked)["choices"]
    assert len(functions_of(one["message"])) == 1
    for name, schema in SCHEMAS.items():
        named = {"type": "function", "function": {"name": name}}
        (choice,) = ask(app, tool_choice=named, **asked)["choices"]
        (function,) = functions_of(choice["message"])
        assert function["name"] == name
        jsonschema.validate(json.loads(function["arguments"]), schema or {})


def test_an_answer_by_a_schema_may_be_a_call_instead(app, form):
    """Whichever the model prefers where they differ."""
    described = {"type": "json_schema", "json_schema": {"name": "told", "schema": COUNT}}
    for letter, calls in (("<" if form.opening else "n", 1), ("{" if form.opening else "c", 0)):
        bias = {app.engine.tokenizer.encode(letter)[0]: 50}
        fields = {"response_format": described, "logit_bias": bias, "parallel_tool_calls": False}
        message = ask(app, **fields)["choices"][0]["message"]
        assert len(functions_of(message)) == calls
        jsonschema.validate(json.loads(message["content"] or '{"count": 0}'), COUNT)


def test_openais_client_goes_through_a_loop_of_tools_about_a_video(app, script, form):
    """Two calls, their results, one more call, and the answer; the template gets all that was
    said."""
    client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="-", http_client=app.client)
    calls = [written(form, "first", {"count": 1}), written(form, "now", {})]
    script += [form.separator.join(calls), calls[0], "It is X."]
    content = [text("which letter is first?"), part("video", "clip.mp4")]
    messages = [{"role": "user", "content": content}]
    prompts = []
    numbers = count(1)
    tools = {"first": lambda count: f"letter {count} is X", "now": lambda: "noon"}
    while True:
        asked = {"messages": messages, "tools": TOOLS, "max_tokens": 300}
        extra = {"num_frames": 4, "return_token_ids": True}
        told = app.loop.run_until_complete(
            client.chat.completions.create(model="demo", **asked, extra_body=extra)
        )
        tokens = post(
            app,
            "/tokenize",
            messages=json.loads(json.dumps(messages, default=dict)),
            tools=TOOLS,
            num_frames=4,
        )
        assert told.prompt_token_ids == tokens.json()["tokens"]
        prompts.append(app.engine.tokenizer.decode(told.prompt_token_ids))
        (choice,) = told.choices
        if choice.finish_reason == "stop":
            break
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            result = tools[call.function.name](**json.loads(call.function.arguments))
            said = result if next(numbers) % 2 else [text(result)]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert choice.message.content == "It is X." and len(prompts) == 3
    assert all("Tells now." in prompt and HOW[form].split()[0] in prompt for prompt in prompts)
    one = "[first count]<|im_end|>\n<|im_start|>tool\nletter 1 is X<|im_end|>"
    assert prompts[1].count("letter 1 is X") == 1 and "[first count][now]<|im_end|>" in prompts[1]
    assert "<|im_start|>tool\nnoon<|im_end|>" in prompts[1] and one in prompts[2]


BAD = {
    "type": "function",
    "function": {"name": "bad", "parameters": {"properties": {"x": {"type": 7}}}},
}
ENDING = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"const": "a<|im_end|>"}}}},
}
LOOP = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"$ref": "#/properties/x"}}}},
}
SAID = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{]"}}
OTHER = {"type": "function", "function": {"name": "other"}}
REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    *(
        ({"tools": [{"type": "function", "function": {"name": name}}]}, "tools.0.function.name")
        for name in ("", "<|im_end|>", "a b", "a.b", "ü", "a\n", "x" * 65)
    ),
    ({"tools": [ENDING], "tool_choice": "required"}, "tools", "special token"),
    ({"tools": [LOOP], "tool_choice": "required"}, "tools", "back to themselves"),
    ({"tools": TOOLS * 43}, "tools"),
    ({"tools": [BAD], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "names one",
    ),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice", "excludes"),
    ({"tools": TOOLS, "functions": [{"name": "x"}]}, "functions"),
    ({"chat_template_kwargs": {"tools": TOOLS}}, "messages", "not a chat-template variable"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [SAID]}]},
        "messages.0.tool_calls",
        "assistant",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [SAID]}]}, "messages", "a JSON object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), [(*row, "")[:3] for row in REFUSED])
def test_what_is_wrong_with_tools_is_named(app, fields, param, message):
    body = {**ASK, **fields}
    reply = post(app, CHAT, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert message in error["message"], error


def test_a_model_whose_template_knows_no_tools_takes_none(engine, monkeypatch):
    monkeypatch.setattr(
        engine.processor, "chat_template", engine.processor.chat_template.replace("tools", "others")
    )
    with closing(InProcess(model=engine)) as app:
        for path, fields in ((CHAT, {}), (CHAT, {"tool_choice": "none"}), ("/tokenize", {})):
            error = post(app, path, **ASK, tools=TOOLS, **fields).json()["error"]
            assert error["param"] == "tools" and "knows no tools" in error["message"]
    how = engine.processor.chat_template.replace("others", "tools").replace("<tool_call>", "[CALL]")
    monkeypatch.setattr(engine.processor, "chat_template", how.replace("function name", "name"))
    with closing(InProcess(model=engine, max_model_len=1500)) as app:
        error = post(app, CHAT, **ASK, tools=TOOLS).json()["error"]
        assert error["param"] == "tools" and "not supported" in error["message"]
        assert post(app, CHAT, **ASK, tools=TOOLS, tool_choice="none").status_code == 200


def test_a_hand_over_shows_the_tools_and_leaves_calls_to_the_other_server(engine, app, media):
    with closing(
        InProcess(model=engine, media_dir=media, hands_over=True, max_model_len=1500)
    ) as handing:
        fields = {**ASK, "tools": TOOLS, "tool_choice": "required", "return_token_ids": True}
        reply = post(handing, CHAT, **fields, kv_transfer_params=HAND_OVER).json()
        assert "tool_calls" not in reply["choices"][0]["message"] and "kv_transfer_params" in reply
        assert (
            reply["prompt_token_ids"] == post(app, "/tokenize", **ASK, tools=TOOLS).json()["tokens"]
        )
