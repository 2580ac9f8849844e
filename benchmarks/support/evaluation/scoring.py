"""Scores runs: shares of right answers with intervals, by kind of question."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..records import markdown_table
from ..summaries import percent_cell

ALL = ("all", "")
OTHERS = ("unanswered", "failed", "incomplete", "unscored")
_MEDIANS = {"num_input_tokens": "tokens (median)", "ttft_ms": "ms to first token", "total_ms": "ms"}


@dataclass
class Run:
    """The answers of one set of settings.

    Attributes:
        settings: what the answers depend on.
        records: the answers by the samples' keys, each with a ``text`` or an ``error``.
    """

    settings: Mapping[str, Any]
    records: dict[str, dict] = field(default_factory=dict)


def runs_of(records: Iterable[dict]) -> list[Run]:
    """Return the runs that records are of; of repeated questions the last answers, except where
    these failed."""
    runs: dict[str, Run] = {}
    for record in records:
        run = runs.setdefault(digest_of(record["settings"]), Run(record["settings"]))
        if "error" not in record or "error" in run.records.get(record["key"], {"error": None}):
            run.records[record["key"]] = record
    return list(runs.values())


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


@dataclass
class Score:
    """Counts what a run got right.

    Attributes:
        groups: right answers and questions, by (dimension, value); :data:`ALL` comes first.
        others: by name, ``unanswered``: answers that name no option, which count as wrong; and in
            no count: ``failed``: questions that could not be asked; ``incomplete``: those of which
            tries are missing; ``unscored``: those whose right answer is not known.
    """

    groups: dict[tuple[str, str], list[int]] = field(default_factory=lambda: {ALL: [0, 0]})
    others: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OTHERS, 0))


def score(run: Run) -> Score:
    """Count a run's right answers."""
    found = Score()
    units = {}
    for record in run.records.values():
        if "error" in record:
            found.others["failed"] += 1
        elif record["right"] is None:
            found.others["unscored"] += 1
        else:
            units.setdefault(record["unit"], []).append(record)
            found.others["unanswered"] += record["choice"] is None and record["is_choice"]
    for tries in units.values():
        if len(tries) < tries[0]["unit_size"]:
            found.others["incomplete"] += 1
            continue
        right = all(record["right"] for record in tries)
        for group in (ALL, *tries[0]["groups"].items()):
            count = found.groups.setdefault(group, [0, 0])
            count[0] += right
            count[1] += 1
    return found


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Name runs by the settings in which they differ."""
    names = sorted({name for run in runs for name in run.settings})
    differing = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
    return [
        ", ".join(f"{name} {run.settings.get(name) or '–'}" for name in differing) for run in runs
    ]


def markdown(
    runs: Sequence[Run], overall: Callable[[Score], float | None] = lambda score: None
) -> str:
    """Format runs as a table: a column for each run, a row for each kind of question; per cent,
    with intervals.

    The last column says how many questions were asked, of each run where these numbers differ.

    Args:
        overall: a benchmark's own figure of a score, where that is not the share of all right
            answers.
    """
    scores = [score(run) for run in runs]
    header = ["% right", *(labels_of(runs) if len(runs) > 1 else ["(95 % interval)"]), "questions"]
    rows = []
    for group in (ALL, *sorted({group for score in scores for group in score.groups} - {ALL})):
        counts = [score.groups.get(group, [0, 0]) for score in scores]
        asked = dict.fromkeys(total for _, total in counts)
        asked = [total for _, total in counts] if len(asked) > 1 else asked
        cells = [percent_cell(*count) for count in counts]
        rows.append([": ".join(filter(None, group)), *cells, ", ".join(map(str, asked))])
    shares = [overall(score) if score.groups[ALL][1] else None for score in scores]
    if any(share is not None for share in shares):
        cells = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        rows.insert(1, ["overall, by the benchmark's rule", *cells, ""])
    for name in OTHERS:
        if any(numbers := [score.others[name] for score in scores]):
            rows.append([f"({name})", *numbers, ""])
    figures = [[r["figures"] for r in run.records.values() if "figures" in r] for run in runs]
    for name, title in _MEDIANS.items():
        if all(of_run and all(name in each for each in of_run) for of_run in figures):
            medians = (statistics.median(each[name] for each in of_run) for of_run in figures)
            rows.append([title, *(f"{median:.0f}" for median in medians), ""])
    return markdown_table(header, rows, align="---")
