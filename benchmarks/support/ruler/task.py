"""A text task, whose context is filled up to a number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from ..arguments import read_toml

TEXTS = read_toml(Path(__file__).with_name("texts.toml"))  # by kind of task
Count = Callable[[str], int]


@dataclass(frozen=True)
class Task:
    """A long text and a question about it.

    Attributes:
        context: the instruction and the text.
        question: the question.
        answers: what a right answer contains, all of it.
        answer_start: the text that the model's answer continues.
        max_new_tokens: of the longest answer.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    answer_start: str
    max_new_tokens: int


@dataclass(frozen=True)
class Budget:
    """The number of tokens that a context may have.

    Args:
        tokens: the largest length of a context.
        count: counts the tokens of a text.
    """

    tokens: int
    count: Count

    def fill(
        self,
        make: Callable[[int], str],
        per_unit: float,
        what: str,
        fewest: int = 0,
        most: int = 2**62,
    ) -> int:
        """Return the largest number of units whose text fits.

        Args:
            make: returns the text for a number of units; more units make it longer.
            per_unit: about how many tokens a unit takes, from which the search begins.
            what: what does not fit, for the error.
            fewest, most: limits of the number.

        Raises:
            ValueError: not even the fewest fit.
        """
        low, below = fewest, self.count(make(fewest))  # fits
        if below > self.tokens:
            raise ValueError(
                f"{what} does not fit into {self.tokens} tokens: it needs {below} at least"
            )
        high, above = most + 1, None  # does not fit, and has this many tokens
        for turn in count():
            if high - low <= 1:
                return low
            if above is not None:
                per_unit = (above - below) / (high - low)
            step = int((self.tokens - below) / max(per_unit, 1e-9))
            if above is not None and turn % 3 == 2:  # units of very different lengths
                step = (high - low) // 2
            tried = low + min(max(step, 1), high - low - 1)
            num_tokens = self.count(make(tried))
            if num_tokens <= self.tokens:
                low = tried
                below = num_tokens
            else:
                high = tried
                above = num_tokens


def pad(text: Callable[[str], str], words: Sequence[str], budget: Budget) -> str:
    """Return the text with as many of these words as fit, as a sentence that is cut short."""
    left = budget.tokens - budget.count(text(""))
    number = len(words) - 1
    while number > 0 and budget.count(f" {' '.join(words[:number])}.") > left:
        number -= 1
    while number > 0 and budget.count(text(f"{' '.join(words[:number])}.")) > budget.tokens:
        number -= 1
    return text(f"{' '.join(words[:number])}." if number > 0 else "")


def distinct(rng: Random, number: int, letters: str, length: int) -> list[str]:
    """Draw different words with a number of these letters."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(rng.choices(letters, k=length))] = None
    return list(words)


def draw_places(rng: Random, number: int, among: int) -> list[int]:
    """Draw distinct places among sentences and after the last, ascending, all equally likely."""
    return sorted(rng.sample(range(among + 1), number))


def inserted(sentences: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return sentences with needles before those numbered ``places``, which ascend."""
    found = list(sentences)
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        found.insert(place, needle)
    return found
