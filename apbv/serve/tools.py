"""Tool calls as models write them: parsed from the text of an answer, or required by a grammar."""

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..decode.text import overlap
from ..grammar import json_rule, quoted
from .thoughts import CLOSING_TAGS

_decode_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls, each of which is a JSON object with a name and arguments.

    Attributes:
        key: the object's key of the arguments.
        opening, closing: tags around each call; if empty, an answer begins with its calls.
        blank: what the model writes between a tag and the object.
        separator: what the model writes between two calls.
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
        more = "" if is_single else f"({quoted(self.separator)} call)*"
        tags = [
            tag if tag in added_tokens else quoted(tag)
            for tag in (self.opening, self.closing)
            if tag
        ]
        first, last = tags or ("", "")
        names = " | ".join(f"f{number}" for number in range(len(functions)))
        rules = [
            f"calls: call {more}",
            "start: calls" if answer_schema is None else "start: calls | answer",
        ]
        rules += [] if answer_schema is None else [f"answer: {json_rule(answer_schema)}"]
        rules += [f"call: {first} ({names}) {quoted('}' + self.blank)} {last}"]
        for number, function in enumerate(functions):
            # In the pieces of which JSON consists, else it could not be told from another object
            # that follows "{".
            head = (
                f"{self.blank}{{",
                '"name"',
                ": ",
                quoted(function["name"]),
                ", ",
                quoted(self.key),
                ": ",
            )
            arguments = {**(function["parameters"] or {"properties": {}}), "type": "object"}
            rules += [
                f"f{number}: {' '.join(map(quoted, head))} a{number}",
                f"a{number}: {json_rule(arguments)}",
            ]
        return "\n".join(rules)


HERMES = CallFormat("arguments", "<tool_call>", "</tool_call>", "\n", "\n")
LLAMA = CallFormat("parameters", separator="; ")


# A call as a template explains it, with the braces as Qwen2.5 writes them, too.
_EXPLAINED_CALL = re.compile(r"<tool_call>\s*(\{+.*?\}+)\s*</tool_call>", re.DOTALL)
# What stands inside the same tags in formats that are not JSON: Qwen3-Coder's, and GLM's.
_INSIDE_OTHER_TAGS = ("<function=", "<arg_key>")


def call_format(instructions: str | None) -> CallFormat | None:
    """Return the format that a prompt tells a model to use
    (:func:`apbv.input.rendering.tool_instructions`).

    None: it tells of none, or of another one. The tags alone do not tell: several formats share
    them.
    """
    if instructions is None or any(tag in instructions for tag in _INSIDE_OTHER_TAGS):
        return None
    for explained in _EXPLAINED_CALL.findall(instructions):
        if re.search(r"""["']name["']\s*:""", explained) and re.search(
            r"""["']arguments["']\s*:""", explained
        ):
            return HERMES
    return LLAMA if '{"name": function name, "parameters":' in instructions else None


