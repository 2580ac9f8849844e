"""The words, numbers and sentences of which the text tasks are made."""

import re
import uuid
from itertools import count
from pathlib import Path
from random import Random

# Adjectives and nouns, of which none is part of another; then the phrases of sentences (who, what,
# where, when), without digits.
_PARAGRAPHS = (
    Path(__file__).with_name("words.txt").read_text(encoding="utf-8").strip().split("\n\n")
)
ADJECTIVES, NOUNS = (tuple(words.split()) for words in _PARAGRAPHS[:2])
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
    return " ".join(map(rng.choice, SENTENCE_PARTS)) + "."


def draw_words(rng: Random, number: int) -> list[str]:
    """Draw different words, such as "quiet-lantern"; where these do not suffice, with two
    adjectives."""
    for length in count(1):
        size = len(ADJECTIVES) ** length * len(NOUNS)
        if number <= size // 2:
            break
    return [_compound(index, length) for index in rng.sample(range(size), number)]


def _compound(index: int, length: int) -> str:
    index, noun = divmod(index, len(NOUNS))
    words = [NOUNS[noun]]
    for _ in range(length):
        index, adjective = divmod(index, len(ADJECTIVES))
        words.insert(0, ADJECTIVES[adjective])
    return "-".join(words)


def draw_numbers(rng: Random, number: int) -> list[str]:
    """Draw different numbers of seven digits."""
    return [str(value) for value in rng.sample(range(10**6, 10**7), number)]


def draw_uuids(rng: Random, number: int) -> list[str]:
    """Draw different identifiers of 36 characters."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(number)]
