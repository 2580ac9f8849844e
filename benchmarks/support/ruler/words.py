"""The words, numbers and sentences of which the text tasks are made."""

import re
import uuid
from pathlib import Path
from random import Random

# Adjectives and nouns, of which none is part of another; then the phrases of sentences (who, what,
# where, when), without digits.
_TEXT = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
_PARAGRAPHS = _TEXT.strip().split("\n\n")
ADJECTIVES = tuple(_PARAGRAPHS[0].split())
NOUNS = tuple(_PARAGRAPHS[1].split())
SENTENCE_PARTS = [re.split(r",\s+", phrases) for phrases in _PARAGRAPHS[2:]]
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


def draw_sentence(rng: Random) -> str:
    """Draw a sentence of the haystack."""
    phrases = [rng.choice(part) for part in SENTENCE_PARTS]
    return " ".join(phrases) + "."


def draw_words(rng: Random, number: int) -> list[str]:
    """Draw different words, such as "quiet-lantern".

    They have more adjectives where those with one are not twice as many as are drawn.
    """
    num_adjectives = 1
    num_words = len(ADJECTIVES) * len(NOUNS)
    while num_words // 2 < number:
        num_adjectives += 1
        num_words *= len(ADJECTIVES)
    return [_compound(index, num_adjectives) for index in rng.sample(range(num_words), number)]


def _compound(index: int, num_adjectives: int) -> str:
    """Return the word with this number among all with as many adjectives."""
    index, noun = divmod(index, len(NOUNS))
    words = [NOUNS[noun]]
    for _ in range(num_adjectives):
        index, adjective = divmod(index, len(ADJECTIVES))
        words.insert(0, ADJECTIVES[adjective])
    return "-".join(words)


def draw_numbers(rng: Random, number: int) -> list[str]:
    """Draw different numbers of seven digits."""
    return [str(value) for value in rng.sample(range(10**6, 10**7), number)]


def draw_uuids(rng: Random, number: int) -> list[str]:
    """Draw different identifiers of 36 characters."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(number)]
