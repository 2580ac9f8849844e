"""JSON schemas: what a grammar allows of them, whatever looks like a schema inside them, and loops
of references."""

import json
from copy import deepcopy

import pytest
import torch

from apbv import Engine, HostGroup
from apbv.grammar.grammars import Grammars, json_rule
from apbv.grammar.schemas import fixed_texts, prepared


@pytest.fixture(scope="module")
def allows():
    """Whether a schema allows an answer, as a whole and as a part of a grammar."""
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")
    vocab_size = engine.parts.vocab_size
    (eos, *_) = engine.parts.eos_token_ids
    grammars = Grammars(engine.tokenizer, vocab_size, engine.parts.eos_token_ids)

    def may_follow(matcher, said: str) -> bool:
        for token in (*engine.tokenizer.encode(said), eos):
            if not matcher.masked(torch.zeros(1, vocab_size))[0, token].isfinite():
                return False
            matcher.take(token)
        return True

    def check(schema, value) -> bool:
        said = json.dumps(value)
        whole = may_follow(grammars.begin(json.dumps(schema)), said)
        inside = may_follow(
            grammars.begin(None, f"start: answer\nanswer: {json_rule(schema)}"), said
        )
        assert whole == inside
        return whole

    return check


TYPED = {"type": "t", "properties": {}}
VALUES = [
    {"const": TYPED},
    {"enum": [TYPED, 1]},
    {"const": {"format": "binary", "type": "object", "properties": {"allOf": []}}},
    {"enum": [[{"type": "object", "properties": {}}]]},
    {"type": "integer", "default": TYPED},
    {"type": "integer", "examples": [TYPED, {"format": "x"}]},
]


@pytest.mark.parametrize("schema", VALUES)
def test_constants_stay_as_they_are(schema):
    given = deepcopy(schema)
    for around in (
        {"properties": {"v": schema}},
        {"items": schema},
        {"anyOf": [schema]},
        {"$defs": {"v": schema}},
    ):
        (kept,) = prepared(json.dumps(around)).values()
        kept = kept[0] if isinstance(kept, list) else kept.get("v", kept)
        assert kept == given and prepared(json.dumps(schema)) == given


def test_an_answer_is_a_constant_exactly(allows):
    schema = {"type": "object", "properties": {"v": {"const": TYPED}}, "required": ["v"]}
    assert allows(schema, {"v": TYPED})
    assert not allows(schema, {"v": {**TYPED, "additionalProperties": False}}) and not allows(
        schema, {"v": {}}
    )


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "oneOf", "prefixItems", "items")


def test_objects_are_closed_wherever_a_schema_stands():
    around = [
        lambda part, keyword=keyword: {keyword: {"const": part, "x": part}} for keyword in BY_NAME
    ]
    around += [lambda part, keyword=keyword: {keyword: part} for keyword in ONE]
    around += [lambda part, keyword=keyword: {keyword: [part, True]} for keyword in LISTS]
    for schema in around:
        assert prepared(json.dumps(schema(OBJECT))) == schema(CLOSED)
    properties = {
        "properties": OBJECT,
        "type": OBJECT,
        "allOf": OBJECT,
        "enum": OBJECT,
        "default": OBJECT,
    }
    (kept,) = prepared(json.dumps({"properties": properties})).values()
    assert kept == dict.fromkeys(properties, CLOSED), "a property may be named like a keyword"
    explicit = {**OBJECT, "additionalProperties": {"type": "integer"}}
    assert prepared(json.dumps(explicit)) == explicit
    elsewhere = {"$ref": "#/components/a", "components": {"a": OBJECT}}
    assert prepared(json.dumps(elsewhere))["components"]["a"] == CLOSED


def test_a_word_opens_no_object(allows):
    schema = {
        **OBJECT,
        "description": "allOf of these",
        "properties": {"allOf": {"type": "integer"}},
    }
    assert allows(schema, {"allOf": 1}) and not allows(schema, {"allOf": 1, "b": 2})


