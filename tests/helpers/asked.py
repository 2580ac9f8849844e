"""The demo model asked by the benchmarks of questions, about clips of its kind."""

import json
from pathlib import Path
from types import ModuleType

import jsonschema

from scripts import BENCHMARKS
from support import clips
from support.evaluation.scoring import Run, Score, runs_of
from support.records import read_records

# The demo model knows its questions, and no letters.
OPEN = ["--template", "{question}"]
SRT = """1
00:00:00,000 --> 00:00:01,000
<font color="white" size=".72c">first line</font>

2
00:00:01,200 --> 00:00:01,300
between frames

3
00:00:02,000 --> 00:00:04,500
last
line
"""


def answered(benchmark: ModuleType, results: Path, *options, status: int = 0) -> dict[str, dict]:
    """The records of a run of a benchmark in this process."""
    arguments = ["--model", "demo", "--json", results, *options]
    assert benchmark.main([str(each) for each in arguments]) == status
    return run_in(results).records


def run_in(path: Path) -> Run:
    """The only run in a file of answers, which keep to their schema."""
    records = read_records([path])
    schema = json.loads((BENCHMARKS / "schemas" / "answers.json").read_text())
    for record in records:
        jsonschema.validate(record, schema)
    (run,) = runs_of(records)
    return run


def groups_of(score: Score, dimension: str) -> dict[str, list[int]]:
    """Right answers and questions by a dimension's values."""
    return {value: count for (name, value), count in score.groups.items() if name == dimension}


def clip_of(seed: int, needles: str, path: Path) -> clips.ClipSpec:
    """A short clip, which is written to a file."""
    clip = clips.make_clip(seed, 12, "test", needles=[needles])
    clips.write_mp4(clips.render(clip), path)
    return clip


def wrong_answers(task: str, answer: str, number: int = 0) -> list[str]:
    """Three further options."""
    if task == "counting":
        return [str(int(answer) + step) for step in (1, 2, 3)]
    letters = [letter for letter in clips.LETTERS if letter not in answer.split()]
    size = len(answer.split())
    return [" ".join(letters[start : start + size]) for start in (number % 3, number % 3 + 1, number % 3 + 2)]
