"""Tables of RULER's records: each row's divergence from ``full``, and differences between rows."""

import statistics

from ..records import markdown_table
from ..summaries import grouped, mean_cell


def kl_table(records: list[dict]) -> str:
    """Format each row's divergence from ``full``, by length and number of hosts.

    The number of samples stands in brackets.
    """
    # Divergences by row and by column, which is a length and a number of hosts.
    divergences: dict[str, dict[tuple[int, int], list[float]]] = {}
    for record in records:
        if record["label"] != "full":
            of_row = divergences.setdefault(record["label"], {})
            column = (record["num_tokens"], record["hosts"])
            of_row.setdefault(column, []).append(record["kl"])
    columns = set()
    for of_row in divergences.values():
        columns.update(of_row)
    columns = sorted(columns)

    header = ["row"]
    for num_tokens, hosts in columns:
        header.append(f"{num_tokens:,}, {hosts} hosts")
    lines = []
    for label, of_row in divergences.items():
        line = [label]
        for column in columns:
            samples = of_row.get(column)
            line.append(f"{mean_cell(samples, '.3f')} ({len(samples)})" if samples else "")
        lines.append(line)
    return markdown_table(header, lines)


def difference_table(records: list[dict]) -> str:
    """Format how each row differs from ``apbv`` and from ``full``.

    Compared are the samples, of all lengths, that both rows have. A sample counts once, with the
    mean over the numbers of hosts.
    """
    by_row = grouped(records, "label")

    # The rows to compare with. What ``full`` answers does not depend on the number of hosts.
    kl_of_apbv = {}
    for record in by_row.get(("apbv",), []):
        kl_of_apbv[_sample(record), record["hosts"]] = record["kl"]
    right_of_full = {}
    for record in by_row.get(("full",), []):
        right_of_full[_sample(record)] = record["right"]

    lines = []
    for (label,), records_of_row in by_row.items():
        if label == "full":
            continue
        kl_differences: dict[tuple, list[float]] = {}
        point_differences: dict[tuple, list[float]] = {}
        for record in records_of_row:
            sample = _sample(record)
            same_of_apbv = (sample, record["hosts"])
            if label != "apbv" and same_of_apbv in kl_of_apbv:
                difference = record["kl"] - kl_of_apbv[same_of_apbv]
                kl_differences.setdefault(sample, []).append(difference)
            if sample in right_of_full:
                difference = 100 * (record["right"] - right_of_full[sample])
                point_differences.setdefault(sample, []).append(difference)
        lines.append(
            [
                label,
                *_difference_cells(kl_differences, "+.3f"),
                *_difference_cells(point_differences, "+.1f"),
            ]
        )
    return markdown_table(
        ["row", "samples", "KL more than `apbv`", "samples", "points to `full`"], lines
    )


def _difference_cells(differences: dict[tuple, list[float]], form: str) -> list[object]:
    """Return the cells of how many samples there are, and of their mean difference.

    Args:
        differences: by sample, of all numbers of hosts.
        form: the format of the mean.
    """
    if not differences:
        return ["", ""]
    means = [statistics.fmean(of_sample) for of_sample in differences.values()]
    return [len(means), mean_cell(means, form)]


def _sample(record: dict) -> tuple:
    return record["task"], record["num_tokens"], record["index"]
