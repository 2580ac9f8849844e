"""Combinations of parameters that show every choice, or every pair of choices."""

from itertools import product

import pytest

from pairs import covering


@pytest.mark.parametrize("sizes", [(2, 2), (8, 5, 2), (2, 3, 4, 6), (3,) * 5], ids=str)
def test_every_pair_is_shown_by_fewer_combinations(sizes):
    rows = list(product(*map(range, sizes)))
    chosen = [rows[place] for place in covering(rows)]
    for i in range(len(sizes)):
        for j in range(i):
            assert {(row[i], row[j]) for row in chosen} == set(product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) < len(rows) or len(sizes) == 2
    assert len(chosen) <= 2 * max(sizes[i] * sizes[j] for i in range(len(sizes)) for j in range(i))


def test_of_combinations_that_are_not_all_there_no_pair_is_lost():
    rows = [(0, 0, 0), (0, 1, 1), (1, 1, 0)]
    assert covering(rows) == [0, 1, 2]


def test_every_choice_is_shown_by_few_combinations():
    rows = list(product(range(8), range(5), range(2)))
    chosen = [rows[place] for place in covering(rows, strength=1)]
    assert len(chosen) == 8
    assert [set(column) for column in zip(*chosen, strict=True)] == [set(range(size)) for size in (8, 5, 2)]
