"""How models write tool calls, each as its chat template explains it.

Hermes' form, of Qwen2.5 and Qwen3, and Llama 3's are JSON objects. GLM's and Qwen3-Coder's, which
Qwen3.5 writes, too, have a tag for every argument, and its value as text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...errors import InvalidRequestError
from ...grammar.grammars import json_rule, quoted, tag_rule

_decode_json = json.JSONDecoder().raw_decode
# Of texts in tagged forms: to the tag that ends them.
_ANY_TEXT = "/(?s:.*)/"
# Keys of a schema that is made of others, and of one that lists values.
_COMPOSED = {"$ref", "anyOf", "allOf", "oneOf"}
_LISTED = {"enum", "const"}


class NotACallError(Exception):
    """Raised where text is not a call."""


class ToolCall(NamedTuple):
    """A call as a model has written it.

    Attributes:
        name: of the function.
        arguments: by name.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallFormat(ABC):
    """How a model writes calls.

    Attributes:
        opening, closing: tags around each call; if empty, an answer begins with its calls.
        separator: text between two calls.
    """

    opening: str
    closing: str
    separator: str

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of a call, of which some may be special tokens."""
        return (self.opening, self.closing)

    @abstractmethod
    def may_begin(self, body: str) -> bool:
        """Return whether text behind the opening tag may begin a call; it may be empty."""

    @abstractmethod
    def read(
        self, body: str, parameters: Mapping[str, Any], is_last: bool
    ) -> tuple[ToolCall | None, int]:
        """Read a call from the text behind the opening tag.

        Args:
            parameters: the schemas of the functions' parameters, by name.
            is_last: whether no more text follows.

        Returns:
            The call, and the length of its text; None and 0: it is not complete yet.

        Raises:
            NotACallError: it is not a call.
        """

    @abstractmethod
    def call_rules(
        self, number: int, function: dict[str, Any], added_tokens: Mapping[str, int]
    ) -> list[str]:
        """Return the rules of a grammar for what is between a call's tags.

        Args:
            number: the function's, of which the first rule has the name ``f`` and this number.
            function: its name and parameters, as in OpenAI's API.
            added_tokens: the ids of texts that have a token of their own.

        Raises:
            InvalidRequestError: the parameters cannot be written in this form.
        """

    def grammar(
        self,
        functions: Sequence[dict[str, Any]],
        added_tokens: Mapping[str, int],
        is_single: bool,
        answer_schema: Any = None,
    ) -> str:
        """Return a grammar (:attr:`apbv.SamplingParams.grammar`) of answers that call functions.

        Args:
            functions: their names and parameters, as in OpenAI's API.
            added_tokens: the ids of texts that have a token of their own; a grammar does not quote
                these.
            is_single: whether there is one call, and not one or more.
            answer_schema: the JSON schema of answers without a call; None: there are none.
        """
        # The answer: calls, or text that follows its schema.
        further_calls = "" if is_single else f"({quoted(self.separator)} call)*"
        rules = [f"calls: call {further_calls}"]
        if answer_schema is None:
            rules.append("start: calls")
        else:
            rules.append("start: calls | answer")
            rules.append(f"answer: {json_rule(answer_schema)}")

        # A call.
        names = " | ".join(f"f{number}" for number in range(len(functions)))
        opening = tag_rule(self.opening, added_tokens)
        closing = tag_rule(self.closing, added_tokens)
        rules.append(f"call: {opening} ({names}) {closing}")
        for number, function in enumerate(functions):
            rules += self.call_rules(number, function, added_tokens)
        return "\n".join(rules)


@dataclass(frozen=True)
class JsonCalls(CallFormat):
    """Calls that are JSON objects with a name and arguments.

    Attributes:
        key: the object's key of the arguments.
        blank: white space between a tag and the object.
    """

    key: str
    blank: str = ""

    def may_begin(self, body: str) -> bool:
        return body[:1] in ("", "{")

    def read(
        self, body: str, parameters: Mapping[str, Any], is_last: bool
    ) -> tuple[ToolCall | None, int]:
        try:
            value, num_chars = _decode_json(body)
        except (RecursionError, ValueError):
            if is_last:
                raise NotACallError from None
            return None, 0
        if not isinstance(value, dict):
            raise NotACallError
        name = value.get("name")
        arguments = value.get(self.key, value.get("arguments"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NotACallError
        return ToolCall(name, arguments), num_chars

    def call_rules(
        self, number: int, function: dict[str, Any], added_tokens: Mapping[str, int]
    ) -> list[str]:
        # In the pieces of which JSON consists, else it could not be told from another object that
        # follows "{".
        head = (
            self.blank + "{",
            '"name"',
            ": ",
            quoted(function["name"]),
            ", ",
            quoted(self.key),
            ": ",
        )
        quoted_head = " ".join(quoted(piece) for piece in head)
        end = quoted("}" + self.blank)
        parameters = function["parameters"] or {"properties": {}}
        return [
            f"f{number}: {quoted_head} a{number} {end}",
            f"a{number}: {json_rule({**parameters, 'type': 'object'})}",
        ]


@dataclass(frozen=True)
class TaggedCalls(CallFormat):
    """Calls in which every argument has tags of its own, and its value is text.

    A string is written as it is, and what is not a string as JSON. A function's schema tells which:
    a value that may be a string, and cannot be read as JSON, is one.

    Attributes:
        head: what is before and behind a function's name.
        name_tags: what is before and behind an argument's name.
        value_tags: what is before and behind its value.
        tail: what is behind all arguments.
        gap: white space behind an argument.
    """

    head: tuple[str, str]
    name_tags: tuple[str, str]
    value_tags: tuple[str, str]
    tail: str = ""
    gap: str = "\n"

    @property
    def tags(self) -> tuple[str, ...]:
        pieces = (*self.head, *self.name_tags, *self.value_tags, self.tail)
        inner = [tag for piece in pieces for tag in re.findall(r"</?\w+>", piece)]
        return (self.opening, self.closing, *inner)

    def may_begin(self, body: str) -> bool:
        start = self.head[0].lstrip()
        return body.startswith(start) or start.startswith(body)

    def read(
        self, body: str, parameters: Mapping[str, Any], is_last: bool
    ) -> tuple[ToolCall | None, int]:
        # A value may have the text of the closing tag: the call ends with the first one behind
        # which no value is open.
        end = body.find(self.closing)
        while end >= 0:
            call = self._parsed(body[:end], parameters)
            if call is not None:
                return call, end
            end = body.find(self.closing, end + 1)
        if not is_last:
            return None, 0
        call = self._parsed(body, parameters)
        if call is None:
            raise NotACallError
        return call, len(body)

    def _parsed(self, inside: str, parameters: Mapping[str, Any]) -> ToolCall | None:
        """Return the call between two tags; None: a value in it is still open.

        Raises:
            NotACallError: it is not a call.
        """
        text = _Scanner(inside)
        text.require(self.head[0].strip())
        if self.head[1].strip():
            name = text.until(self.head[1].strip())
        else:
            name = text.word()
        if not name:
            raise NotACallError
        arguments: dict[str, Any] = {}
        while text.takes(self.name_tags[0]):
            key = text.until(self.name_tags[1])
            if key is None:
                return None
            if self.value_tags[0].strip():
                text.require(self.value_tags[0].strip())
            value = text.until(self.value_tags[1].strip())
            if value is None:
                return None
            arguments[key.strip()] = _value_of(
                self._bare(value), parameters.get(name.strip()), key.strip()
            )
        text.require(self.tail.strip())
        text.require_end()
        return ToolCall(name.strip(), arguments)

    def _bare(self, text: str) -> str:
        """Return a value without the line breaks that its tags bring along."""
        opening, closing = self.value_tags
        text = text.removeprefix(opening[len(opening.rstrip()) :])
        return text.removesuffix(closing[: len(closing) - len(closing.lstrip())])

    def call_rules(
        self, number: int, function: dict[str, Any], added_tokens: Mapping[str, int]
    ) -> list[str]:
        parameters = function["parameters"] or {}
        properties = parameters.get("properties") or {}
        if "properties" not in parameters and parameters.keys() & _COMPOSED:
            raise InvalidRequestError(
                f"the parameters of {function['name']} are composed of other schemas: this model "
                "writes each argument by itself, so that they need properties"
            )

        required = parameters.get("required") or ()
        definitions = {}
        for key in ("$defs", "definitions"):
            if key in parameters:
                definitions[key] = parameters[key]

        arguments = []
        value_rules = []
        for place, (key, schema) in enumerate(properties.items()):
            value = f"v{number}_{place}"
            before = f"{self.name_tags[0]}{key}{self.name_tags[1]}{self.value_tags[0]}"
            argument = f"{_literal(before, added_tokens)} {value}"
            arguments.append(argument if key in required else f"({argument})?")
            value_rules += self._value_rules(value, schema, definitions, added_tokens)
        head = _literal(self.head[0] + function["name"] + self.head[1], added_tokens)
        tail = _literal(self.tail, added_tokens)
        return [f"f{number}: {head} {' '.join(arguments)} {tail}", *value_rules]

    def _value_rules(
        self,
        name: str,
        schema: Any,
        definitions: dict[str, Any],
        added_tokens: Mapping[str, int],
    ) -> list[str]:
        """Return the rules for an argument's value and what is behind it.

        Args:
            name: the first rule's, with which the others' begin.
            schema: the value's.
            definitions: the schemas to which it may refer.
            added_tokens: as in :meth:`call_rules`.
        """
        behind = self.value_tags[1] + self.gap

        # Any text, up to the tag that ends it.
        if _is_free_text(schema):
            closing = self.value_tags[1].strip()
            lead, _, rest = behind.partition(closing)
            quoted_rest = _literal(rest, added_tokens)
            if closing in added_tokens:
                return [f"{name}: {_ANY_TEXT} {tag_rule(closing, added_tokens)} {quoted_rest}"]
            return [
                f"{name}: {name}t {quoted_rest}",
                f"{name}t[suffix={quoted(lead + closing)}]: {_ANY_TEXT}",
            ]

        # One of some texts.
        quoted_behind = _literal(behind, added_tokens)
        texts = _texts_of(schema)
        if texts is not None:
            choices = " | ".join(quoted(text) for text in texts)
            return [f"{name}: ({choices}) {quoted_behind}"]

        # JSON.
        described = {**schema, **definitions} if isinstance(schema, dict) else schema
        return [
            f"{name}j: {json_rule(described)}",
            f"{name}: {name}j {quoted_behind}",
        ]


def _literal(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return text in a grammar, with tokens where its tags have some."""
    pieces = []
    for piece in re.split(r"(</?\w+>)", text):
        if piece:
            pieces.append(tag_rule(piece, added_tokens))
    return " ".join(pieces)


