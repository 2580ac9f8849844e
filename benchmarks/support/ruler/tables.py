"""Tables of RULER's records: how much each row diverges from ``full``, and how rows differ on the
same samples."""

import statistics

from ..records import markdown_table
from ..summaries import grouped, mean_cell


def kl_table(records: list[dict]) -> str:
    """Format each row's divergence from ``full`` by length and number of hosts, with the number of
    samples."""
    of_place = grouped(records, "label", "num_tokens", "hosts")
    kl = {
        place: [record["kl"] for record in found]
        for place, found in of_place.items()
        if place[0] != "full"
    }
    columns = sorted({place[1:] for place in kl})
    lines = []
    for label in dict.fromkeys(place[0] for place in kl):
        cells = [kl.get((label, *column)) for column in columns]
        lines.append(
            [label, *(f"{mean_cell(cell, '.3f')} ({len(cell)})" if cell else "" for cell in cells)]
        )
    return markdown_table(
        ["row", *(f"{num_tokens:,}, {hosts} hosts" for num_tokens, hosts in columns)], lines
    )


def difference_table(records: list[dict]) -> str:
    """Format how each row differs from ``apbv`` and from ``full``, over the samples of all lengths
    that both have.

    A sample counts once, with the mean over the numbers of hosts.
    """
    by_row = grouped(records, "label")
    lines = []
    usual = {
        (*_sample(record), record["hosts"]): record["kl"] for record in by_row.get(("apbv",), [])
    }
    exact = {_sample(record): record["right"] for record in by_row.get(("full",), [])}
    for label in (row for (row,) in by_row if row != "full"):
        more: dict[tuple, list[float]] = {}
        points: dict[tuple, list[float]] = {}
        for record in by_row[label,]:
            sample = _sample(record)
            if label != "apbv" and (*sample, record["hosts"]) in usual:
                more.setdefault(sample, []).append(record["kl"] - usual[*sample, record["hosts"]])
            if sample in exact:
                points.setdefault(sample, []).append(100 * (record["right"] - exact[sample]))
        cells = []
        for found, form in ((more, "+.3f"), (points, "+.1f")):
            means = [statistics.fmean(each) for each in found.values()]
            cells += [len(means), mean_cell(means, form)] if means else ["", ""]
        lines.append([label, *cells])
    return markdown_table(
        ["row", "samples", "KL more than `apbv`", "samples", "points to `full`"], lines
    )


def _sample(record: dict) -> tuple:
    return record["task"], record["num_tokens"], record["index"]
