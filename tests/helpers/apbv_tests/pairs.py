"""Parametrize a test by fewer combinations: enough to show every choice, or every two choices
together, once.

A mistake seldom needs three particular choices at once, and the number of pairs grows more slowly
than that of all combinations (all-pairs testing).
"""

from collections.abc import Collection
from itertools import combinations, product

import pytest


def each_choice(**columns: Collection) -> pytest.MarkDecorator:
    """Parametrize with as many rows as the longest column has; shorter ones begin again."""
    choices = [list(column) for column in columns.values()]
    rows = [
        tuple(column[i % len(column)] for column in choices) for i in range(max(map(len, choices)))
    ]
    return pytest.mark.parametrize(tuple(columns), rows)


def pairwise(**columns: Collection) -> pytest.MarkDecorator:
    """Parametrize with rows that show every two choices of different columns together.

    Chosen greedily: each time the first of all rows that adds the most pairs.
    """
    choices = [list(column) for column in columns.values()]
    rows = list(product(*map(range, map(len, choices))))
    shown = [set(combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*shown)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(shown[place] & missing))
        missing -= shown[best]
        chosen.append(best)
    picked = [tuple(map(list.__getitem__, choices, rows[place])) for place in sorted(chosen)]
    return pytest.mark.parametrize(tuple(columns), picked)
