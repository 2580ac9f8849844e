"""The questions of a benchmark, how they are read from files, and what a model is asked."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from apbv.errors import InvalidRequestError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERED = "{question}\n{options}\nAnswer with the option's letter from the given choices directly."
OPEN = "{question}"
_FIELD = re.compile(r"\{(question|options|subtitles)\}")

Made = TypeVar("Made")
# Reads which of the options an answer names.
Parse = Callable[[str, Sequence[str]], int | None]


@dataclass(frozen=True)
class Sample:
    """One question of a benchmark, with its files and its right answer.

    Attributes:
        key: its name, which no other sample of the benchmark has.
        question: the question, without its options.
        answer: the number of the right option, from 0; of an open question the right text; None:
            not known, so that the answer is recorded, and not scored.
        options: what can be chosen from; empty where the question is open.
        videos, images, audio: the files that are asked about.
        groups: to what kinds of question it belongs, such as ``{"duration": "long"}``.
        unit: samples of the same unit count as one question, which is right if all of them are.
        unit_size: how many samples its unit must have.
        subtitles: file of a video's subtitles.
        extra: what a benchmark needs beyond that for its prompt.
    """

    key: str
    question: str
    answer: int | str | None
    options: tuple[str, ...] = ()
    videos: tuple[Path, ...] = ()
    images: tuple[Path, ...] = ()
    audio: tuple[Path, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    unit_size: int = 1
    subtitles: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that have to be there."""
        if self.subtitles is None:
            return self.sources
        return (*self.sources, self.subtitles)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that are asked about, which questions may share."""
        return (*self.videos, *self.images, *self.audio)

    @property
    def expected(self) -> str | None:
        """The right answer as text, or the letter of the right option; None if it is not known."""
        if isinstance(self.answer, int):
            return LETTERS[self.answer]
        return self.answer


class Subtitle(NamedTuple):
    """A text that is shown from one second of a video to another."""

    start: float
    end: float
    text: str


def file_sizes(sample: Sample) -> list[int]:
    """Return the bytes of each of a sample's files; 0 where there is none.

    They tell a file from another of the same name.
    """
    return [path.stat().st_size if path.is_file() else 0 for path in sample.files]


def by_files(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples in groups about the same files, whose embeddings can be reused."""
    groups: dict[tuple[Path, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.sources, []).append(sample)
    return list(groups.values())


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of all that is asked: questions, options, answers and files' names."""
    asked = []
    for sample in samples:
        fields = [
            sample.key,
            sample.question,
            sample.answer,
            sample.options,
            [path.name for path in sample.files],
            dict(sample.groups),
            sample.unit,
        ]
        asked.append(fields)
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_json(path: Path) -> Any:
    """Read a JSON file, or the lines of a file whose name ends in ``.jsonl``.

    Returns:
        the file's value; of lines a list of their values.

    Raises:
        InvalidRequestError: it cannot be read, or is not JSON; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return _parsed(text, str(path))
    values = []
    # JSON may hold other line breaks than \n, at which splitlines would split.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            values.append(_parsed(line, f"{path}:{number}"))
    return values


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{place}: {error}") from None


def made_of(path: Path, entries: Any, make: Callable[[int, dict], Made]) -> list[Made]:
    """Make something of each entry of a file.

    Args:
        entries: what the file holds.
        make: makes it from the entry's number, from 1, and its fields.

    Raises:
        InvalidRequestError: there is no list, or an entry lacks a field, or has a wrong one; with
            the entry's number.
    """
    if not isinstance(entries, list):
        raise InvalidRequestError(f"{path}: expected a list of questions")
    results = []
    for number, entry in enumerate(entries, start=1):
        try:
            results.append(make(number, entry))
        except KeyError as error:
            raise InvalidRequestError(
                f"{path}, question {number}: needs the field {error}"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidRequestError(f"{path}, question {number}: {error}") from error
    return results


def text_of(value: Any) -> str:
    """Return a text without spaces around it; a number is written out.

    Raises:
        InvalidRequestError: it is something else, or blank.
    """
    text = ""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        text = str(value).strip()
    if not text:
        raise InvalidRequestError(f"expected a text, got {value!r:.60}")
    return text


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a list, or a single one; of None none."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(text_of(entry) for entry in value)
    return (text_of(value),)


def options_of(value: Any) -> tuple[str, ...]:
    """Return options without their own letters, where all have them."""
    options = texts_of(value)
    if len(options) > len(LETTERS):
        return options
    bare = [_without_letter(text, letter) for text, letter in zip(options, LETTERS, strict=False)]
    if None in bare:
        return options
    return tuple(bare)


def option_named(options: Sequence[str], answer: Any) -> int:
    """Return which option an answer names: by its number from 0, by its text, or by its letter.

    Raises:
        InvalidRequestError: it names none, or its text, letter and number name different ones.
    """
    text = str(answer).strip()
    named = []
    if isinstance(answer, int) and not isinstance(answer, bool):
        for number, option in enumerate(options):
            if option == text and number != answer:
                raise InvalidRequestError(
                    f"the answer {answer} is the number, from 0, of one option and the text of "
                    f'another; "{answer}" is the text, and a letter is clear'
                )
        if 0 <= answer < len(options):
            named.append(answer)
    else:
        for number, (letter, option) in enumerate(zip(LETTERS, options, strict=False)):
            is_text = option in (text, _without_letter(text, letter))
            if is_text or letter == text.rstrip("."):
                named.append(number)
    if len(named) != 1:
        how_many = "could be several" if named else "is none"
        raise InvalidRequestError(
            f"the answer {answer!r} {how_many} of the {len(options)} options; its number, from 0, "
            "is clear"
        )
    return named[0]


def option_lettered(options: Sequence[str], letter: str) -> int:
    """Return which option a letter names.

    Raises:
        InvalidRequestError: it names none.
    """
    letters = LETTERS[: len(options)]
    bare = letter.strip().rstrip(".")
    if len(bare) != 1 or bare not in letters:
        raise InvalidRequestError(
            f"{letter!r:.60} is not the letter of one of the {len(options)} options"
        )
    return letters.index(bare)


def _without_letter(option: str, letter: str) -> str | None:
    """Return an option's text after its own letter, "red" of "A. red" and "(A) red".

    None: the option does not begin with its letter, or has nothing else.
    """
    for mark in (f"{letter}.", f"{letter})", f"({letter})"):
        if option.startswith(mark):
            return option.removeprefix(mark).strip() or None
    return None


def fill(template: str, sample: Sample, subtitles: str = "") -> str:
    """Put a sample's question, its lettered options and subtitles into a template."""
    lettered = []
    for letter, option in zip(LETTERS, sample.options, strict=False):
        lettered.append(f"{letter}. {option}")
    values = {"question": sample.question, "options": "\n".join(lettered), "subtitles": subtitles}

    # Not str.format: a template may hold other braces, and a question the names of fields.
    def value_of(field: re.Match) -> str:
        return values[field[1]]

    return _FIELD.sub(value_of, template)


def request_of(sample: Sample, prompt: str) -> Mapping[str, Any]:
    """Return a question with its files, as arguments of :meth:`apbv.Engine.generate`."""
    request: dict[str, Any] = {"prompt": prompt}
    if sample.videos:
        request["video"] = list(sample.videos)
    if sample.images:
        request["images"] = list(sample.images)
    if sample.audio:
        request["audio"] = list(sample.audio)
    return request
