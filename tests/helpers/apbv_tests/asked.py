"""The demo model asked by the benchmarks of questions, about clips of its kind."""

from pathlib import Path
from types import ModuleType

from apbv_tests.scripts import validator_of
from support.evaluation.scoring import Run, runs_of
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
    for record in records:
        validator_of(None, "answers.json").validate(record)
    (run,) = runs_of(records)
    return run
