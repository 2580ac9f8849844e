"""Parts of KV that make up a whole: which rows go where, and that nothing is missing or there
twice."""

from apbv.kv.facts import cover_once, rows_of


def test_rows_lie_where_their_tokens_are_wanted():
    found = list(rows_of([(2, 5), (9, 12)], [range(10, 14), range(0, 4)]))
    assert found == [(slice(0, 2), slice(4 + 2, 4 + 4)), (slice(4, 6), slice(0, 2))]


SHARDS = [
    ([([(10, 13), (15, 19)], (1, 3)), ([(13, 15)], (1, 2)), ([(13, 15)], (2, 3))], True),
    ([([(10, 15)], (1, 3)), ([(14, 18)], (1, 3))], False),  # as many tokens, one of them twice
    ([([(10, 19)], (1, 2)), ([(10, 19)], (1, 2))], False),
    ([([(10, 18)], (1, 3))], False),
    ([([(10, 10**30)], (1, 3))], False),  # found before memory is allocated
]


def test_every_token_and_head_is_held_once():
    for shards, covers in SHARDS:
        assert cover_once(shards, range(1, 3), range(10, 19)) is covers
