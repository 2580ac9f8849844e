"""Thoughts: what a model writes for itself before or inside an answer, between two tags.

The thought with which an answer begins is separated from it: replies have it as reasoning. Whether
the model thinks is seen by the end of the prompt, in which a chat template may have opened a
thought, and by the answer's first text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config import REASONING_TAGS
from ..grammar.grammars import quoted, tag_rule
from .text import overlap, text_showing

# By the tag that begins a thought, the one that ends it: most models', Claude's and its imitators',
# Mistral's, Seed's, and Kimi's.
CLOSING_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "◁think▷": "◁/think▷",
}
TAGS = (*CLOSING_TAGS.keys(), *CLOSING_TAGS.values())
# With these an answer begins in a thought, also where the chat template has not opened it.
_BEGIN_IN_THOUGHT = ("deepseek_r1",)


@dataclass(frozen=True)
class ThoughtParsing:
    """How the thought is found with which an answer to a prompt may begin.

    Attributes:
        openings: the tags that may begin it.
        opened: the tag of the thought in which the answer begins; None: it begins in none.
    """

    openings: Collection[str]
    opened: str | None = None

    @classmethod
    def of_prompt(
        cls, parser: str, prompt: str, continued: Sequence[str] = ()
    ) -> "ThoughtParsing | None":
        """Return how the thought of an answer is found; None: it is not separated, or has none.

        Args:
            parser: ``"auto"``, ``"off"``, or a name of :data:`apbv.config.REASONING_TAGS`.
            prompt, continued: as in :func:`opened_thought`.
        """
        if parser == "off":
            return None
        opened = opened_thought(prompt, continued)
        if parser != "auto" and opened != REASONING_TAGS[parser]:
            opened = None
        if continued and opened is None:
            return None  # the answer goes on behind its thought
        if parser == "auto":
            return cls(openings=tuple(CLOSING_TAGS), opened=opened)
        opening = REASONING_TAGS[parser]
        is_closed = prompt.rstrip().endswith(CLOSING_TAGS[opening])
        if parser in _BEGIN_IN_THOUGHT and not is_closed:
            opened = opening
        return cls(openings=(opening,), opened=opened)


class Separated(NamedTuple):
    """What is new of an answer.

    Attributes:
        thought: what is new of its thought.
        text: what is new of the text behind it.
    """

    thought: str
    text: str


class ThoughtParser:
    """Separates the thought with which a growing answer begins from the text behind it.

    White space around the tags is dropped. A thought that the answer's end cuts off is one.

    Args:
        parsing: how the thought is found.

    Attributes:
        has_thought: whether the answer has begun one.
    """

    def __init__(self, parsing: ThoughtParsing):
        self.has_thought = False
        self._openings = parsing.openings
        self._closing: str | None = None  # of the thought; None: not in one
        self._is_behind = False  # whether the thought is over, or the answer has none
        self._pending = ""  # text of which it is not clear yet what it is
        self._drops_space = False  # whether white space is dropped until there is other text
        if parsing.opened is not None:
            # Some models repeat the tag.
            self._openings = (parsing.opened,)
            self._begin(parsing.opened)

    def add(self, text: str, is_last: bool = False) -> Separated:
        """Process more of the answer, and return the parts that are certain now."""
        self._pending += text
        thought = ""
        if not self._is_behind and self._closing is None:
            self._look_for_opening(is_last)
        if self._closing is not None:
            thought = self._think(self._closing, is_last)
        if not self._is_behind:
            return Separated(thought, "")
        answer = self._pending
        self._pending = ""
        if self._drops_space:
            answer = answer.lstrip()
            self._drops_space = not answer
        return Separated(thought, answer)

    def _begin(self, opening: str) -> None:
        self._closing = CLOSING_TAGS[opening]
        self.has_thought = True
        self._drops_space = True

    def _look_for_opening(self, is_last: bool) -> None:
        """Begin the thought, or go behind it, once the answer's first text shows which."""
        first_text = self._pending.lstrip()
        for opening in self._openings:
            if first_text.startswith(opening):
                self._pending = first_text.removeprefix(opening)
                self._begin(opening)
                return
        may_follow = any(opening.startswith(first_text) for opening in self._openings)
        if is_last or not may_follow:
            self._is_behind = True

    def _think(self, closing: str, is_last: bool) -> str:
        """Take the thought off the pending text, as far as it is certain, and return it."""
        if self._drops_space:
            self._pending = self._pending.lstrip()
            for opening in self._openings:
                if self._pending.startswith(opening):
                    self._pending = self._pending.removeprefix(opening).lstrip()
                elif opening.startswith(self._pending) and not is_last:
                    return ""
        end = self._pending.find(closing)
        if end >= 0:
            thought = self._pending[:end].rstrip()
            self._pending = self._pending[end + len(closing) :]
            self._closing = None
            self._is_behind = True
            self._drops_space = True
            return thought
        num_certain = len(self._pending)
        if not is_last:
            num_certain -= overlap(self._pending, closing)
        # White space may be the last before the tag.
        thought = self._pending[:num_certain].rstrip()
        self._pending = "" if is_last else self._pending[len(thought) :]
        if thought:
            self._drops_space = False
        return thought


