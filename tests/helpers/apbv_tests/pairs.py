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
    num_rows = max(len(column) for column in choices)
    rows = []
    for number in range(num_rows):
        rows.append(tuple(column[number % len(column)] for column in choices))
    return pytest.mark.parametrize(tuple(columns), rows)


def pairwise(**columns: Collection) -> pytest.MarkDecorator:
    """Parametrize with rows that show every two choices of different columns together.

    Chosen greedily: each time the first of all rows that adds the most pairs.
    """
    rows = list(product(*columns.values()))
    # By column, since columns may have choices in common.
    places = list(product(*[range(len(column)) for column in columns.values()]))
    shown = [set(combinations(enumerate(row), 2)) for row in places]
    missing = set().union(*shown)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(shown[row] & missing))
        missing -= shown[best]
        chosen.append(best)
    return pytest.mark.parametrize(tuple(columns), [rows[row] for row in sorted(chosen)])
