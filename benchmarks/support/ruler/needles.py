"""Makes RULER's eight tasks of needles in a haystack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .task import Budget, Task, draw_places, inserted, pad
from .words import NOISE, draw_numbers, draw_sentence, draw_uuids, draw_words

INSTRUCTION = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the {kind}s afterwards."
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = "What are all the special magic {kind}s for {key} mentioned in the provided text?"
ANSWER_START = "The special magic {kind}s for {key} mentioned in the provided text are"

LONGEST_ANSWER = 128  # tokens, as RULER has it


@dataclass(frozen=True)
class Needles:
    """Needles and their places.

    Attributes:
        haystack: "noise" (five sentences again and again), "prose" (drawn sentences) or "needles" (further ones).
        keys, values: how many keys there are, and values of each.
        asked: how many of the keys are asked for.
        draw_keys, draw_values: draw a number of different ones.
        kind: what a value is called.
    """

    haystack: str = "prose"
    keys: int = 1
    values: int = 1
    asked: int = 1
    draw_keys: Callable[[Random, int], list[str]] = draw_words
    draw_values: Callable[[Random, int], list[str]] = draw_numbers
    kind: str = "number"

    def make(self, rng: Random, budget: Budget) -> Task:
        """Make a task whose context fills a budget.

        The needles stand at distinct places between the sentences, all equally likely.

        Raises:
            ValueError: the needles do not fit.
        """
        filler = Random(rng.getrandbits(64))
        keys = self.draw_keys(rng, self.keys)
        values = self.draw_values(rng, self.keys * self.values)
        by_key = {key: values[n * self.values : (n + 1) * self.values] for n, key in enumerate(keys)}
        needles = [self.needle(key, value) for key, its in by_key.items() for value in its]
        rng.shuffle(needles)
        most = budget.tokens if self.haystack == "noise" else budget.tokens // 8  # tokens of a longer sentence
        drawn = self._distractors(filler, most, {*keys, *values}) if self.haystack == "needles" else []

        def sentences(number: int) -> list[str]:
            """Return a number of sentences of the haystack, always the same."""
            while len(drawn) < number and self.haystack != "needles":
                noise = NOISE[len(drawn) % len(NOISE)]
                drawn.append(noise if self.haystack == "noise" else draw_sentence(filler))
            return drawn[:number]

        def text(body: Sequence[str]) -> str:
            start = INSTRUCTION.format(kind=self.kind)
            return ("\n" if self.haystack == "needles" else " ").join([start, *body])

        per_unit = budget.count(" " + sentences(1)[0])
        number = budget.fill(
            lambda n: text([*sentences(n), *needles]),
            per_unit,
            "what is hidden",
            fewest=len(needles) - 1,  # at distinct places
            most=most,
        )
        body = sentences(number)
        places = draw_places(rng, len(needles), len(body))
        body = inserted(body, needles, places)
        context = text(body)
        if self.haystack != "needles":  # the last sentence is cut short to fill the context
            next_words = sentences(number + 1)[-1].removesuffix(".").split()
            context = pad(lambda rest: text([*body, rest] if rest else body), next_words, budget)
        while budget.count(context) > budget.tokens:  # where tokens cross sentences, places matter
            body.remove(next(sentence for sentence in reversed(body) if sentence not in needles))
            context = text(body)
        asked = keys[: self.asked]
        named = asked[0] if self.asked == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        return Task(
            context=context,
            question=QUESTION.format(kind=self.kind, key=named),
            answers=tuple(value for key in asked for value in by_key[key]),
            answer_start=ANSWER_START.format(kind=self.kind, key=named),
            max_new_tokens=LONGEST_ANSWER,
        )

    def needle(self, key: str, value: str) -> str:
        """Return the sentence that hides a value."""
        return NEEDLE.format(kind=self.kind, key=key, value=value)

    def _distractors(self, rng: Random, most: int, avoided: set[str]) -> list[str]:
        """Draw further needles, without the keys and values of those that count."""
        number = most + len(avoided) + 1
        pairs = zip(self.draw_keys(rng, number), self.draw_values(rng, number), strict=True)
        return [self.needle(*pair) for pair in pairs if avoided.isdisjoint(pair)]


NEEDLE_TASKS = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(draw_values=draw_uuids, kind="uuid"),
    "niah_multikey_1": Needles(keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", draw_keys=draw_uuids, draw_values=draw_uuids, kind="uuid"),
    "niah_multivalue": Needles(values=4),
    "niah_multiquery": Needles(keys=4, asked=4),
}
