"""Text of a growing answer: whole characters only, and no part of a stop string."""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class AnswerText:
    """Text of an answer, up to the point that no further token can change.

    Args:
        decode: token ids to text, without special tokens.
        stop: strings that end the answer; the one that is complete first counts, of several the
            longest. They are not part of it.
        stop_token_ids: tokens that end the answer, and are not part of its text.
        min_tokens: a stop string that is complete within the first ``min_tokens`` tokens is
            ignored.

    Attributes:
        stopped: whether a stop string or a stop token has ended the answer.
        may_stop: whether there are any.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self.stopped, self.may_stop = False, bool(stop or stop_token_ids)
        self._decode = decode
        self._stop = stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        # Tokens before _read are text already; those from _context on are decoded again with every
        # new one, as how a token reads may depend on the one before it.
        self._context = self._read = 0
        self._held = ""  # text that is or may become part of a stop string

    def update(self, tokens: Sequence[int]) -> str:
        """Process all tokens so far; returns the newly final text."""
        certain = ""
        for token in tokens[len(self._tokens) :]:
            if self.stopped:
                break
            if token in self._stop_token_ids:
                certain += self._rest()
                self.stopped = True
                break
            self._tokens.append(token)
            certain += self._until_stop(self._next_characters())
        return certain

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest, after the last token.

        Trailing bytes of an incomplete character are dropped.
        """
        certain = self.update(tokens)
        return certain if self.stopped else certain + self._rest()

    def _rest(self) -> str:
        certain = self._until_stop(self._undecided().rstrip(_INCOMPLETE))
        rest = self._held
        self._held = ""
        return certain + rest

    def _until_stop(self, piece: str) -> str:
        """Add some text, and return the newly final part."""
        before = len(self._held)
        self._held = self._held + piece
        ends = []
        if len(self._tokens) > self._min_tokens:
            # What was complete before this piece came before it could end anything.
            starts = [
                (string, self._held.find(string, max(before - len(string) + 1, 0)))
                for string in self._stop
            ]
            ends = [(at + len(string), at) for string, at in starts if at >= 0]
        if ends:
            self.stopped = True
            certain = self._held[: min(ends)[1]]
            self._held = ""
            return certain
        keep = max((overlap(self._held, string) for string in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def _undecided(self) -> str:
        """Return the text that the tokens which are not text yet add to those before them."""
        before = self._decode(self._tokens[self._context : self._read])
        return self._decode(self._tokens[self._context :])[len(before) :]

    def _next_characters(self) -> str:
        new = self._undecided()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return new


def overlap(text: str, string: str) -> int:
    """Return the length of the longest proper beginning of ``string`` that ends ``text``."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string.startswith(text[-n:])), 0)


def text_showing(
    decode: Callable[..., str], tokens: Sequence[int], shown_token_ids: Collection[int]
) -> str:
    """Return the text of tokens, with only those special ones that are part of it.

    Args:
        decode: a tokenizer's, of token ids.
        shown_token_ids: the special tokens to show.
    """
    is_shown = [token in shown_token_ids for token in tokens]
    text = ""
    for shown, run in groupby(zip(tokens, is_shown, strict=True), key=lambda pair: pair[1]):
        text += decode([token for token, _ in run], skip_special_tokens=not shown)
    return text
