"""Measure accuracy on VNBench: finding, ordering and counting needles in videos, in four tries.

    python benchmarks/vnbench.py --model OpenGVLab/InternVL3-2B-hf \
        --questions VNBench-main-4try.json
    torchrun --nproc-per-node 8 benchmarks/vnbench.py --model ... --questions ... --videos ... \
        --frames 128
    python benchmarks/vnbench.py --table results/vnbench-*.jsonl

The file and the videos are the official ones (Zhao et al., *Needle In A Video Haystack*). A
question counts as right if all four tries are; the options are permuted between tries. The overall
score is the mean of retrieval, ordering and counting, each of which is the mean of its three types.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path, PurePosixPath

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from support.evaluation.answers import first_letter_by_alphabet
from support.evaluation.command import Benchmark
from support.evaluation.samples import (
    Sample,
    made_of,
    option_lettered,
    read_json,
    text_of,
    texts_of,
)
from support.evaluation.scoring import Score

TRIES = 4
TASKS = {"ret": "retrieval", "ord": "ordering", "cnt": "counting"}
LENGTHS = (60, 120, 180)  # seconds


def read(options: argparse.Namespace) -> list[Sample]:
    """Read VNBench's file.

    It is a list of objects with video, question, options, gt, gt_option, type and try.

    Raises:
        InvalidRequestError: the file cannot be read, or has another form.
    """
    folder = options.videos or options.questions.parent
    return made_of(options.questions, read_json(options.questions), partial(_sample, folder))


def _sample(folder: Path, _, row: dict) -> Sample:
    video = PurePosixPath(row["video"])
    kind = row["type"]
    task = kind.partition("_")[0]
    if task not in TASKS:
        raise InvalidRequestError(f"the type {kind!r} begins with none of {', '.join(TASKS)}")

    # The answer: its text, its letter, or both.
    choices = texts_of(row["options"])
    right = str(row.get("gt"))
    answers = []
    if right in choices:
        answers.append(choices.index(right))
    if row.get("gt_option") is not None:
        answers.append(option_lettered(choices, row["gt_option"]))
    if len(set(answers)) != 1:
        raise InvalidRequestError("needs one right answer, by 'gt' or 'gt_option'")

    needle = "edit" if "edit" in kind else "insert"
    groups = {"task": TASKS[task], "needle": needle, "type": kind}
    if row.get("length") is not None:
        groups["length"] = _length_group(row["length"])
    places = [folder / video, folder / video.name]
    unit = f"{video.stem} {kind}"
    return Sample(
        key=f"{unit} {row['try']}",
        question=text_of(row["question"]),
        answer=answers[0],
        options=choices,
        videos=(next((path for path in places if path.is_file()), places[-1]),),
        groups=groups,
        unit=unit,
        unit_size=TRIES,
    )


def _length_group(seconds: float) -> str:
    """Return the name of the videos of about this length."""
    for limit in LENGTHS:
        if seconds <= limit:
            return f"to {limit:3} s"
    return f"over {LENGTHS[-1]} s"


def overall(score: Score) -> float | None:
    """Return the mean of the tasks, each the mean of its types."""
    shares: dict[str, list[float]] = {}
    for (dimension, value), (right, total) in score.groups.items():
        if dimension == "type":
            shares.setdefault(value.partition("_")[0], []).append(right / total)
    if not shares:
        return None
    return statistics.fmean(statistics.fmean(of_task) for of_task in shares.values())


BENCHMARK = Benchmark("vnbench", __doc__, read, parse=first_letter_by_alphabet, overall=overall)
parse_arguments = BENCHMARK.parse_arguments
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
