"""Ask a model the questions of a JSONL file, with any options of an engine, and score its answers.

    python benchmarks/questions.py --questions clips/questions.jsonl --model demo
    torchrun --nproc-per-node 2 benchmarks/questions.py --questions questions.jsonl \
        --model demo --method star
    python benchmarks/questions.py --table results/questions*.jsonl

Every line of the file is a JSON object, whose files' names are relative to it:

    {"video": "clip.mp4", "question": "Which letter is shown?", "options": ["J", "P", "X"],
    "answer": "P"}

"video", "image" and "audio" name a file, or are lists of them. Without "options" the answer is
compared with the text, ignoring case and punctuation; with them "answer" is an option's text,
letter, or number from 0. "id" names the question, and "category", or an object "groups", assigns it
to groups.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from support.evaluation.command import Benchmark
from support.evaluation.samples import (
    LETTERS,
    Sample,
    made_of,
    option_named,
    options_of,
    read_json,
    text_of,
    texts_of,
)

FIELDS = {"id", "video", "image", "audio", "question", "options", "answer", "category", "groups"}


def read(options: argparse.Namespace) -> list[Sample]:
    """Read the questions of a file.

    Raises:
        InvalidRequestError: the file cannot be read, or a question is wrong; with its number.
    """
    path = options.questions
    return made_of(path, read_json(path), partial(_sample, path.parent))


def _sample(folder: Path, number: int, row: dict) -> Sample:
    unknown = sorted(row.keys() - FIELDS)
    if unknown:
        raise InvalidRequestError(
            f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(FIELDS))}"
        )
    choices = options_of(row.get("options"))
    if len(choices) == 1 or len(choices) > len(LETTERS) or len(set(choices)) < len(choices):
        raise InvalidRequestError(
            f"needs 2 to {len(LETTERS)} options, no two of them the same, got {choices!r:.200}"
        )
    answer = row.get("answer")
    if answer is not None:
        answer = option_named(choices, answer) if choices else text_of(answer)
    groups = {}
    if row.get("groups"):
        groups = {name: str(value) for name, value in row["groups"].items()}
    if row.get("category") is not None:
        groups["category"] = text_of(row["category"])
    return Sample(
        key=text_of(row.get("id", number)),
        question=text_of(row["question"]),
        answer=answer,
        options=choices,
        videos=tuple(folder / name for name in texts_of(row.get("video"))),
        images=tuple(folder / name for name in texts_of(row.get("image"))),
        audio=tuple(folder / name for name in texts_of(row.get("audio"))),
        groups=groups,
    )


BENCHMARK = Benchmark("questions", __doc__, read)
parse_arguments = BENCHMARK.parse_arguments
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
