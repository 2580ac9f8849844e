"""Makes RULER's task of following a variable from one assignment to the next."""

import string
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from .task import Budget, Task, draw_places, inserted, pad
from .words import NOISE

INSTRUCTION = "Memorize and track the chain of variable assignments that is hidden in the following text."
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
ANSWER_START = (
    "Answer: According to the chain of variable assignments in the text above, {number} variables are assigned "
    "the value {value}, they are:"
)
EXAMPLE_SENTENCES = 15


@dataclass(frozen=True)
class Tracking:
    """Tracking hides a chain: a variable gets a number, the next one its value, and so on.

    Attributes:
        hops: how many variables follow the first.
    """

    hops: int = 4

    def make(self, rng: Random, budget: Budget) -> Task:
        """Make a task whose context, with a short example before, fills a budget.

        Raises:
            ValueError: the chain does not fit.
        """
        names = _draw_names(rng, 2 * (self.hops + 1))
        values = [str(value) for value in rng.sample(range(10_000, 100_000), 2)]
        example, asked = names[: self.hops + 1], names[self.hops + 1 :]
        shown = self._text(Random(rng.getrandbits(64)), example, values[0], EXAMPLE_SENTENCES, "")
        solved = "\n".join([shown, self._question(values[0]), f"{self._start(values[0])} {' '.join(example)}"])
        seed = rng.getrandbits(64)

        def text(number: int, rest: str = "") -> str:
            return f"{solved}\n\n{self._text(Random(seed), asked, values[1], number, rest)}"

        number = budget.fill(text, per_unit=budget.count(" " + NOISE[0]), what="the chain", fewest=self.hops)
        words = NOISE[number % len(NOISE)].removesuffix(".").split()
        context = pad(lambda rest: text(number, rest), words, budget)
        return Task(
            context=context,
            question=self._question(values[1]),
            answers=tuple(asked),
            answer_start=self._start(values[1]),
            max_new_tokens=30 + 6 * self.hops,
        )

    def _text(self, rng: Random, names: list[str], value: str, number: int, rest: str) -> str:
        chain = [f"VAR {names[0]} = {value}."]
        chain += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
        noise = [NOISE[place % len(NOISE)] for place in range(number)]
        body = inserted(noise, chain, draw_places(rng, len(chain), number))
        return f"{INSTRUCTION}\n\n{' '.join([*body, rest] if rest else body)}"

    def _question(self, value: str) -> str:
        return QUESTION.format(value=value)

    def _start(self, value: str) -> str:
        return ANSWER_START.format(number=self.hops + 1, value=value)


def _draw_names(rng: Random, number: int) -> list[str]:
    """Draw different names of five capital letters."""
    names: dict[str, None] = {}
    while len(names) < number:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
