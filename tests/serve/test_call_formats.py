"""Calls with a tag for every argument, as GLM and Qwen3-Coder write them."""

import json
import random

import jsonschema
import pytest
import torch

from apbv import Engine, HostGroup
from apbv.errors import InvalidRequestError
from apbv.grammar.grammars import Grammars
from apbv.serve.formats.call_formats import GLM, GLM_SHORT, QWEN3_CODER, call_format
from apbv.serve.formats.tool_calls import CallParsing, ToolCallParser

from apbv_tests import families

# As the models' chat templates explain calls.
EXPLAINED = {
    GLM: "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
    "<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
    "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>",
    GLM_SHORT: "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
    "<arg_value>{arg-value-1}</arg_value>...</tool_call>",
    QWEN3_CODER: "<tool_call>\n<function=example_function_name>\n"
    "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\n"
    "This is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
    "</function>\n</tool_call>",
}
FORMS = {GLM: "glm", GLM_SHORT: "glm without line breaks", QWEN3_CODER: "qwen3_coder"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/spot"}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["place", "days"],
    "$defs": {
        "spot": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
FUNCTIONS = {
    "weather": PARAMETERS,
    "now": None,
    "set-2": {"properties": {"on": {"type": "boolean"}}},
}
ARGUMENTS = [
    {"place": "Paris", "days": 3},
    {"place": " a\n b <c>\n", "days": 1, "unit": "F", "near": [{"x": 1.5}, {"x": 2}], "note": None},
    {"place": '"3"', "days": 9, "note": "7"},
    {"place": "3", "days": 2, "unit": "C"},
    {"place": "</tool_call> {}", "days": 2},
]


def written(form, name: str, arguments: dict) -> str:
    """A call as the models' templates write those of earlier turns."""

    def as_text(value) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    if form is QWEN3_CODER:
        lines = [
            f"<parameter={key}>\n{as_text(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"
    gap = "\n" if form is GLM else ""
    pairs = [
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{as_text(value)}</arg_value>{gap}"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


def parsed(form, answer: str, seed: int = 0) -> tuple[str, list[tuple[str, dict]]]:
    chance = random.Random(seed)
    parser = ToolCallParser(CallParsing(form=form, parameters=FUNCTIONS))
    text = ""
    calls = []
    while answer:
        length = chance.choice((1, 1, 2, 7, 60))
        new_text, new_calls = parser.add(answer[:length], is_last=length >= len(answer))
        answer = answer[length:]
        text += new_text
        calls += [call["function"] for call in new_calls]
    return text, [(call["name"], json.loads(call["arguments"])) for call in calls]


each_form = pytest.mark.parametrize("form", FORMS, ids=FORMS.values())


def test_the_format_is_the_one_that_a_template_explains():
    for form, explained in EXPLAINED.items():
        assert call_format(f"You may call tools:\n{explained}\n") is form
    assert call_format("<tool_call><function=f></tool_call>") is None


@each_form
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_read_as_the_template_writes_them(form, seed):
    for arguments in ARGUMENTS:
        call = written(form, "weather", arguments)
        assert parsed(form, call, seed) == ("", [("weather", arguments)]), call
        both = f"Let me see.\n{call}\n{written(form, 'now', {})}\n"
        expected = ("Let me see.", [("weather", arguments), ("now", {})])
        assert parsed(form, both, seed) == expected
    assert parsed(form, written(form, "set-2", {"on": True})) == ("", [("set-2", {"on": True})])


@each_form
@pytest.mark.parametrize("seed", range(3))
def test_what_is_no_call_remains_text(form, seed):
    good = written(form, "weather", ARGUMENTS[0])
    for wrong in (
        written(form, "other", {}),
        good.removesuffix("</tool_call>")[:-9],
        "<tool_call></tool_call>",
        "<tool_call>now and then</tool_call>",
        good.replace("</arg_key>", "").replace("</function>", ""),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ):
        assert parsed(form, wrong, seed) == (wrong.rstrip(), []), wrong
        text, calls = parsed(form, f"{wrong}\n{written(form, 'now', {})}", seed)
        assert calls in ([("now", {})], []) and (calls or text)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")


@each_form
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_grammar_allows_what_is_read_as_calls_that_fit(form, has_tokens):
    tokenizer = families.build_tokenizer("qwen3")
    if has_tokens:
        tokenizer.add_tokens(sorted(set(form.tags)))
    eos = tokenizer.convert_tokens_to_ids(families.EOS)
    grammars = Grammars(tokenizer, len(tokenizer), (eos,))
    functions = [{"name": name, "parameters": schema} for name, schema in FUNCTIONS.items()]
    tokens = tokenizer.get_added_vocab()

    def allows(said: str, is_single: bool = False, schema: dict | None = None) -> bool:
        grammar = form.grammar(functions, tokens, is_single, schema)
        matcher = grammars.begin(None, grammar)
        for token in (*tokenizer.encode(said, add_special_tokens=False), eos):
            if not matcher.masked(torch.zeros(1, len(tokenizer)))[0, token].isfinite():
                return False
            matcher.take(token)
        return True

    # What is a token is no text of a value.
    for arguments in ARGUMENTS[:-1] if has_tokens else ARGUMENTS:
        call = written(form, "weather", arguments)
        jsonschema.validate(arguments, PARAMETERS)
        assert allows(call) and allows(call, is_single=True), call
        assert allows(form.separator.join([call, written(form, "now", {})]))
    assert not allows(form.separator.join([written(form, "now", {})] * 2), is_single=True)
    assert allows(written(form, "set-2", {})) and allows(written(form, "set-2", {"on": False}))
    for wrong in (
        written(form, "other", {}),
        written(form, "weather", {"place": "x"}),
        written(form, "weather", {"place": "x", "days": 10}),
        written(form, "weather", {"place": "x", "days": 1, "unit": "K"}),
        written(form, "now", {"x": 1}),
        "so " + written(form, "now", {}),
        "",
    ):
        assert not allows(wrong), wrong
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert allows('{"a": 1}', schema=answer) and allows(written(form, "now", {}), schema=answer)


def test_parameters_that_are_no_list_of_arguments_are_refused():
    with pytest.raises(InvalidRequestError, match="need properties"):
        QWEN3_CODER.grammar([{"name": "f", "parameters": {"$ref": "#/$defs/a"}}], {}, True)
