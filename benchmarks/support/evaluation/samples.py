"""The questions of a benchmark, how they are read from files, and what a model is asked."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
        return (*self.sources, *([self.subtitles] if self.subtitles else []))

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that are asked about, which questions may share."""
        return (*self.videos, *self.images, *self.audio)

    @property
    def expected(self) -> str | None:
        """The right answer as text: that of an open question, or the letter of the right option."""
        return LETTERS[self.answer] if isinstance(self.answer, int) else self.answer


class Subtitle(NamedTuple):
    """A text that is shown from one second of a video to another."""

    start: float
    end: float
    text: str


def file_sizes(sample: Sample) -> list[int]:
    """Return the bytes of each of a sample's files, which tell other files of the same names apart;
    0: no file."""
    return [path.stat().st_size if path.is_file() else 0 for path in sample.files]


def by_files(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples in groups about the same files, whose embeddings can be reused."""
    groups: dict[tuple[Path, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.sources, []).append(sample)
    return list(groups.values())


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of all that is asked: questions, options, answers and files' names."""
    asked = [
        [
            s.key,
            s.question,
            s.answer,
            s.options,
            [path.name for path in s.files],
            dict(s.groups),
            s.unit,
        ]
        for s in samples
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_json(path: Path) -> Any:
    """Read a JSON file; of a file whose name ends in ``.jsonl`` return a list with an entry for
    every line.

    Raises:
        ValueError: it cannot be read, or is not JSON; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return _parsed(text, str(path))
    lines = enumerate(text.split("\n"), start=1)  # JSON may hold other line breaks than \n
    return [_parsed(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def made_of(path: Path, entries: Any, make: Callable[[int, dict], Made]) -> list[Made]:
    """Make something of each entry of a file, from its number, from 1, and its fields.

    Raises:
        ValueError: there is no list, or an entry lacks a field, or has a wrong one; with the
            entry's number.
    """
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of questions")
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(make(number, entry))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            wrong = f"needs the field {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}, question {number}: {wrong}") from error
    return found


def text_of(value: Any) -> str:
    """Return a text without spaces around it; a number is written out.

    Raises:
        ValueError: it is something else, or blank.
    """
    text = (
        str(value).strip()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else ""
    )
    if not text:
        raise ValueError(f"expected a text, got {value!r:.60}")
    return text


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a list, or a single one; of None none."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(map(text_of, values))


def options_of(value: Any) -> tuple[str, ...]:
    """Return options without their own letters, where all have them."""
    options = texts_of(value)
    bare = [_without_letter(text, letter) for text, letter in zip(options, LETTERS, strict=False)]
    return tuple(bare) if len(bare) == len(options) and all(bare) else options


def option_named(options: Sequence[str], answer: Any) -> int:
    """Return which option an answer names: by its number from 0, by its text, or by its letter.

    Raises:
        ValueError: it names none, or its text, letter and number name different ones.
    """
    text = str(answer).strip()
    if isinstance(answer, int) and not isinstance(answer, bool):
        if any(option == text and number != answer for number, option in enumerate(options)):
            raise ValueError(
                f"the answer {answer} is the number, from 0, of one option and the text of "
                "another; "
                f'"{answer}" is the text, and a letter is clear'
            )
        found = {answer} & {*range(len(options))}
    else:
        found = {
            number
            for number, (letter, option) in enumerate(zip(LETTERS, options, strict=False))
            if option in (text, _without_letter(text, letter)) or letter == text.rstrip(".")
        }
    if len(found) != 1:
        many = "could be several" if found else "is none"
        raise ValueError(
            f"the answer {answer!r} {many} of the {len(options)} options; its number, from 0, is "
            "clear"
        )
    return found.pop()


def option_lettered(options: Sequence[str], letter: str) -> int:
    """Return which option a letter names.

    Raises:
        ValueError: it names none.
    """
    letters = LETTERS[: len(options)]
    bare = letter.strip().rstrip(".")
    if len(bare) != 1 or bare not in letters:
        raise ValueError(f"{letter!r:.60} is not the letter of one of the {len(options)} options")
    return letters.index(bare)


def _without_letter(option: str, letter: str) -> str | None:
    """Return an option's text after its own letter, as of "A. red" and "(A) red"; None if it has
    not that."""
    for mark in (f"{letter}.", f"{letter})", f"({letter})"):
        if option.startswith(mark):
            return option.removeprefix(mark).strip() or None
    return None


def fill(template: str, sample: Sample, subtitles: str = "") -> str:
    """Put a sample's question, its lettered options and subtitles into a template."""
    lettered = (
        f"{letter}. {option}" for letter, option in zip(LETTERS, sample.options, strict=False)
    )
    values = {"question": sample.question, "options": "\n".join(lettered), "subtitles": subtitles}
    return _FIELD.sub(lambda found: values[found[1]], template)


def request_of(sample: Sample, prompt: str) -> Mapping[str, Any]:
    """Return a question with its files, as arguments of :meth:`apbv.Engine.generate`."""
    files = {"video": sample.videos, "images": sample.images, "audio": sample.audio}
    return {"prompt": prompt, **{name: list(paths) for name, paths in files.items() if paths}}
