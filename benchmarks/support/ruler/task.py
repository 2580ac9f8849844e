"""A text task, whose context is filled up to a number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from apbv.errors import InvalidRequestError

from ..arguments import read_toml

# By kind of task.
TEXTS = read_toml(Path(__file__).with_name("texts.toml"))
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
            InvalidRequestError: not even the fewest fit.
        """
        # The largest number known to fit, and its tokens.
        low = fewest
        low_tokens = self.count(make(fewest))
        if low_tokens > self.tokens:
            raise InvalidRequestError(
                f"{what} does not fit into {self.tokens} tokens: it needs {low_tokens} at least"
            )
        # The smallest number that may not be, and its tokens where it was tried.
        high = most + 1
        high_tokens = None
        turn = 0
        while high - low > 1:
            # Step to where the budget would be full if all units between had the same length.
            if high_tokens is not None:
                per_unit = (high_tokens - low_tokens) / (high - low)
            step = int((self.tokens - low_tokens) / max(per_unit, 1e-9))
            if high_tokens is not None and turn % 3 == 2:
                # Halve now and then: lengths may be very different.
                step = (high - low) // 2
            number = low + min(max(step, 1), high - low - 1)
            num_tokens = self.count(make(number))
            if num_tokens <= self.tokens:
                low = number
                low_tokens = num_tokens
            else:
                high = number
                high_tokens = num_tokens
            turn += 1
        return low


def pad(text: Callable[[str], str], words: Sequence[str], budget: Budget) -> str:
    """Return a text with as many of some words as fit, as a sentence that is cut short.

    Args:
        text: returns the text with a sentence at its end; "" for none.
        words: of the whole sentence.
    """
    tokens_left = budget.tokens - budget.count(text(""))
    number = len(words) - 1
    # The sentence alone is soon counted. Together with the text it may still have more tokens.
    while number > 0 and budget.count(f" {_cut_short(words, number)}") > tokens_left:
        number -= 1
    while number > 0 and budget.count(text(_cut_short(words, number))) > budget.tokens:
        number -= 1
    if number <= 0:
        return text("")
    return text(_cut_short(words, number))


def _cut_short(words: Sequence[str], number: int) -> str:
    return " ".join(words[:number]) + "."


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
    result = list(sentences)
    # From the last on, so that earlier places stay what they are.
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        result.insert(place, needle)
    return result
