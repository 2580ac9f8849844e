"""Reads which option an answer names, compares open answers, and judges both."""

import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from .samples import LETTERS, Parse, Sample

# What may stand before a letter that is meant as the answer.
_SAID = r"(?:answer|option|choice|答案)(?:\s+(?:is|would be|should be)|[是为])?\s*[:=]?\s*"
# Words that stand after a letter, and never after an article.
_VERBS = "is|was|are|would|should|must|seems|looks|has|does|can"
_BEHIND_LETTERS = f"{_VERBS}|and|or|as|because|since|but|for|with|which|that|though"
# Where a letter ends: no letter or digit follows, but for those of writing without spaces.
_END = r"(?![^\W\u3040-\u30ff\u3400-\u9fff])"
# Commas end words, but for those within numbers.
_BETWEEN_WORDS = r"\s+|(?<!\d)[,;]|[,;](?!\d)"
_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.IGNORECASE | re.DOTALL)
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*(.*?)\s*\}")
# Official scripts take these out before they look for a letter; Video-MME's list of them lacks two
# commas, so that it takes out the first four only.
_OPENINGS = r"The (?:best|correct) answer is|The answer(?: is)?"
_PREFIXES = {
    4: re.compile(_OPENINGS),
    5: re.compile(rf"{_OPENINGS}|The (?:best|correct) option is|Best (?:answer|option):"),
}


def choose_option(text: str, options: Sequence[str]) -> int | None:
    """Return which option an answer names, by its letter or its text; None if it names none, or
    several.

    What counts is, in this order: the whole answer; what stands in ``<answer>`` tags or
    ``\\boxed{}``; a letter after "answer", "option" or "choice", of several the last; a letter at
    the beginning; the only text of an option that occurs; the only letter in brackets; the only
    letter that stands by itself. "A" before a noun is the article, "I" before a verb but "is" the
    pronoun. Two letters side by side are several.
    """
    text = unicodedata.normalize("NFKC", text).strip()
    for marked in (_TAGGED, _BOXED):
        if found := marked.findall(text):
            text = found[-1].strip()
            break
    whole = [
        number for number, option in enumerate(options) if normalised(option) == normalised(text)
    ]
    if len(whole) == 1 and not (len(text) == 1 and text in LETTERS[: len(options)]):
        return whole[0]
    letters = LETTERS[: len(options)]
    is_meant = rf"(?!(?<=A)\s+(?!(?:{_BEHIND_LETTERS})\b)[a-z])(?!(?<=I)\s+(?!is\b)[a-z])"
    letter = rf"(?:\(([{letters}])\)|\**([{letters}]){_END}(?!['’]))"
    joined = (
        rf"[^\w\n]*(?:(?:and|or)\b[^\w\n]*)?(?:option\s+)?"
        rf"[{letters}]{_END}{is_meant}(?!\s+(?:{_VERBS})\b)"
    )
    if said := list(re.finditer(rf"(?i:{_SAID})\**{letter}{is_meant}", text)):
        is_one = re.match(joined, text[said[-1].end() :]) is None
        return letters.index(said[-1][1] or said[-1][2]) if is_one else None
    if said := re.search(rf"(?i:{_SAID})\W*([{letters.lower()}])\W*$", text):
        return letters.lower().index(said[1])
    if re.match(rf"\W*[{letters}]{joined}", text):
        return None  # several
    if begins := re.match(rf"\W*{letter}{is_meant}", text):
        return letters.index(begins[1] or begins[2])
    if alone := re.fullmatch(rf"\W*([{letters.lower()}])\W*", text):
        return letters.lower().index(alone[1])
    named = option_in(text, options)
    if named is not None:
        return named
    for pattern in (
        rf"\(([{letters}])\)",
        rf"(?<![A-Za-z0-9_])(?<!not )([{letters}]){_END}(?!['’]){is_meant}",
    ):
        found = set(re.findall(pattern, text))
        if found:
            return letters.index(found.pop()) if len(found) == 1 else None
    return None


def option_in(text: str, options: Sequence[str]) -> int | None:
    """Return the only option whose text is, or occurs in, an answer; None if there is none, or are
    several.

    Of options that contain one another, the longer one counts.
    """
    said = f" {normalised(text)} "
    found = [
        n
        for n, option in enumerate(options)
        if normalised(option) and f" {normalised(option)} " in said
    ]
    texts = [f" {normalised(options[number])} " for number in found]
    longest = [
        n
        for n, text in zip(found, texts, strict=True)
        if not any(text in t and t != text for t in texts)
    ]
    return longest[0] if len(longest) == 1 else None


def first_letter_by_alphabet(text: str, options: Sequence[str]) -> int | None:
    """Return the option of VNBench's rule: of the letters before the first full stop, the first in
    the alphabet.

    So "Answer: B" counts as A, since it contains one.
    """
    said = text.split(".")[0]
    return next(
        (number for number, letter in enumerate(LETTERS[: len(options)]) if letter in said), None
    )


def first_of_four(text: str, options: Sequence[str]) -> int | None:
    """Return the option of Video-MME's rule: the first of the capital letters A to D.

    Phrases such as "The best answer is" are taken out before. "Best answer: C" is not, and counts
    as B.
    """
    return _first_letter(text, 4)


def first_of_five(text: str, options: Sequence[str]) -> int | None:
    """Return the option of LongVideoBench's rule: the first of the capital letters A to E.

    Phrases such as "The best answer is" are taken out before. Of four options E is named too, and
    is wrong.
    """
    return _first_letter(text, 5)


def _first_letter(text: str, number: int) -> int | None:
    found = re.search(f"[{LETTERS[:number]}]", _PREFIXES[number].sub("", text.strip()))
    return LETTERS.index(found[0]) if found else None


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation at words' edges but a minus, and with single
    spaces."""
    words = (_bare(word) for word in re.split(_BETWEEN_WORDS, _folded(text)))
    return " ".join(word for word in words if word)


def _bare(word: str) -> str:
    bare = word.strip(string.punctuation + "…“”‘’«»−–")
    is_negative = bare[:1].isdigit() and word.lstrip("([\"'*$").startswith(("-", "−"))
    return f"-{bare}" if is_negative else bare


def same_answer(text: str, expected: str) -> bool:
    """Return whether an open answer is the expected one, but for case, spaces and punctuation
    around words."""
    if normalised(expected):
        return normalised(text) == normalised(expected)
    return _folded(text).strip() == _folded(expected).strip()  # all punctuation, as "?" may be


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def judged(
    sample: Sample, text: str, parse: Parse | None, guess: Callable[[Sample], int] | None = None
) -> dict[str, Any]:
    """Return an answer with the letter of the option that it names, and whether it is right.

    Both are None if there is nothing to say: an open question has no letters, a right answer may be
    unknown.

    Args:
        parse: reads which option an answer names; None: the prompt does not show the options, so
            that an answer names one by its text.
        guess: chooses an option where an answer names none; None: such an answer is wrong.
    """
    if not sample.options:
        right = None if sample.answer is None else same_answer(text, sample.answer)
        return {"text": text, "choice": None, "right": right}
    choice = (parse or option_in)(text, sample.options)
    found = {"text": text, "choice": None if choice is None else LETTERS[choice]}
    if choice is None and guess is not None:
        choice = guess(sample)
        found["guess"] = LETTERS[choice]
    return found | {"right": None if sample.answer is None else choice == sample.answer}
