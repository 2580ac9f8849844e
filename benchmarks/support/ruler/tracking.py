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
    example_names = names[: HOPS + 1]
    names = names[HOPS + 1 :]
    example_value, value = (str(number) for number in rng.sample(range(10_000, 100_000), 2))

    # The example, with its answer.
    example_rng = Random(rng.getrandbits(64))
    example_text = _text(example_rng, example_names, example_value, EXAMPLE_SENTENCES, "")
    example = (
        f"{example_text}\n{_question(example_value)}\n"
        f"{_answer_start(example_value)} {' '.join(example_names)}"
    )

    # The chain, in as many sentences as fit, and a part of a further one.
    seed = rng.getrandbits(64)

    def text(num_sentences: int, rest: str = "") -> str:
        return f"{example}\n\n{_text(Random(seed), names, value, num_sentences, rest)}"

    num_sentences = budget.fill(
        text, per_unit=budget.count(" " + NOISE[0]), what="the chain", fewest=HOPS
    )
    next_words = NOISE[num_sentences % len(NOISE)].removesuffix(".").split()

    def text_with_rest(rest: str) -> str:
        return text(num_sentences, rest)

    return Task(
        context=pad(text_with_rest, next_words, budget),
        question=_question(value),
        answers=tuple(names),
        answer_start=_answer_start(value),
        max_new_tokens=30 + 6 * HOPS,
    )


def _question(value: str) -> str:
    return _TEXTS["question"].format(value=value)


def _answer_start(value: str) -> str:
    return _TEXTS["answer_start"].format(number=HOPS + 1, value=value)


def _text(rng: Random, names: list[str], value: str, num_sentences: int, rest: str) -> str:
    """Return the instruction and a chain in noise.

    Args:
        names: the chain's variables.
        value: of the first variable, and thus of all.
        num_sentences: of noise.
        rest: a last sentence; "" for none.
    """
    chain = [f"VAR {names[0]} = {value}."]
    for before, name in pairwise(names):
        chain.append(f"VAR {name} = VAR {before}.")
    noise = [NOISE[place % len(NOISE)] for place in range(num_sentences)]
    body = inserted(noise, chain, draw_places(rng, len(chain), num_sentences))
    if rest:
        body.append(rest)
    return f"{_TEXTS['instruction']}\n\n{' '.join(body)}"
