"""Tool calls as models write them: parsed from the text of an answer, or required by a grammar."""

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...decode.text import overlap
from ...grammar.grammars import json_rule, quoted
from .thoughts import CLOSING_TAGS

_decode_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls, each of which is a JSON object with a name and arguments.

    Attributes:
        key: the object's key of the arguments.
        opening, closing: tags around each call; if empty, an answer begins with its calls.
        blank: white space between a tag and the object.
        separator: text between two calls.
    """

    key: str
    opening: str = ""
    closing: str = ""
    blank: str = ""
    separator: str = "\n"

    def grammar(
        self,
        functions: Sequence[dict[str, Any]],
        added_tokens: Collection[str],
        is_single: bool,
        answer_schema: Any = None,
    ) -> str:
        """Return a grammar (:attr:`apbv.SamplingParams.grammar`) of answers that call functions.

        Args:
            functions: their names and parameters, as in OpenAI's API.
            added_tokens: texts that have a token of their own; a grammar does not quote these.
            is_single: whether there is one call, and not one or more.
            answer_schema: the JSON schema of answers without a call; None: there are none.
        """

        def tag_rule(tag: str) -> str:
            return tag if not tag or tag in added_tokens else quoted(tag)

        # The answer: calls, or text that follows its schema.
        further_calls = "" if is_single else f"({quoted(self.separator)} call)*"
        rules = [f"calls: call {further_calls}"]
        if answer_schema is None:
            rules.append("start: calls")
        else:
            rules.append("start: calls | answer")
            rules.append(f"answer: {json_rule(answer_schema)}")

        # A call: a function's head and arguments, and the end of the object.
        names = " | ".join(f"f{number}" for number in range(len(functions)))
        end = quoted("}" + self.blank)
        rules.append(f"call: {tag_rule(self.opening)} ({names}) {end} {tag_rule(self.closing)}")
        for number, function in enumerate(functions):
            # In the pieces of which JSON consists, else it could not be told from another object
            # that follows "{".
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
            parameters = function["parameters"] or {"properties": {}}
            rules.append(f"f{number}: {quoted_head} a{number}")
            rules.append(f"a{number}: {json_rule({**parameters, 'type': 'object'})}")
        return "\n".join(rules)


HERMES = CallFormat("arguments", "<tool_call>", "</tool_call>", "\n", "\n")
LLAMA = CallFormat("parameters", separator="; ")


# A call as a template explains it, with the braces as Qwen2.5 writes them, too.
_EXPLAINED_CALL = re.compile(r"<tool_call>\s*(\{+.*?\}+)\s*</tool_call>", re.DOTALL)
_NAME_KEY = re.compile(r"""["']name["']\s*:""")
_ARGUMENTS_KEY = re.compile(r"""["']arguments["']\s*:""")
# These stand inside the same tags in formats that are not JSON: Qwen3-Coder's, and GLM's.
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
    if instructions is None or any(tag in instructions for tag in _INSIDE_OTHER_TAGS):
        return None
    for explained_call in _EXPLAINED_CALL.findall(instructions):
        if _NAME_KEY.search(explained_call) and _ARGUMENTS_KEY.search(explained_call):
            return HERMES
    return LLAMA if _LLAMA_CALL in instructions else None


@dataclass(frozen=True, kw_only=True)
class CallParsing:
    """How calls are found in the answers to a request.

    Attributes:
        form: the format of calls.
        max_calls: the most calls of an answer; further ones are dropped. None: any number.
        names: the functions that are offered; None: any.
        thought: the tag of the thought in which the prompt ended (:data:`~.thoughts.CLOSING_TAGS`);
            None: it ended in none.
        has_thoughts: whether the answer may have thoughts; not if a grammar lets it consist of
            calls only.
    """

    form: CallFormat
    max_calls: int | None = None
    names: Collection[str] | None = None
    thought: str | None = None
    has_thoughts: bool = True


class ToolCallParser:
    """Separates the calls in a growing answer from its text.

    Anything but valid calls of the offered functions remains text, and so does a thought with all
    that is in it. White space before a call, and after the last one, is dropped.

    Args:
        parsing: how calls are found.

    Attributes:
        num_calls: the calls so far.
    """

    def __init__(self, parsing: CallParsing):
        self.num_calls = 0
        self._form = parsing.form
        self._max_calls = parsing.max_calls
        self._names = parsing.names
        self._between = parsing.form.separator + " \t\r\n"
        self._pending = ""  # text that is or may become a call
        self._space = ""  # white space before it
        self._is_fresh = True  # no text yet, or none since the latest call; thoughts do not count
        self._closing_tags = CLOSING_TAGS if parsing.has_thoughts else {}
        # The tag that ends the current thought; None: there is none.
        self._thought_end: str | None = None
        if parsing.thought is not None:
            self._thought_end = self._closing_tags.get(parsing.thought)
        self._was_fresh = True  # before the current thought

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Process more of the answer; return the newly final text and the newly complete calls."""
        final_text = ""
        calls = []
        self._pending += text
        # Else no call can become complete; to read a long one again with every token would take too
        # long.
        last_character = self._form.closing[-1] if self._form.closing else "}"
        may_end = is_last or last_character in text
        while self._pending:
            if self._thought_end is not None:
                final_text += self._think(self._thought_end)
                if self._thought_end is not None:
                    break
                continue
            start, tag = self._find()
            final_text += self._release(start)
            if tag is None:
                break
            if tag in self._closing_tags:
                self._was_fresh = self._is_fresh
                self._thought_end = self._closing_tags[tag]
                final_text += self._release(len(tag))
                continue
            call, length = self._read(may_end, is_last)
            if length == 0:
                break
            if call is None:
                final_text += self._release(length)
                continue
            if self._max_calls is None or self.num_calls < self._max_calls:
                calls.append(call)
                self.num_calls += 1
            self._pending = self._pending[length:]
            self._space = ""
            self._is_fresh = True
        if is_last:
            final_text += self._release(len(self._pending))
            follows_call = self._is_fresh and self.num_calls > 0
            if not follows_call:
                final_text += self._space
        return final_text, calls

    def _find(self) -> tuple[int, str | None]:
        """Return where in the pending text a call or a thought begins, and the tag that begins it.

        The tag is empty if calls have none, and None if a tag only may begin there.
        """
        text = self._pending
        if not self._form.opening and self._is_fresh:
            first_character = text.lstrip(self._between)[:1]
            if first_character in ("", "{"):
                return 0, ""
        tags = list(self._closing_tags)
        if self._form.opening:
            tags.append(self._form.opening)
        beginnings = [(text.find(tag), tag) for tag in tags if tag in text]
        if beginnings:
            return min(beginnings)
        num_matching = max((overlap(text, tag) for tag in tags), default=0)
        return len(text) - num_matching, None

    def _think(self, closing_tag: str) -> str:
        """Take the current thought off the pending text, as far as it is certain, and return it."""
        end = self._pending.find(closing_tag)
        if end < 0:
            num_matching = overlap(self._pending, closing_tag)
            return self._release(len(self._pending) - num_matching)
        final_text = self._release(end + len(closing_tag))
        self._thought_end = None
        self._is_fresh = self._was_fresh
        return final_text

    def _release(self, end: int) -> str:
        """Take text up to ``end`` off the pending text; return it, up to white space at its end."""
        text = self._space + self._pending[:end]
        self._pending = self._pending[end:]
        final_text = text.rstrip()
        self._space = text[len(final_text) :]
        if final_text:
            self._is_fresh = False
        return final_text

    def _read(self, may_end: bool, is_last: bool) -> tuple[dict[str, Any] | None, int]:
        """Read the call with which the pending text begins.

        Returns:
            The call and its length; None and the length of text that begins no call; None and 0:
            undecided.
        """
        text = self._pending
        opening = self._form.opening
        closing = self._form.closing
        undecided = (None, 0)
        no_call = (None, len(opening) or len(text))

        # The object.
        body = text[len(opening) :].lstrip(self._between)
        if body[:1] not in ("", "{"):
            return no_call
        if not may_end:
            return undecided
        try:
            value, num_chars = _decode_json(body)
        except (RecursionError, ValueError):
            return no_call if is_last else undecided
        try:
            call = self._call(value)
        except (AttributeError, ValueError):
            return no_call
        end = len(text) - len(body) + num_chars
        if not closing:
            return call, end

        # The tag behind it.
        rest = text[end:].lstrip()
        if rest.startswith(closing):
            return call, len(text) - len(rest) + len(closing)
        if not closing.startswith(rest):
            return no_call
        return (call, len(text)) if is_last else undecided

    def _call(self, value: Any) -> dict[str, Any]:
        """Return a call as OpenAI's API has it.

        Raises:
            AttributeError, ValueError: the value is not a call.
        """
        name = value.get("name")
        arguments = value.get(self._form.key, value.get("arguments"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError
        if self._names is not None and name not in self._names:
            raise ValueError
        function = {
            "name": name,
            "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False),
        }
        "".join(function.values()).encode()  # ValueError: it has escaped halves of a character
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
