"""This module says which rows of which shard a part of a prompt's KV consists of; integers only.

A shard's rows are its runs of token numbers, ``[start, stop)`` and ascending, one behind the other.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..layout import intersect

Run = tuple[int, int]


def length(run: Run) -> int:
    """Count the tokens of a run ``[start, stop)``."""
    return run[1] - run[0]


def rows_of(runs: Sequence[Run], wanted: Sequence[range]) -> Iterator[tuple[slice, slice]]:
    """Yield which rows of a shard belong to the wanted tokens, and their places among these."""
    row = 0
    for run in runs:
        place = 0
        for tokens in wanted:
            common = intersect(range(*run), tokens)
            if common:
                start, at = row + common.start - run[0], place + common.start - tokens.start
                yield slice(start, start + len(common)), slice(at, at + len(common))
            place += len(tokens)
        row += length(run)


def cover_once(shards: Iterable[tuple[Sequence[Run], Run]], kv_heads: range, tokens: range) -> bool:
    """Return whether shards hold every one of some tokens, of every one of some KV heads, exactly once.

    Args:
        shards: of each the runs of tokens and the range of KV heads, all within those asked about.
    """
    shards = list(shards)
    num_heads, num_tokens = kv_heads.stop - kv_heads.start, tokens.stop - tokens.start
    cells = sum(length(heads) * sum(map(length, runs)) for runs, heads in shards)
    if cells != num_heads * num_tokens:  # checked before memory is allocated
        return False
    held = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    for runs, heads in shards:
        for start, stop in runs:
            of_heads = slice(heads[0] - kv_heads.start, heads[1] - kv_heads.start)
            held[of_heads, start - tokens.start : stop - tokens.start] = True
    return bool(held.all())
