"""Counts what a JSON text consists of before it is parsed, which takes fifty times its size and
stops other threads."""

import re
from dataclasses import dataclass

from .requests import ApiError

# Bytes that are looked at without a chance for other threads, which takes less than a millisecond.
_PIECE = 2**20
# As much of a string as there is; possessive, so that nothing is remembered to come back to.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_VALUES = 2**20
_CONTAINERS = 2**15
_PER_FRAME = (
    4  # objects and lists for each frame that is sent as an image of its own: twice what it needs
)


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
        """Return limits that a request within the server's other limits stays below, unless it has
        many long prompts.

        Args:
            max_model_len: the most tokens of a prompt.
            max_frames: the most images of a request.
        """
        return cls(values=max_model_len + _VALUES, containers=_PER_FRAME * max_frames + _CONTAINERS)

    def require(self, body: bytes | bytearray) -> None:
        """Reject a JSON text that is too large to parse; what is not JSON may pass.

        Raises:
            ApiError: with status 400.
        """
        # Most texts have less than the limits even with all that their strings contain, which is
        # counted faster.
        if not self._excess(_count(body, 0, len(body))):
            return
        counted = (1, 0)
        at = 0
        while at < len(body):
            string = body.find(b'"', at, at + _PIECE)
            end = min(at + _PIECE, len(body)) if string < 0 else string
            values, containers = _count(body, at, end)
            counted = (counted[0] + values, counted[1] + containers)
            if excess := self._excess(counted):
                raise ApiError(
                    400,
                    f"the body has more than {excess}, which no request needs",
                    code="body_too_large",
                )
            at = end if string < 0 else _end_of_string(body, string + 1)

    def _excess(self, counted: tuple[int, int]) -> str:
        """Return which limit a number of values and of containers exceed; empty if none."""
        values, containers = counted
        if values > self.values:
            return f"{self.values} values"
        return f"{self.containers} objects and lists" if containers > self.containers else ""


def _count(body: bytes | bytearray, start: int, end: int) -> tuple[int, int]:
    """Count the values and the containers that begin in a part of a JSON text, as if it had no
    strings."""
    commas = containers = 0
    for at in range(start, end, _PIECE):
        stop = min(at + _PIECE, end)
        commas += body.count(b",", at, stop)
        containers += body.count(b"{", at, stop) + body.count(b"[", at, stop)
    return commas + containers, containers


def _end_of_string(body: bytes | bytearray, at: int) -> int:
    """Return the place behind the quotation mark that ends a string; the text's length if there is
    none.

    Args:
        at: the place behind the mark that begins it.
    """
    while at < len(body):
        end = _IN_STRING.match(body, at, at + _PIECE).end()
        if body[end : end + 1] == b'"':
            return end + 1
        if end == at:  # a backslash that nothing follows
            break
        at = end
    return len(body)
