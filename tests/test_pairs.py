"""Parametrized by combinations that show every choice, or every pair of choices."""

from itertools import product

import pytest

from pairs import each_choice, pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (8, 5, 2), (2, 3, 4, 6)], ids=str)
def test_every_choice_and_every_pair_is_shown(sizes):
    columns = {f"c{i}": range(size) for i, size in enumerate(sizes)}
    names, pairs = pairwise(**columns).args
    assert names == tuple(columns)
    for i in range(len(sizes)):
        for j in range(i):
            assert {(row[i], row[j]) for row in pairs} == set(product(range(sizes[i]), range(sizes[j])))
    _, choices = each_choice(**columns).args
    assert [set(column) for column in zip(*choices, strict=True)] == [set(range(size)) for size in sizes]
    assert len(choices) == max(sizes) and len(choices) < len(pairs)
