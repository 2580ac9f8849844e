"""Makes RULER's eight tasks of needles in a haystack."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from .task import TEXTS, Budget, Task, draw_places, inserted, pad
from .words import NOISE, draw_numbers, draw_sentence, draw_uuids, draw_words

_TEXTS = TEXTS["needles"]
LONGEST_ANSWER = 128  # tokens, as RULER has it

Draw = Callable[[Random, int], list[str]]


def make_needles(
    rng: Random,
    budget: Budget,
    *,
    haystack: str = "prose",
    num_keys: int = 1,
    num_values: int = 1,
    num_asked: int = 1,
    draw_keys: Draw = draw_words,
    draw_values: Draw = draw_numbers,
    kind: str = "number",
) -> Task:
    """Make a task of needles, whose context fills a budget.

    The needles stand at distinct places between the sentences, all equally likely.

    Args:
        haystack: "noise" (five sentences again and again), "prose" (drawn sentences) or "needles"
            (further ones).
        num_keys, num_values: how many keys there are, and values of each.
        num_asked: how many of the keys are asked for.
        draw_keys, draw_values: draw a number of different ones.
        kind: what a value is called.

    Raises:
        ValueError: the needles do not fit.
    """
    filler = Random(rng.getrandbits(64))
    keys = draw_keys(rng, num_keys)
    values = draw_values(rng, num_keys * num_values)
    by_key = {key: values[n * num_values : (n + 1) * num_values] for n, key in enumerate(keys)}
    needle = partial(_TEXTS["needle"].format, kind=kind)
    needles = [needle(key=key, value=value) for key, its in by_key.items() for value in its]
    rng.shuffle(needles)
    # Tokens of a longer sentence.
    most = budget.tokens if haystack == "noise" else budget.tokens // 8
    drawn = []
    if haystack == "needles":  # without the keys and values of those that count
        avoided = {*keys, *values}
        number = most + len(avoided) + 1
        pairs = zip(draw_keys(filler, number), draw_values(filler, number), strict=True)
        drawn = [needle(key=k, value=v) for k, v in pairs if avoided.isdisjoint((k, v))]

    def sentences(number: int) -> list[str]:
        """Return a number of sentences of the haystack, always the same."""
        while len(drawn) < number and haystack != "needles":
            noise = NOISE[len(drawn) % len(NOISE)]
            drawn.append(noise if haystack == "noise" else draw_sentence(filler))
        return drawn[:number]

    def text(body: Sequence[str]) -> str:
        return ("\n" if haystack == "needles" else " ").join(
            [_TEXTS["instruction"].format(kind=kind), *body]
        )

    number = budget.fill(
        lambda n: text([*sentences(n), *needles]),
        per_unit=budget.count(" " + sentences(1)[0]),
        what="what is hidden",
        fewest=len(needles) - 1,  # at distinct places
        most=most,
    )
    body = sentences(number)
    body = inserted(body, needles, draw_places(rng, len(needles), len(body)))
    context = text(body)
    if haystack != "needles":  # the last sentence is cut short to fill the context
        next_words = sentences(number + 1)[-1].removesuffix(".").split()
        context = pad(lambda rest: text([*body, rest] if rest else body), next_words, budget)
    while budget.count(context) > budget.tokens:  # where tokens cross sentences, places matter
        body.remove(next(sentence for sentence in reversed(body) if sentence not in needles))
        context = text(body)
    asked = keys[:num_asked]
    named = asked[0] if num_asked == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    return Task(
        context=context,
        question=_TEXTS["question"].format(kind=kind, key=named),
        answers=tuple(value for key in asked for value in by_key[key]),
        answer_start=_TEXTS["answer_start"].format(kind=kind, key=named),
        max_new_tokens=LONGEST_ANSWER,
    )


_OF_UUIDS = {"draw_values": draw_uuids, "kind": "uuid"}
NEEDLE_TASKS = {
    "niah_single_1": partial(make_needles, haystack="noise"),
    "niah_single_2": make_needles,
    "niah_single_3": partial(make_needles, **_OF_UUIDS),
    "niah_multikey_1": partial(make_needles, num_keys=4),
    "niah_multikey_2": partial(make_needles, haystack="needles"),
    "niah_multikey_3": partial(make_needles, haystack="needles", draw_keys=draw_uuids, **_OF_UUIDS),
    "niah_multivalue": partial(make_needles, num_values=4),
    "niah_multiquery": partial(make_needles, num_keys=4, num_asked=4),
}