def test_what_several_schemas_describe_together_is_left_open(allows):
    a = OBJECT
    b = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    together = [
        {"allOf": [a, b]},
        {**a, "allOf": [b]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": a, "b": b}},
        {**a, "$ref": "#/$defs/b", "$defs": {"b": b}},
        {**a, "anyOf": [b]},
    ]
    for schema in together:
        assert allows(schema, {"a": 1, "b": 2}), schema
        beside = {
            "type": "object",
            "properties": {"x": a, "y": schema},
            "$defs": schema.pop("$defs", {}),
        }
        assert allows(beside, {"x": {"a": 1}, "y": {"a": 1, "b": 2}}), schema
        assert not allows(beside, {"x": {"a": 1, "b": 2}, "y": {"b": 2}}), schema
    inner = {"allOf": [{"properties": {"v": a}}, {"properties": {"v": b}}], "type": "object"}
    assert allows(inner, {"v": {"a": 1, "b": 2}})
    either = {"anyOf": [a, b]}
    assert (
        allows(either, {"a": 1})
        and allows(either, {"b": 1})
        and not allows(either, {"a": 1, "b": 2})
    )
    named = {**OBJECT, "anyOf": [{"required": ["a"]}, {"minProperties": 0}]}
    assert prepared(json.dumps(named))["additionalProperties"] is False


def test_unknown_formats_have_no_effect_and_known_ones_do(allows):
    for name in ("binary", "password", "path", "regex", "uri-reference", "no such"):
        for schema in ({"type": "string", "format": name}, {"format": name}):
            assert allows(schema, "x")
            assert allows({"type": "object", "properties": {"format": schema}}, {"format": "x"})
    for name, right in (
        ("date", "2024-02-28"),
        ("ipv4", "1.2.3.4"),
        ("email", "a@b.ch"),
        ("time", "12:00:00Z"),
    ):
        assert allows({"type": "string", "format": name}, right) and not allows(
            {"format": name}, "x"
        )


def test_a_schema_may_be_true_and_not_false(allows):
    for value in ({"x": [1, None]}, "x", 1.5):
        assert allows(True, value)
    for schema in ("false", "1", "[]", "null"):
        with pytest.raises(ValueError, match="schema"):
            prepared(schema)


A_LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}
LOOPS = [
    {"$ref": "#"},
    {"$ref": ""},
    {"allOf": [{"$ref": "#"}]},
    {"anyOf": [{"$ref": "#"}, {"oneOf": [{"$ref": "#"}]}]},
    {"$ref": "#/$defs/a", "$defs": A_LOOP},
    {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}},
    {"type": "array", "items": {"$ref": "#/$defs/b"}, "$defs": A_LOOP},
    {"$defs": {"a": {"$anchor": "here", "$ref": "#here"}}, "$ref": "#here"},
    {"$id": "http://x/y", "anyOf": [{"$ref": "y"}]},
    {"$ref": "#/$defs/a~1%25", "$defs": {"a/%": {"$ref": "#/$defs/a~1%25"}}},
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
]


@pytest.mark.parametrize("schema", LOOPS)
def test_references_that_lead_back_without_an_end_are_named(schema):
    with pytest.raises(ValueError, match="lead back to themselves without an end, at #"):
        prepared(json.dumps(schema))


def test_references_that_lead_back_and_have_an_end_are_followed(allows):
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert allows(tree, {"next": {"next": {}}}) and not allows(tree, {"next": {"other": {}}})
    rows = {"type": "array", "items": {"$ref": "#"}}
    assert allows(rows, [[], [[]]])
    for last in ({"type": "null"}, {"type": "string"}):
        chain = {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, last]}},
            "required": ["next"],
        }
        value = None if last["type"] == "null" else "x"
        assert allows(chain, {"next": {"next": value}})
    long = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(500)}
    assert prepared(json.dumps({"$ref": "#/$defs/d0", "$defs": {**long, "d500": {"type": "null"}}}))


def test_texts_that_a_schema_prescribes_are_found():
    """In constants and names, wherever these are applied, and not in what only describes."""
    schema = {
        "properties": {"a": {"const": {"b": ["c"]}}, "d": {"anyOf": [{"enum": ["e", 1, None]}]}},
        "required": ["f"],
        "items": {"$ref": "#/elsewhere/x"},
        "elsewhere": {"x": {"const": "g"}},
        "description": "h",
        "default": "i",
        "examples": ["j"],
    }
    assert sorted(fixed_texts(json.dumps(schema))) == [*"abcdefg"]
    assert list(fixed_texts("true")) == []
