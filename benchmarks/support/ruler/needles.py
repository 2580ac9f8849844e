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
        num_keys: how many keys there are.
        num_values: how many values each key has.
        num_asked: how many of the keys are asked for.
        draw_keys: draws a number of different keys.
        draw_values: draws a number of different values.
        kind: what a value is called.

    Raises:
        ValueError: the needles do not fit.
    """
    haystack_rng = Random(rng.getrandbits(64))

    # The needles.
    keys = draw_keys(rng, num_keys)
    values = draw_values(rng, num_keys * num_values)
    values_of_key = {}
    needles = []
    for number, key in enumerate(keys):
        values_of_key[key] = values[number * num_values : (number + 1) * num_values]
        for value in values_of_key[key]:
            needles.append(_TEXTS["needle"].format(kind=kind, key=key, value=value))
    rng.shuffle(needles)

    # The haystack. A sentence that is not noise has at least eight tokens.
    most = budget.tokens if haystack == "noise" else budget.tokens // 8
    haystack_sentences = []
    if haystack == "needles":
        # All are drawn at once, without the keys and values of the needles that count.
        avoided = {*keys, *values}
        number = most + len(avoided) + 1
        other_keys = draw_keys(haystack_rng, number)
        other_values = draw_values(haystack_rng, number)
        for key, value in zip(other_keys, other_values, strict=True):
            if key not in avoided and value not in avoided:
                sentence = _TEXTS["needle"].format(kind=kind, key=key, value=value)
                haystack_sentences.append(sentence)

    def sentences(number: int) -> list[str]:
        """Return a number of sentences of the haystack, always the same."""
        while len(haystack_sentences) < number and haystack != "needles":
            if haystack == "noise":
                sentence = NOISE[len(haystack_sentences) % len(NOISE)]
            else:
                sentence = draw_sentence(haystack_rng)
            haystack_sentences.append(sentence)
        return haystack_sentences[:number]

    def text(body: Sequence[str]) -> str:
        """Return the context of the instruction and some sentences."""
        separator = "\n" if haystack == "needles" else " "
        return separator.join([_TEXTS["instruction"].format(kind=kind), *body])

    def text_without_order(number: int) -> str:
        """Return the context with a number of sentences of the haystack, before the needles."""
        return text([*sentences(number), *needles])

    # Fill the budget.
    number = budget.fill(
        text_without_order,
        per_unit=budget.count(" " + sentences(1)[0]),
        what="what is hidden",
        fewest=len(needles) - 1,  # so that there are distinct places
        most=most,
    )
    body = sentences(number)
    body = inserted(body, needles, draw_places(rng, len(needles), len(body)))
    context = text(body)
    if haystack != "needles":
        # A further sentence is cut short to fill the context.
        next_words = sentences(number + 1)[-1].removesuffix(".").split()

        def text_with_rest(rest: str) -> str:
            return text([*body, rest] if rest else body)

        context = pad(text_with_rest, next_words, budget)
    while budget.count(context) > budget.tokens:
        # Where tokens cross sentences, the needles' places change the length.
        haystack_left = [sentence for sentence in body if sentence not in needles]
        body.remove(haystack_left[-1])
        context = text(body)

    # The question.
    asked = keys[:num_asked]
    if num_asked == 1:
        named = asked[0]
    else:
        named = f"{', '.join(asked[:-1])}, and {asked[-1]}"
    answers = []
    for key in asked:
        answers += values_of_key[key]
    return Task(
        context=context,
        question=_TEXTS["question"].format(kind=kind, key=named),
        answers=tuple(answers),
        answer_start=_TEXTS["answer_start"].format(kind=kind, key=named),
        max_new_tokens=LONGEST_ANSWER,
    )


NEEDLE_TASKS = {
    "niah_single_1": partial(make_needles, haystack="noise"),
    "niah_single_2": make_needles,
    "niah_single_3": partial(make_needles, draw_values=draw_uuids, kind="uuid"),
    "niah_multikey_1": partial(make_needles, num_keys=4),
    "niah_multikey_2": partial(make_needles, haystack="needles"),
    "niah_multikey_3": partial(
        make_needles, haystack="needles", draw_keys=draw_uuids, draw_values=draw_uuids, kind="uuid"
    ),
    "niah_multivalue": partial(make_needles, num_values=4),
    "niah_multiquery": partial(make_needles, num_keys=4, num_asked=4),
}
