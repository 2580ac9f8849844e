"""Scores runs: shares of right answers with intervals, by kind of question."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..records import markdown_table
from ..summaries import percent_cell, wilson
from .results import Run, digest_of

ALL = ("all", "")
OTHERS = ("unanswered", "failed", "incomplete", "unscored")


@dataclass
class Score:
    """Counts what a run got right.

    Attributes:
        groups: right answers and questions, by (dimension, value); :data:`ALL` comes first.
        others: by name, ``unanswered``: answers that name no option, which count as wrong; and in no count:
            ``failed``: questions that could not be asked; ``incomplete``: those of which tries are missing;
            ``unscored``: those whose right answer is not known.
        overall: a benchmark's own figure, where that is not the share of all; None: there is none.
    """

    groups: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OTHERS, 0))
    overall: float | None = None


def score(run: Run, overall: Callable[[Score], float | None] = lambda score: None) -> Score:
    """Count a run's right answers.

    Args:
        overall: a benchmark's own figure.
    """
    found, units = Score({ALL: [0, 0]}), {}
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
    found.overall = overall(found) if found.groups[ALL][1] else None
    return found


def summary(run: Run, score: Score) -> dict:
    """Return a run's score as a JSON object."""
    answered = [record for record in run.records.values() if "error" not in record]
    figures = {
        name: statistics.median(record["figures"][name] for record in answered)
        for name in (answered[0]["figures"] if answered else ())
        if all(isinstance(record["figures"].get(name), int | float) for record in answered)
    }
    groups: dict[str, dict[str, dict]] = {}
    for (dimension, value), count in sorted(score.groups.items()):
        if (dimension, value) != ALL:
            groups.setdefault(dimension, {})[value] = _counted(*count)
    return {
        "settings": dict(run.settings),
        **_counted(*score.groups[ALL]),
        "overall": score.overall,
        **score.others,
        "groups": groups,
        "medians": figures,
    }


def _counted(right: int, total: int) -> dict:
    return {
        "right": right,
        "total": total,
        "share": right / total if total else None,
        "interval": list(wilson(right, total)) if total else None,
    }


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Name runs by the settings in which they differ."""
    names = sorted({name for run in runs for name in run.settings})
    first = runs[0].settings
    differing = [name for name in names if any(run.settings.get(name) != first.get(name) for run in runs)]
    shown = [{name: "–" if value is None else value for name, value in run.settings.items()} for run in runs]
    named = [", ".join(f"{name} {values.get(name, '–')}" for name in differing) for values in shown]
    return named if differing else [digest_of(run.settings) for run in runs]


def markdown(runs: Sequence[Run], scores: Sequence[Score]) -> str:
    """Format runs as a table: a column for each run, a row for each kind of question; per cent, with intervals.

    The last column says how many questions were asked, of each run where these numbers differ.
    """
    header = ["% right", *(labels_of(runs) if len(runs) > 1 else ["(95 % interval)"]), "questions"]
    present = {group for score in scores for group in score.groups} - {ALL}
    rows = []
    for group in (ALL, *sorted(present)):
        counts = [score.groups.get(group, [0, 0]) for score in scores]
        cells = [percent_cell(*count) for count in counts]
        totals = [count[1] for count in counts]
        asked = totals[0] if len(set(totals)) == 1 else ", ".join(map(str, totals))
        rows.append([": ".join(filter(None, group)), *cells, asked])
    if any(score.overall is not None for score in scores):
        shares = ["" if score.overall is None else f"{100 * score.overall:.1f}" for score in scores]
        rows.insert(1, ["overall, by the benchmark's rule", *shares, ""])
    for name in OTHERS:
        if any(numbers := [score.others[name] for score in scores]):
            rows.append([f"({name})", *numbers, ""])
    medians = [summary(run, score)["medians"] for run, score in zip(runs, scores, strict=True)]
    shown = {"num_input_tokens": "tokens (median)", "ttft_ms": "ms to first token", "total_ms": "ms"}
    for name, title in shown.items():
        if all(name in each for each in medians):
            rows.append([title, *(f"{each[name]:.0f}" for each in medians), ""])
    return markdown_table(header, rows, align="---")