class _Scanner:
    """Reads a text piece by piece; white space before a piece does not count."""

    def __init__(self, text: str):
        self._text = text
        self._place = 0

    def takes(self, piece: str) -> bool:
        """Return whether a piece follows, and go behind it."""
        place = self._place
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        if not self._text.startswith(piece, place):
            return False
        self._place = place + len(piece)
        return True

    def require(self, piece: str) -> None:
        """Go behind a piece that follows; NotACallError: another one does."""
        if not self.takes(piece):
            raise NotACallError

    def require_end(self) -> None:
        """Raise NotACallError if more than white space follows."""
        if self._text[self._place :].strip():
            raise NotACallError

    def until(self, piece: str) -> str | None:
        """Return the text up to a piece, and go behind that; None: there is none."""
        end = self._text.find(piece, self._place)
        if end < 0:
            return None
        start = self._place
        self._place = end + len(piece)
        return self._text[start:end]

    def word(self) -> str:
        """Return the text up to white space or a tag."""
        word = re.compile(r"\s*([^\s<]*)").match(self._text, self._place)
        assert word is not None, "it may be empty"
        self._place = word.end()
        return word[1]


def _types_of(schema: Any) -> set[str]:
    """Return the types of JSON that a schema names; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    for key in ("anyOf", "oneOf"):
        for other in schema.get(key, ()):
            types |= _types_of(other)
    return types


def _is_text(types: set[str]) -> bool:
    """Return whether values of these types are strings, or null."""
    return "string" in types and types <= {"string", "null"}


def _is_free_text(schema: Any) -> bool:
    """Return whether a value is any string, or null."""
    return _is_text(_types_of(schema)) and not schema.keys() & _LISTED


def _texts_of(schema: Any) -> list[str] | None:
    """Return the strings of which a value is one; None: there are others, or none are listed."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None or not all(isinstance(value, str) for value in values):
        return None
    return values


