"""Tool calls in the text of an answer, as it grows."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...decode.text import overlap
from ...decode.thoughts import CLOSING_TAGS
from .call_formats import CallFormat, NotACallError, ToolCall


@dataclass(frozen=True, kw_only=True)
class CallParsing:
    """How calls are found in the answers to a request.

    Attributes:
        form: the format of calls.
        max_calls: the most calls of an answer; further ones are dropped. None: any number.
        parameters: the schema of the parameters of every function that is offered, by its name;
            None: any function may be called.
        thought: the tag of the thought in which the prompt ended, of
            :data:`apbv.decode.thoughts.CLOSING_TAGS`; None: it ended in none.
        has_thoughts: whether the answer may have thoughts; not if a grammar lets it consist of
            calls only.
    """

    form: CallFormat
    max_calls: int | None = None
    parameters: Mapping[str, Any] | None = None
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
        self._parameters = parsing.parameters
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

        # What is between the tags.
        body = text[len(opening) :].lstrip(self._between)
        if not self._form.may_begin(body):
            return no_call
        if not may_end:
            return undecided
        try:
            called, num_chars = self._form.read(body, self._parameters or {}, is_last)
            if called is None:
                return undecided
            call = self._call(called)
        except (NotACallError, ValueError):
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

    def _call(self, called: ToolCall) -> dict[str, Any]:
        """Return a call as OpenAI's API has it.

        Raises:
            NotACallError: the function is not offered.
            ValueError: the arguments have halves of a character, or NaN.
        """
        if self._parameters is not None and called.name not in self._parameters:
            raise NotACallError
        function = {
            "name": called.name,
            "arguments": json.dumps(called.arguments, ensure_ascii=False, allow_nan=False),
        }
        "".join(function.values()).encode()  # ValueError: it has escaped halves of a character
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