def separate(tokens: Sequence[int], tokenizer, prompt_end: Sequence[int]) -> Separated:
    """Separate the thought of a whole answer from its text.

    Args:
        tokens: the answer.
        prompt_end: the last tokens before it.
    """
    shown = token_ids_of(TAGS, tokenizer)
    end = text_showing(tokenizer.decode, prompt_end, shown)
    parsing = ThoughtParsing.of_prompt("auto", end)
    assert parsing is not None, "thoughts are looked for"
    answer = text_showing(tokenizer.decode, tokens, shown)
    return ThoughtParser(parsing).add(answer, is_last=True)


def token_ids_of(tags: Collection[str], tokenizer) -> list[int]:
    """Return the ids of those tags that are special tokens, which a decoded text leaves out."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return [special[tag] for tag in tags if tag in special]


def behind_thought(
    grammar: str, parsing: ThoughtParsing, openings: Collection[str], tokens: dict[str, int]
) -> str:
    """Return a grammar of answers that may think, and then follow another grammar.

    Args:
        grammar: in llguidance's variant of Lark; its rule ``start`` is that of the whole answer.
        parsing: how the thought is found.
        openings: the tags with which the model may begin a thought that is not opened yet.
        tokens: the ids of tags that are tokens.
    """
    rules = [_renamed_start(grammar)]
    thoughts = []
    begun = openings if parsing.opened is None else (parsing.opened,)
    for number, opening in enumerate(begun):
        closing = CLOSING_TAGS[opening]
        head = "" if parsing.opened is not None else f"{tag_rule(opening, tokens)} "
        if closing in tokens:
            rules.append(f"thought{number}: {head}/(?s:.*)/ {tag_rule(closing, tokens)} /\\s*/")
        else:
            rules.append(f"thought{number}: {head}until{number} /\\s*/")
            rules.append(f"until{number}[suffix={quoted(closing)}]: /(?s:.*)/")
        thoughts.append(f"thought{number} answer_behind")
    if parsing.opened is None:
        thoughts.append("answer_behind")
    rules.append(f"start: {' | '.join(thoughts)}")
    return "\n".join(rules)


def _renamed_start(grammar: str) -> str:
    """Rename the rule ``start`` of a grammar, which no other rule mentions."""
    lines = []
    for line in grammar.split("\n"):
        is_start = line.startswith("start:")
        lines.append("answer_behind:" + line.removeprefix("start:") if is_start else line)
    return "\n".join(lines)


def opened_thought(prompt: str, continued: Sequence[str] = ()) -> str | None:
    """Return the tag of a thought in which a prompt ends; None: it ends in none.

    Args:
        prompt: the prompt as rendered. What users write in it about tags opens nothing: only its
            very end counts, where a chat template begins the answer.
        continued: the texts of the message that the answer continues, if it continues one.
    """
    end = prompt.rstrip()
    for opening in CLOSING_TAGS:
        if end.endswith(opening):
            return opening
    answer = "\n".join(continued)
    latest = max(CLOSING_TAGS, key=lambda opening: answer.rfind(opening))
    is_open = answer.rfind(latest) > answer.rfind(CLOSING_TAGS[latest])
    return latest if is_open else None
