"""Makes RULER's two tasks of finding the words that are most frequent."""

import math
import string
from dataclasses import dataclass
from random import Random

from .task import Budget, Task
from .words import ADJECTIVES, NOUNS, draw_words

LONG = 4096  # tokens, from which on words are repeated more often


@dataclass(frozen=True)
class CommonWords:
    """CommonWords lists words, of which ten appear far more often than the others; RULER's "cwe".

    Attributes:
        common: how many words are asked for.
        repeats, short_repeats: how often the common words, and the others, appear in long and in short lists.
    """

    common: int = 10
    repeats: tuple[int, int] = (30, 3)
    short_repeats: tuple[int, int] = (6, 1)

    def make(self, rng: Random, budget: Budget) -> Task:
        """Make a task whose context, with a short example before, fills a budget.

        Raises:
            ValueError: not even the common words fit.
        """
        is_long = budget.tokens >= LONG
        often, seldom = self.repeats if is_long else self.short_repeats
        most = max(1, budget.tokens // (3 * seldom))  # a number and a word have three tokens or more
        words = self._draw(rng, 20 + self.common + most)
        example_words, words = words[:20], words[20:]
        example, common = self._listed(Random(rng.getrandbits(64)), example_words, 3, 1)
        solved = f"{example}\n{QUESTION}\n{ANSWER_START} {_numbered(common)}"
        seed = rng.getrandbits(64)

        def text(number: int) -> str:
            listed, _ = self._listed(Random(seed), words[: self.common + number], often, seldom)
            return f"{solved}\n\n{listed}"

        per_unit = seldom * budget.count(" 100. " + words[0])
        number = budget.fill(text, per_unit, "the list", fewest=1, most=most)
        return Task(
            context=text(number),
            question=QUESTION,
            answers=tuple(words[: self.common]),
            answer_start=ANSWER_START,
            max_new_tokens=120,
        )

    def _draw(self, rng: Random, number: int) -> list[str]:
        single = [*ADJECTIVES, *NOUNS]
        return rng.sample(single, number) if number <= len(single) else draw_words(rng, number)

    def _listed(self, rng: Random, words: list[str], often: int, seldom: int) -> tuple[str, list[str]]:
        common = words[: self.common]
        listed = common * often + words[self.common :] * seldom
        rng.shuffle(listed)
        return f"{COMMON_INSTRUCTION}\n{_numbered(listed)}", common


COMMON_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
    "that appear most often."
)
QUESTION = "Question: What are the 10 most common words in the above list?"
ANSWER_START = "Answer: The top 10 words that appear most often in the list are:"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """FrequentWords draws coded words by a zeta distribution, whose first place is taken by dots; RULER's "fwe".

    Attributes:
        asked: how many words are asked for, those behind the dots.
        length: letters of a word.
    """

    asked: int = 3
    length: int = 6

    def make(self, rng: Random, budget: Budget) -> Task:
        """Make a task whose context fills a budget.

        Raises:
            ValueError: the text would be too short to tell the words' frequencies apart.
        """
        vocabulary = ["...", *self._draw(rng, max(self.asked + 1, budget.tokens // 50))]
        seed = rng.getrandbits(64)

        def text(number: int) -> str:
            # With the exponent 2, whose zeta function is pi^2 / 6.
            counts = [int(number * 6 / math.pi**2 / rank**2) for rank in range(1, len(vocabulary) + 1)]
            words = [word for word, often in zip(vocabulary, counts, strict=True) for _ in range(often)]
            Random(seed).shuffle(words)
            return f"{CODED_INSTRUCTION} {' '.join(words)}"

        per_unit = budget.count(" " + " ".join(vocabulary[1:4])) / 4
        # So many that the fifth word appears less often than the fourth.
        number = budget.fill(text, per_unit, "the coded text", fewest=FEWEST_CODED)
        return Task(
            context=text(number),
            question=CODED_QUESTION,
            answers=tuple(vocabulary[1 : 1 + self.asked]),
            answer_start=CODED_ANSWER_START,
            max_new_tokens=50,
        )

    def _draw(self, rng: Random, number: int) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < number:
            words["".join(rng.choices(string.ascii_lowercase, k=self.length))] = None
        return list(words)


FEWEST_CODED = 64
CODED_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words."
)
CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '...'. What are the three most frequently "
    "appeared words in the above coded text?"
)
CODED_ANSWER_START = "Answer: According to the coded text above, the three most frequently appeared words are:"
