"""Ask a model the questions of a JSONL file, with any prefill and decoding options, and score its answers.

    python benchmarks/questions.py --questions clips/questions.jsonl --model demo
    torchrun --nproc-per-node 2 benchmarks/questions.py --questions questions.jsonl --model demo --method star
    python benchmarks/questions.py --table results/questions*.jsonl

Every line of the file is a JSON object, whose files' names are relative to it:

    {"video": "clip.mp4", "question": "Which letter is shown?", "options": ["J", "P", "X"], "answer": "P"}

"video", "image" and "audio" name a file, or are lists of them. Without "options" the answer is compared with the
text, ignoring case and punctuation; with them "answer" is an option's text, letter, or number from 0. "id" names
the question, and "category", or an object "groups", assigns it to groups.
"""

import argparse
import sys
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from support.evaluation.command import Benchmark
from support.evaluation.samples import LETTERS, Row, Sample, read_json, rows_of

FIELDS = {"id", "video", "image", "audio", "question", "options", "answer", "category", "groups"}


def read(options: argparse.Namespace) -> list[Sample]:
    """Read the questions of a file.

    Raises:
        ValueError: the file cannot be read, or a question is wrong; with its number.
    """
    rows = rows_of(options.questions, read_json(options.questions))
    return [_sample(row, number, options.questions.parent) for number, row in enumerate(rows, start=1)]


def _sample(row: Row, number: int, folder: Path) -> Sample:
    if unknown := sorted(row.values.keys() - FIELDS):
        raise row.error(f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(FIELDS))}")
    choices = row.options("options")
    if len(choices) == 1 or len(choices) > len(LETTERS) or len(set(choices)) < len(choices):
        raise row.error(f"needs 2 to {len(LETTERS)} options, no two of them the same, got {choices!r:.200}")
    answer = None
    if "answer" in row:
        answer = row.option(choices, row.values["answer"]) if choices else row.text("answer")
    groups = row.values.get("groups") or {}
    if not isinstance(groups, dict):
        raise row.error('\'groups\' must be an object such as {"category": "sports"}')
    groups = {str(name): str(value) for name, value in groups.items()}
    if "category" in row:
        groups["category"] = row.text("category")
    return Sample(
        key=row.text("id", default=str(number)),
        question=row.text("question"),
        answer=answer,
        options=choices,
        videos=tuple(folder / name for name in row.texts("video")),
        images=tuple(folder / name for name in row.texts("image")),
        audio=tuple(folder / name for name in row.texts("audio")),
        groups=groups,
    )


BENCHMARK = Benchmark(
    "questions", __doc__.splitlines()[0], {"questions": "JSON Lines, or a JSON list"}, "questions", read
)
parse_arguments, main = BENCHMARK.parse_arguments, BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