def _value_of(text: str, parameters: Any, key: str) -> Any:
    """Return the value that an argument's text stands for.

    Args:
        parameters: the schema of the function's parameters.
    """
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = (properties or {}).get(key)
    types = _types_of(schema)
    is_null = text == "null" and "null" in types
    if (_is_text(types) and not is_null) or _texts_of(schema) is not None:
        return text
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


HERMES = JsonCalls("<tool_call>", "</tool_call>", "\n", "arguments", "\n")
LLAMA = JsonCalls("", "", "; ", "parameters")
GLM = TaggedCalls(
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    head=("", "\n"),
    name_tags=("<arg_key>", "</arg_key>"),
    value_tags=("\n<arg_value>", "</arg_value>"),
)
# Of GLM-4.7, without line breaks.
GLM_SHORT = replace(
    GLM,
    separator="",
    head=("", ""),
    value_tags=("<arg_value>", "</arg_value>"),
    gap="",
)
QWEN3_CODER = TaggedCalls(
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    head=("\n<function=", ">\n"),
    name_tags=("<parameter=", ">"),
    value_tags=("\n", "\n</parameter>"),
    tail="</function>\n",
)


# A call as a template explains it, with the braces as Qwen2.5 writes them, too.
_EXPLAINED_CALL = re.compile(r"<tool_call>\s*(\{+.*?\}+)\s*</tool_call>", re.DOTALL)
_NAME_KEY = re.compile(r"""["']name["']\s*:""")
_ARGUMENTS_KEY = re.compile(r"""["']arguments["']\s*:""")
_EXPLAINED_GLM = re.compile(
    r"<tool_call>\{?[\w-]+\}?(\s*)<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>", re.DOTALL
)
_EXPLAINED_CODER = re.compile(
    r"<tool_call>\s*<function=[^>]+>\s*<parameter=[^>]+>.*?</parameter>.*?</function>", re.DOTALL
)
# These stand inside the same tags in forms that are not JSON.
_INSIDE_OTHER_TAGS = ("<function=", "<arg_key>")
_LLAMA_CALL = '{"name": function name, "parameters":'


def call_format(instructions: str | None) -> CallFormat | None:
    """Return the format of calls that a prompt tells a model to use.

    The tags alone do not tell: several formats share them.

    Args:
        instructions: from :func:`apbv.input.prompts.rendering.tool_instructions`.

    Returns:
        The format; None if the prompt tells of none, or of another one.
    """
    if instructions is None:
        return None
    explained = _EXPLAINED_GLM.search(instructions)
    if explained is not None:
        return GLM if explained[1] else GLM_SHORT
    if _EXPLAINED_CODER.search(instructions):
        return QWEN3_CODER
    if any(tag in instructions for tag in _INSIDE_OTHER_TAGS):
        return None
    for explained_call in _EXPLAINED_CALL.findall(instructions):
        if _NAME_KEY.search(explained_call) and _ARGUMENTS_KEY.search(explained_call):
            return HERMES
    return LLAMA if _LLAMA_CALL in instructions else None
