"""Makes RULER's task of following a variable from one assignment to the next."""

import string
from itertools import pairwise
from random import Random

from .task import TEXTS, Budget, Task, distinct, draw_places, inserted, pad
from .words import NOISE

_TEXTS = TEXTS["chain"]
EXAMPLE_SENTENCES = 15
HOPS = 4  # variables after the first


def make_chain(rng: Random, budget: Budget) -> Task:
    """Make a task of a hidden chain: a variable gets a number, the next one its value, and so on.

    Its context, with a short example before, fills a budget.

    Raises:
        ValueError: the chain does not fit.
    """
    names = distinct(rng, 2 * (HOPS + 1), string.ascii_uppercase, 5)
    values = [str(value) for value in rng.sample(range(10_000, 100_000), 2)]
    example = names[: HOPS + 1]
    asked = names[HOPS + 1 :]
    shown = _text(Random(rng.getrandbits(64)), example, values[0], EXAMPLE_SENTENCES, "")
    questions = [_TEXTS["question"].format(value=value) for value in values]
    starts = [_TEXTS["answer_start"].format(number=HOPS + 1, value=value) for value in values]
    solved = f"{shown}\n{questions[0]}\n{starts[0]} {' '.join(example)}"
    seed = rng.getrandbits(64)

    def text(number: int, rest: str = "") -> str:
        return f"{solved}\n\n{_text(Random(seed), asked, values[1], number, rest)}"

    number = budget.fill(text, per_unit=budget.count(" " + NOISE[0]), what="the chain", fewest=HOPS)
    words = NOISE[number % len(NOISE)].removesuffix(".").split()
    return Task(
        context=pad(lambda rest: text(number, rest), words, budget),
        question=questions[1],
        answers=tuple(asked),
        answer_start=starts[1],
        max_new_tokens=30 + 6 * HOPS,
    )


def _text(rng: Random, names: list[str], value: str, number: int, rest: str) -> str:
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
    noise = [NOISE[place % len(NOISE)] for place in range(number)]
    body = inserted(noise, chain, draw_places(rng, len(chain), number))
    return f"{_TEXTS['instruction']}\n\n{' '.join([*body, rest] if rest else body)}"