class ToolCallParser:
    """Separates the calls in a growing answer from its text.

    Anything but valid calls of the offered functions remains text, and so does a thought with all
    that is in it. White space before a call, and after the last one, is dropped.

    Args:
        max_calls: further calls are dropped; None: none are.
        names: the functions that are offered; None: any.
        thought: the tag of the thought in which the prompt ended (:data:`~.thoughts.CLOSING_TAGS`);
            None: in none.
        has_thoughts: whether the answer may have thoughts; not if a grammar lets it consist of
            calls only.

    Attributes:
        num_calls: the calls so far.
    """

    def __init__(
        self,
        form: CallFormat,
        max_calls: int | None = None,
        names: Collection[str] | None = None,
        thought: str | None = None,
        has_thoughts: bool = True,
    ):
        self.num_calls = 0
        self._max_calls = max_calls
        self._form = form
        self._between = form.separator + " \t\r\n"
        self._names = names
        self._held = ""  # text that is or may become a call
        self._space = ""  # white space before it
        self._is_fresh = True  # no text yet, or none since the latest call; thoughts do not count
        self._thoughts = CLOSING_TAGS if has_thoughts else {}
        # The tag that ends the current thought; None: there is none.
        self._thought_end = self._thoughts.get(thought)
        self._was_fresh = True  # before the current thought

    def add(self, text: str, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Process more of the answer; return the newly final text and the newly complete calls."""
        said = ""
        calls = []
        self._held += text
        # Else no call can become complete; to read a long one again with every token would take too
        # long.
        may_end = is_last or (self._form.closing or "}")[-1] in text
        while self._held:
            if self._thought_end is not None:
                said += self._think()
                if self._thought_end is not None:
                    break
                continue
            start, found = self._find()
            said += self._say(start)
            if found in self._thoughts:
                self._was_fresh = self._is_fresh
                self._thought_end = self._thoughts[found]
                said += self._say(len(found))
                continue
            call, end = self._read(may_end, is_last) if found is not None else (None, 0)
            if not end:
                break
            if call is None:
                said += self._say(end)
            else:
                if self._max_calls is None or self.num_calls < self._max_calls:
                    calls.append(call)
                    self.num_calls += 1
                self._held = self._held[end:]
                self._space = ""
                self._is_fresh = True
        if is_last:
            said += self._say(len(self._held))
            said += "" if self._is_fresh and self.num_calls else self._space
        return said, calls

    def _find(self) -> tuple[int, str | None]:
        """Return where in the held text a call or a thought begins or may begin, and the tag that
        begins it."""
        if (
            not self._form.opening
            and self._is_fresh
            and self._held.lstrip(self._between)[:1] in ("", "{")
        ):
            return 0, ""
        tags = [tag for tag in (self._form.opening, *self._thoughts) if tag]
        found = [(self._held.find(tag), tag) for tag in tags if tag in self._held]
        if found:
            return min(found)
        may_begin = max(overlap(self._held, tag) for tag in tags) if tags else 0
        return len(self._held) - may_begin, None

    def _think(self) -> str:
        """Take the current thought off the held text, as far as it is certain; return its final
        part."""
        end = self._held.find(self._thought_end)
        if end < 0:
            return self._say(len(self._held) - overlap(self._held, self._thought_end))
        said = self._say(end + len(self._thought_end))
        self._thought_end = None
        self._is_fresh = self._was_fresh
        return said

    def _say(self, end: int) -> str:
        """Take text up to ``end`` off the held text; return its final part."""
        text = self._space + self._held[:end]
        self._held = self._held[end:]
        said = text.rstrip()
        self._space = text[len(said) :]
        self._is_fresh &= not said
        return said

    def _read(self, may_end: bool, is_last: bool) -> tuple[dict[str, Any] | None, int]:
        """Read the call with which the held text begins.

        Returns:
            The call and its length; None and the length of text that begins no call; None and 0:
            undecided.
        """
        held = self._held
        opening = self._form.opening
        closing = self._form.closing
        no_call = None, len(opening) or len(held)
        body = held[len(opening) :].lstrip(self._between)
        if body[:1] not in ("", "{"):
            return no_call
        if not may_end:
            return None, 0
        try:
            value, length = _decode_json(body)
        except (RecursionError, ValueError):
            return no_call if is_last else (None, 0)
        try:
            call = self._call(value)
        except (AttributeError, ValueError):
            return no_call
        end = len(held) - len(body) + length
        rest = held[end:].lstrip()
        if not rest.startswith(closing):
            if not closing.startswith(rest):
                return no_call
            return (call, len(held)) if is_last else (None, 0)
        return call, len(held) - len(rest) + len(closing) if closing else end

    def _call(self, value: Any) -> dict[str, Any]:
        """Return a call as OpenAI's API has it; AttributeError or ValueError if the value is
        none."""
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
        "".join(function.values()).encode()  # which escaped halves of a character cannot be
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
