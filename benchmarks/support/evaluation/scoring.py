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
    """Sort records into runs, by their settings.

    Of a question that was asked several times the last answer counts, or the last failure without
    an answer.
    """
    runs: dict[str, Run] = {}
    for record in records:
        run = runs.setdefault(digest_of(record["settings"]), Run(record["settings"]))
        before = run.records.get(record["key"])
        has_answer = before is not None and "error" not in before
        if "error" not in record or not has_answer:
            run.records[record["key"]] = record
    return list(runs.values())


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short name for settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


@dataclass
class Score:
    """Counts what a run got right.

    Attributes:
        groups: the number of right answers and of questions, by (dimension, value); :data:`ALL`
            comes first.
        others: numbers of questions by name, ``unanswered``: answers that name no option, which
            count as wrong; and of questions that count in no group ``failed``: they could not be
            asked; ``incomplete``: tries are missing; ``unscored``: the right answer is not known.
    """

    groups: dict[tuple[str, str], list[int]] = field(default_factory=lambda: {ALL: [0, 0]})
    others: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OTHERS, 0))


def score(run: Run) -> Score:
    """Count a run's right answers."""
    result = Score()

    # Sort out what cannot be scored; the tries of a unit count together.
    units: dict[str, list[dict]] = {}
    for record in run.records.values():
        if "error" in record:
            result.others["failed"] += 1
        elif record["right"] is None:
            result.others["unscored"] += 1
        else:
            units.setdefault(record["unit"], []).append(record)
            if record["choice"] is None and record["is_choice"]:
                result.others["unanswered"] += 1

    # Count in all groups.
    for tries in units.values():
        if len(tries) < tries[0]["unit_size"]:
            result.others["incomplete"] += 1
            continue
        is_right = all(record["right"] for record in tries)
        for group in (ALL, *tries[0]["groups"].items()):
            count = result.groups.setdefault(group, [0, 0])
            if is_right:
                count[0] += 1
            count[1] += 1
    return result


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Name runs by the settings in which they differ."""
    names: set[str] = set()
    for run in runs:
        names.update(run.settings)
    differing = []
    for name in sorted(names):
        values = {str(run.settings.get(name)) for run in runs}
        if len(values) > 1:
            differing.append(name)
    labels = []
    for run in runs:
        settings = [f"{name} {run.settings.get(name) or '–'}" for name in differing]
        labels.append(", ".join(settings))
    return labels


def no_rule(score: Score) -> None:
    """Return no figure: the benchmark has no rule of its own."""


def markdown(runs: Sequence[Run], overall: Callable[[Score], float | None] = no_rule) -> str:
    """Format runs as a table of per cent with intervals.

    It has a column for each run, and a row for each kind of question. The last column says how many
    questions were asked, of each run where these numbers differ.

    Args:
        overall: a benchmark's own figure of a score, where that is not the share of all right
            answers.
    """
    scores = [score(run) for run in runs]
    labels = labels_of(runs) if len(runs) > 1 else ["(95 % interval)"]
    header = ["% right", *labels, "questions"]

    # A row for each kind of question.
    groups = set()
    for run_score in scores:
        groups.update(run_score.groups)
    groups.discard(ALL)
    rows = []
    for group in (ALL, *sorted(groups)):
        rows.append(_group_row(group, scores))

    # The benchmark's own figure, below the share of all right answers.
    shares = []
    for run_score in scores:
        _, num_questions = run_score.groups[ALL]
        shares.append(overall(run_score) if num_questions else None)
    if any(share is not None for share in shares):
        cells = ["" if share is None else f"{100 * share:.1f}" for share in shares]
        rows.insert(1, ["overall, by the benchmark's rule", *cells, ""])

    # What does not count, and medians of figures.
    for name in OTHERS:
        numbers = [run_score.others[name] for run_score in scores]
        if any(numbers):
            rows.append([f"({name})", *numbers, ""])
    for name, title in _MEDIANS.items():
        medians = [_median(run, name) for run in runs]
        if None not in medians:
            rows.append([title, *[f"{median:.0f}" for median in medians], ""])
    return markdown_table(header, rows, align="---")


def _group_row(group: tuple[str, str], scores: Sequence[Score]) -> list[str]:
    """Return the row of a kind of question."""
    cells = []
    totals = []
    for run_score in scores:
        right, total = run_score.groups.get(group, [0, 0])
        cells.append(percent_cell(right, total))
        totals.append(total)
    if len(set(totals)) == 1:
        totals = totals[:1]
    title = ": ".join(part for part in group if part)
    return [title, *cells, ", ".join(str(total) for total in totals)]


def _median(run: Run, name: str) -> float | None:
    """Return the median of a figure of a run's answers; None if not all have it, or none does."""
    values = []
    for record in run.records.values():
        if "figures" not in record:
            continue
        if name not in record["figures"]:
            return None
        values.append(record["figures"][name])
    return statistics.median(values) if values else None
