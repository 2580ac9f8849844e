"""Counts a JSON text's values before it is parsed.

Parsing takes fifty times the text's size, and stops other threads.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..api_error import ApiError

# Bytes that are looked at without a chance for other threads, which takes less than a millisecond.
PIECE_BYTES = 2**20
# As much of a string as there is; possessive, so that nothing is remembered to come back to.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_VALUES = 2**20
_CONTAINERS = 2**15
# Objects and lists for each frame that is sent as an image of its own: twice the necessary number.
_PER_FRAME = 4


class _Counts(NamedTuple):
    """How many values, and how many objects and lists among them, a JSON text has."""

    values: int
    containers: int


@dataclass(frozen=True)
class JsonLimits:
    """The most that a request's JSON may consist of.

    Attributes:
        values: numbers, texts, objects, lists and so on, those inside others included.
        containers: objects and lists, of which each takes much longer to check than a number.
    """

    values: int
    containers: int

    @classmethod
    def for_requests(cls, max_model_len: int, max_frames: int) -> "JsonLimits":
        """Return limits that a request within the server's other limits stays below.

        One with many long prompts may exceed them.

        Args:
            max_model_len: the most tokens of a prompt.
            max_frames: the most images of a request.
        """
        return cls(values=max_model_len + _VALUES, containers=_PER_FRAME * max_frames + _CONTAINERS)

    def require(self, body: bytes | bytearray) -> None:
        """Reject a JSON text that is too large to parse; a text that is not JSON may pass.

        Raises:
            ApiError: with status 400.
        """
        # Most texts have less than the limits even with everything in their strings, which is
        # counted faster.
        if self._excess(_count(body, 0, len(body))) is None:
            return
        num_values = 1
        num_containers = 0
        position = 0
        while position < len(body):
            # Count up to the next string.
            quotation_mark = body.find(b'"', position, position + PIECE_BYTES)
            has_string = quotation_mark >= 0
            end = quotation_mark if has_string else min(position + PIECE_BYTES, len(body))
            counts = _count(body, position, end)
            num_values += counts.values
            num_containers += counts.containers
            excess = self._excess(_Counts(num_values, num_containers))
            if excess is not None:
                message = f"the body has more than {excess}, which no request needs"
                raise ApiError(400, message, code="body_too_large")
            # Skip the string.
            position = _end_of_string(body, quotation_mark + 1) if has_string else end

    def _excess(self, counts: _Counts) -> str | None:
        """Return the limit that a text exceeds, in words; None: it exceeds none."""
        if counts.values > self.values:
            return f"{self.values} values"
        if counts.containers > self.containers:
            return f"{self.containers} objects and lists"
        return None


def _count(body: bytes | bytearray, start: int, end: int) -> _Counts:
    """Count the values that begin in a part of a JSON text, as if it had no strings."""
    num_commas = 0
    num_containers = 0
    for piece_start in range(start, end, PIECE_BYTES):
        piece_end = min(piece_start + PIECE_BYTES, end)
        num_commas += body.count(b",", piece_start, piece_end)
        num_containers += body.count(b"{", piece_start, piece_end)
        num_containers += body.count(b"[", piece_start, piece_end)
    return _Counts(num_commas + num_containers, num_containers)


def _end_of_string(body: bytes | bytearray, start: int) -> int:
    """Return the position behind the quotation mark that ends a string.

    It is the text's length if there is none.

    Args:
        start: the position behind the mark that begins the string.
    """
    position = start
    while position < len(body):
        match = _IN_STRING.match(body, position, position + PIECE_BYTES)
        assert match is not None, "the pattern matches the empty string"
        end = match.end()
        if body[end : end + 1] == b'"':
            return end + 1
        if end == position:  # a backslash that nothing follows
            break
        position = end
    return len(body)
