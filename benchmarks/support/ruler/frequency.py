"""Makes RULER's two tasks of finding the words that are most frequent."""

import math
import string
from random import Random

from .task import TEXTS, Budget, Task, distinct
from .words import ADJECTIVES, NOUNS, draw_words

_COMMON = TEXTS["common_words"]
_CODED = TEXTS["coded_words"]
COMMON = 10  # words that are asked for
LONG = 4096  # tokens, from which on words are repeated more often
# How often the common words, and the others, appear.
REPEATS = (30, 3)
SHORT_REPEATS = (6, 1)
EXAMPLE_REPEATS = (3, 1)

CODED, LETTERS = 3, 6  # words that are asked for, and letters of a word
FEWEST_CODED = 64  # enough that the fifth word appears less often than the fourth


def make_common_words(rng: Random, budget: Budget) -> Task:
    """Make a task of a list of words, of which ten appear far more often than the others; RULER's
    "cwe".

    Its context, with a short example before, fills a budget.

    Raises:
        ValueError: not even the common words fit.
    """
    often, seldom = REPEATS if budget.tokens >= LONG else SHORT_REPEATS
    most = max(1, budget.tokens // (3 * seldom))  # a number and a word have three tokens or more
    single = [*ADJECTIVES, *NOUNS]
    number = 20 + COMMON + most
    words = rng.sample(single, number) if number <= len(single) else draw_words(rng, number)
    example = words[:20]
    words = words[20:]
    shown = _listed(Random(rng.getrandbits(64)), example, *EXAMPLE_REPEATS)
    solved = (
        f"{shown}\n{_COMMON['question']}\n{_COMMON['answer_start']} {_numbered(example[:COMMON])}"
    )
    seed = rng.getrandbits(64)

    def text(number: int) -> str:
        return f"{solved}\n\n{_listed(Random(seed), words[: COMMON + number], often, seldom)}"

    per_unit = seldom * budget.count(" 100. " + words[0])
    context = text(budget.fill(text, per_unit, "the list", fewest=1, most=most))
    return Task(
        context,
        _COMMON["question"],
        tuple(words[:COMMON]),
        _COMMON["answer_start"],
        max_new_tokens=120,
    )


def _listed(rng: Random, words: list[str], often: int, seldom: int) -> str:
    listed = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(listed)
    return f"{_COMMON['instruction']}\n{_numbered(listed)}"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def make_frequent_words(rng: Random, budget: Budget) -> Task:
    """Make a task of coded words, drawn by a zeta distribution, whose first place is taken by dots;
    RULER's "fwe".

    Its context fills a budget.

    Raises:
        ValueError: the text would be too short to tell the words' frequencies apart.
    """
    vocabulary = [
        "...",
        *distinct(rng, max(CODED + 1, budget.tokens // 50), string.ascii_lowercase, LETTERS),
    ]
    seed = rng.getrandbits(64)

    def text(number: int) -> str:
        # With the exponent 2, whose zeta function is pi^2 / 6.
        counts = [int(number * 6 / math.pi**2 / rank**2) for rank in range(1, len(vocabulary) + 1)]
        words = [word for word, often in zip(vocabulary, counts, strict=True) for _ in range(often)]
        Random(seed).shuffle(words)
        return f"{_CODED['instruction']} {' '.join(words)}"

    per_unit = budget.count(" " + " ".join(vocabulary[1:4])) / 4
    context = text(budget.fill(text, per_unit, "the coded text", fewest=FEWEST_CODED))
    answers = tuple(vocabulary[1 : 1 + CODED])
    return Task(context, _CODED["question"], answers, _CODED["answer_start"], max_new_tokens=50)
