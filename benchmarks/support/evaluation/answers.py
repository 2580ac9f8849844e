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
    """Return which option an answer names, by letter or text; None if it names none, or several.

    What counts is, in this order: the whole answer; what stands in ``<answer>`` tags or
    ``\\boxed{}``; a letter after "answer", "option" or "choice", of several the last; a letter at
    the beginning; the only text of an option that occurs; the only letter in brackets; the only
    letter that stands by itself. "A" before a noun is the article, "I" before a verb but "is" the
    pronoun. Two letters side by side are several.
    """
    text = unicodedata.normalize("NFKC", text).strip()
    letters = LETTERS[: len(options)]

    # What is marked as the answer stands for all of it.
    for mark in (_TAGGED, _BOXED):
        marked = mark.findall(text)
        if marked:
            text = marked[-1].strip()
            break

    # The whole answer is an option. A letter alone may be an option's text, too, but is a letter.
    is_letter = len(text) == 1 and text in letters
    equal = [
        number for number, option in enumerate(options) if normalised(option) == normalised(text)
    ]
    if len(equal) == 1 and not is_letter:
        return equal[0]

    # Patterns: a letter, not an article or a pronoun; one in brackets or bare, with its own group
    # each; a second letter beside a first.
    is_meant = rf"(?!(?<=A)\s+(?!(?:{_BEHIND_LETTERS})\b)[a-z])(?!(?<=I)\s+(?!is\b)[a-z])"
    letter = rf"(?:\(([{letters}])\)|\**([{letters}]){_END}(?!['’]))"
    second = (
        rf"[^\w\n]*(?:(?:and|or)\b[^\w\n]*)?(?:option\s+)?"
        rf"[{letters}]{_END}{is_meant}(?!\s+(?:{_VERBS})\b)"
    )

    # A letter after "answer", "option" or "choice"; a small one only at the end.
    said = list(re.finditer(rf"(?i:{_SAID})\**{letter}{is_meant}", text))
    if said:
        last = said[-1]
        if re.match(second, text[last.end() :]):
            return None
        return letters.index(last[1] or last[2])
    said_small = re.search(rf"(?i:{_SAID})\W*([{letters.lower()}])\W*$", text)
    if said_small:
        return letters.lower().index(said_small[1])

    # A letter at the beginning; a small one only by itself.
    if re.match(rf"\W*[{letters}]{second}", text):
        return None
    first = re.match(rf"\W*{letter}{is_meant}", text)
    if first:
        return letters.index(first[1] or first[2])
    alone = re.fullmatch(rf"\W*([{letters.lower()}])\W*", text)
    if alone:
        return letters.lower().index(alone[1])

    # The text of an option.
    named = option_in(text, options)
    if named is not None:
        return named

    # The only letter in brackets, or by itself.
    in_brackets = rf"\(([{letters}])\)"
    by_itself = rf"(?<![A-Za-z0-9_])(?<!not )([{letters}]){_END}(?!['’]){is_meant}"
    for pattern in (in_brackets, by_itself):
        different = set(re.findall(pattern, text))
        if len(different) == 1:
            return letters.index(different.pop())
        if different:
            return None
    return None


def option_in(text: str, options: Sequence[str]) -> int | None:
    """Return the only option whose text occurs in an answer; None if there is none, or several.

    Of options that contain one another, the longer one counts.
    """
    # With spaces around them, so that only whole words are equal.
    said = f" {normalised(text)} "
    occurring: dict[int, str] = {}
    for number, option in enumerate(options):
        words = normalised(option)
        if words and f" {words} " in said:
            occurring[number] = f" {words} "
    longest = []
    for number, words in occurring.items():
        is_part = any(words in other and words != other for other in occurring.values())
        if not is_part:
            longest.append(number)
    return longest[0] if len(longest) == 1 else None


def first_letter_by_alphabet(text: str, options: Sequence[str]) -> int | None:
    """Return the option of VNBench's rule.

    It is the first letter in the alphabet of all before the first full stop. So "Answer: B" counts
    as A, since it contains one.
    """
    before_stop = text.split(".")[0]
    for number, letter in enumerate(LETTERS[: len(options)]):
        if letter in before_stop:
            return number
    return None


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
    """Return the first of a number of letters behind a usual opening; None if there is none."""
    rest = _PREFIXES[number].sub("", text.strip())
    match = re.search(f"[{LETTERS[:number]}]", rest)
    return LETTERS.index(match[0]) if match else None


def normalised(text: str) -> str:
    """Return a text in lower case and with single spaces.

    Punctuation at the edges of words is left out, but for a minus.
    """
    words = [_bare(word) for word in re.split(_BETWEEN_WORDS, _folded(text))]
    return " ".join(word for word in words if word)


def _bare(word: str) -> str:
    """Return a word without the punctuation around it, but with a number's minus."""
    bare = word.strip(string.punctuation + "…“”‘’«»−–")
    is_negative = bare[:1].isdigit() and word.lstrip("([\"'*$").startswith(("-", "−"))
    return f"-{bare}" if is_negative else bare


def same_answer(text: str, expected: str) -> bool:
    """Return whether an open answer is the expected one.

    Case, spaces, and punctuation around words do not matter.
    """
    if normalised(expected):
        return normalised(text) == normalised(expected)
    # The expected answer is punctuation only, such as "?".
    return _folded(text).strip() == _folded(expected).strip()


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def judged(
    sample: Sample, text: str, parse: Parse | None, guess: Callable[[Sample], int] | None = None
) -> dict[str, Any]:
    """Return an answer with the letter of the option that it names, and whether it is right.

    An open question has no letter, which is None then; a right answer may be unknown, so that None
    is whether the answer is right.

    Args:
        parse: reads which option an answer names; None: the prompt does not show the options, so
            that an answer names one by its text.
        guess: chooses an option where an answer names none; None: such an answer is wrong.
    """
    if not sample.options:
        right = None if sample.answer is None else same_answer(text, sample.answer)
        return {"text": text, "choice": None, "right": right}
    if parse is None:
        parse = option_in
    choice = parse(text, sample.options)
    result = {"text": text, "choice": None if choice is None else LETTERS[choice]}
    if choice is None and guess is not None:
        choice = guess(sample)
        result["guess"] = LETTERS[choice]
    result["right"] = None if sample.answer is None else choice == sample.answer
    return result
