"""Parametrize a test by fewer combinations: enough to show every choice, or every two choices together, once.

A mistake seldom needs three particular choices at once, and the number of pairs grows more slowly than that of all
combinations (all-pairs testing).
"""

from collections.abc import Collection
from itertools import combinations, product

import pytest


def each_choice(**columns: Collection) -> pytest.MarkDecorator:
    """Parametrize with as many rows as the longest column has; shorter ones begin again."""
    choices = [list(column) for column in columns.values()]
    rows = [tuple(column[i % len(column)] for column in choices) for i in range(max(map(len, choices)))]
    return pytest.mark.parametrize(tuple(columns), rows)


def pairwise(**columns: Collection) -> pytest.MarkDecorator:
    """Parametrize with rows that show every two choices of different columns together.

    Chosen greedily: each time the first of all rows that adds the most pairs.
    """
    choices = [list(column) for column in columns.values()]
    rows = list(product(*map(range, map(len, choices))))
    shown = [set(combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*shown), []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(shown[place] & missing))
        missing -= shown[best]
        chosen.append(best)
    picked = [tuple(map(list.__getitem__, choices, rows[place])) for place in sorted(chosen)]
    return pytest.mark.parametrize(tuple(columns), picked)


# The marks of the same names, which say the same of a test's own parametrization.
MARKS = {"each_choice": (1, "thorough"), "pairwise": (2, "exhaustive")}


def covering(rows, strength: int) -> list[int]:
    together = min(strength, len(rows[0]))
    shown = [
        {tuple((i, row[i]) for i in columns) for columns in combinations(range(len(row)), together)}
        for row in rows
    ]
    missing, chosen = set().union(*shown), []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(shown[place] & missing))
        missing -= shown[best]
        chosen.append(best)
    return sorted(chosen)


def leave_out_combinations(items) -> None:
    for name, (strength, mark) in MARKS.items():
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(name):
                tests.setdefault(item.nodeid.split("[")[0], []).append(item)
        for combined in tests.values():
            rows = [tuple(map(repr, item.callspec.params.values())) for item in combined]
            for place in set(range(len(combined))) - set(covering(rows, strength)):
                combined[place].add_marker(getattr(pytest.mark, mark))
