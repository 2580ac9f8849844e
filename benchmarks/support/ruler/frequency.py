"""Makes RULER's two tasks of finding the words that are most frequent."""

import math
import string
from random import Random

from .task import TEXTS, Budget, Task, distinct
from .words import ADJECTIVES, NOUNS, draw_words

_COMMON = TEXTS["common_words"]
_CODED = TEXTS["coded_words"]
COMMON = 10  # words that are asked for
EXAMPLE_WORDS = 20  # different words of the example
LONG = 4096  # tokens, from which on words are repeated more often
# How often the common words, and the others, appear.
REPEATS = (30, 3)
SHORT_REPEATS = (6, 1)
EXAMPLE_REPEATS = (3, 1)

CODED = 3  # words that are asked for
LETTERS = 6  # of a word
FEWEST_CODED = 64  # enough that the fifth word appears less often than the fourth


def make_common_words(rng: Random, budget: Budget) -> Task:
    """Make a task of a list of words, of which ten appear far more often than the others.

    It is RULER's "cwe". Its context, with a short example before, fills a budget.

    Raises:
        ValueError: not even the common words fit.
    """
    often, seldom = REPEATS if budget.tokens >= LONG else SHORT_REPEATS

    # Words of the example and of the list. A number and a word have three tokens or more.
    most = max(1, budget.tokens // (3 * seldom))
    single_words = [*ADJECTIVES, *NOUNS]
    num_words = EXAMPLE_WORDS + COMMON + most
    if num_words <= len(single_words):
        words = rng.sample(single_words, num_words)
    else:
        words = draw_words(rng, num_words)
    example_words = words[:EXAMPLE_WORDS]
    words = words[EXAMPLE_WORDS:]

    # The example, with its answer.
    question = _COMMON["question"]
    start = _COMMON["answer_start"]
    example_often, example_seldom = EXAMPLE_REPEATS
    example_rng = Random(rng.getrandbits(64))
    example_list = _listed(example_rng, example_words, example_often, example_seldom)
    example = f"{example_list}\n{question}\n{start} {_numbered(example_words[:COMMON])}"

    # The list.
    seed = rng.getrandbits(64)

    def text(num_others: int) -> str:
        chosen = words[: COMMON + num_others]
        return f"{example}\n\n{_listed(Random(seed), chosen, often, seldom)}"

    per_unit = seldom * budget.count(" 100. " + words[0])
    num_others = budget.fill(text, per_unit, "the list", fewest=1, most=most)
    answers = tuple(words[:COMMON])
    return Task(text(num_others), question, answers, start, max_new_tokens=120)


def _listed(rng: Random, words: list[str], often: int, seldom: int) -> str:
    """Return the instruction and a list of words in random order.

    Args:
        words: the common ones first.
        often: how many times each common word appears.
        seldom: how many times each other word appears.
    """
    repeated = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(repeated)
    return f"{_COMMON['instruction']}\n{_numbered(repeated)}"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def make_frequent_words(rng: Random, budget: Budget) -> Task:
    """Make a task of coded words, whose frequencies follow a zeta distribution.

    It is RULER's "fwe"; dots take the distribution's first place. Its context fills a budget.

    Raises:
        ValueError: the text would be too short to tell the words' frequencies apart.
    """
    num_coded = max(CODED + 1, budget.tokens // 50)
    coded_words = distinct(rng, num_coded, string.ascii_lowercase, LETTERS)
    vocabulary = ["...", *coded_words]
    seed = rng.getrandbits(64)

    def text(number: int) -> str:
        words = []
        for rank, word in enumerate(vocabulary, start=1):
            # With the exponent 2, whose zeta function is pi^2 / 6.
            often = int(number * 6 / math.pi**2 / rank**2)
            words += [word] * often
        Random(seed).shuffle(words)
        return f"{_CODED['instruction']} {' '.join(words)}"

    per_unit = budget.count(" " + " ".join(vocabulary[1:4])) / 4
    number = budget.fill(text, per_unit, "the coded text", fewest=FEWEST_CODED)
    answers = tuple(coded_words[:CODED])
    return Task(
        text(number), _CODED["question"], answers, _CODED["answer_start"], max_new_tokens=50
    )
