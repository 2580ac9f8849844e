"""Turns the records of ``systems.py`` into a table and a plot."""

import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ..plots import import_pyplot, legend_beside, save
from ..summaries import percent_cell, sum_counts
from support.tables import markdown_table

_MARKS = {"exact": "s", "sparse": "^", "fewer tokens": "o", "hosts": "D"}


@dataclass(frozen=True)
class Row:
    """What was measured of one way on all clips.

    Attributes:
        label, kind, hosts: of the way.
        clips: how many clips it was asked about.
        right: of every task, the right answers and all of them.
        kept: the share of visual tokens in the KV, on average over layers and clips.
        ttft_ms, prefill_ms: medians over the answers, with and without reading and encoding frames.
    """

    label: str
    kind: str
    hosts: int
    clips: int
    right: dict[str, tuple[int, int]]
    kept: float
    ttft_ms: float
    prefill_ms: float

    @property
    def accuracy(self) -> float:
        """Return the mean over the tasks of the share of right answers, in per cent."""
        return 100 * statistics.mean(right / total for right, total in self.right.values())


def summarise(records: list[dict]) -> list[Row]:
    """Sum the records of every way, in the order in which they first come."""
    ways: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        ways[record["label"], record["kind"], record["hosts"], record["shots"], record["grid"]].append(record)
    rows = []
    for (label, kind, hosts, *_), of_way in ways.items():
        kept = [number / r["num_visual_tokens"] for r in of_way for number in r["num_visual_kept"]]
        times = {
            name: statistics.median(ms for record in of_way for ms in record[name])
            for name in ("ttft_ms", "prefill_ms")
        }
        right = sum_counts(record["right"] for record in of_way)
        rows.append(Row(label, kind, hosts, len(of_way), right, statistics.mean(kept), **times))
    return rows


def table(records: list[dict]) -> str:
    """Format the records as a Markdown table, with 95 % intervals in brackets."""
    rows = summarise(records)
    tasks = list(rows[0].right) if rows else []
    full = next((row for row in rows if row.label == "full"), None)
    header = ["system", "hosts", "clips", "visual tokens", "TTFT ms", "of it prefill", "vs full", *tasks]
    return markdown_table(header, [_cells(row, full) for row in rows])


def _cells(row: Row, full: Row | None) -> list:
    hosts = row.hosts if row.hosts == 1 else f"{row.hosts} (simulated)"
    times = [f"{row.ttft_ms:.0f}", f"{row.prefill_ms:.0f}"]
    speed = "–" if full is None else f"{full.ttft_ms / row.ttft_ms:.2f} ×"
    right = [percent_cell(*counts) for counts in row.right.values()]
    return [row.label, hosts, row.clips, f"{100 * row.kept:.0f} %", *times, speed, *right]


def plot(records: list[dict], path: Path) -> None:
    """Plot accuracy against time to first token (the APB-V paper's Figure 1), and against visual tokens kept.

    A colour is a system; where it was measured at several ratios, the second is hollow.
    """
    rows, pyplot = summarise(records), import_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    systems = list(dict.fromkeys(_without_ratio(row) for row in rows))
    shown = set()
    for row in rows:
        system = _without_ratio(row)
        style = {"marker": _MARKS[row.kind], "color": pyplot.get_cmap("tab20")(systems.index(system) % 20)}
        filled = {"markerfacecolor": "none"} if system in shown else {}
        label = row.label if row.hosts == 1 else f"{row.label}, {row.hosts} hosts"
        for axes, place in zip(panels, (row.ttft_ms, 100 * row.kept), strict=True):
            axes.plot(place, row.accuracy, label=label, linestyle="none", **style, **filled)
        shown.add(system)
    panels[0].set(xlabel="time to first token, ms", ylabel="right answers, mean of the tasks, %")
    panels[1].set_xlabel("visual tokens in the KV, %")
    for axes in panels:
        axes.grid(alpha=0.3)
    legend_beside(panels[1])
    save(figure, path)


def _without_ratio(row: Row) -> str:
    """Return a way's name without the share of tokens that it keeps."""
    return re.sub(r", 0\.\d+$", "", row.label)
