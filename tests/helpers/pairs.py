"""Parametrize a test by fewer combinations: enough to show every choice, or every two choices together, once.

A mistake seldom needs three particular choices at once, and the number of pairs grows more slowly than that of all
combinations (all-pairs testing).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest


def pairwise(**columns: Iterable) -> pytest.MarkDecorator:
    """Parametrize with combinations that show every two choices of different columns together."""
    return _parametrized(2, columns)


def each_choice(**columns: Iterable) -> pytest.MarkDecorator:
    """Parametrize with combinations that show every choice of every column."""
    return _parametrized(1, columns)


def _parametrized(strength: int, columns: dict[str, Iterable]) -> pytest.MarkDecorator:
    choices = [list(column) for column in columns.values()]
    places = list(product(*(range(len(column)) for column in choices)))
    rows = [tuple(map(list.__getitem__, choices, places[i])) for i in covering(places, strength)]
    return pytest.mark.parametrize(tuple(columns), rows)


def covering(rows: Sequence[tuple], strength: int) -> list[int]:
    """The places of some rows that show all that all rows show: every ``strength`` values in as many columns.

    Chosen greedily: each time the first of the rows that add the most.
    """
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


MARKS = {"each_choice": (1, "thorough"), "pairwise": (2, "exhaustive")}


def leave_out_combinations(items: Sequence[pytest.Item]) -> None:
    """Mark what a test has beyond the combinations that its own mark asks for."""
    for name, (strength, mark) in MARKS.items():
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(name):
                tests.setdefault(item.nodeid.split("[")[0], []).append(item)
        for combined in tests.values():
            rows = [tuple(map(repr, item.callspec.params.values())) for item in combined]
            for place in set(range(len(combined))) - set(covering(rows, strength)):
                combined[place].add_marker(getattr(pytest.mark, mark))
