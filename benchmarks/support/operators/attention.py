"""The cases of attention: over segments, and of a few new tokens over long KV."""

from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from apbv.kernels import reference, segmented_attention, verify_attention
from apbv.kernels.library_attention import choose_attention

from .case import ATTENTION_TOLERANCE, Case, Draw, Piece, Sizes, heads_of, local_kv

# Number of queries that are compared, and of those in one run: every score is an fp64 number in memory.
_CHECKED_QUERIES, _RUN = 2048, 128


def _segmented(s: Sizes, label: str, queries: int, keys: list[int], segments=None, rows_alone: int = 0) -> Case:
    """Build a case whose last segment is causal, and at least as long as there are queries.

    Args:
        keys: the segments' lengths.
        segments: function that draws their keys and values; None: they are as projections leave them.
    """
    last, before = keys[-1], sum(keys[:-1])
    seen = (queries - rows_alone) * before + queries * (last - queries) + queries * (queries + 1) // 2
    rows = 2 * queries * s.heads + 2 * sum(keys) * s.kv_heads
    scale = s.head_dim**-0.5

    def make(draw: Draw) -> tuple:
        drawn = segments(draw) if segments else [local_kv(draw, s, length) for length in keys]
        return draw.states(s.heads, queries, s.head_dim), drawn

    return Case(
        "segmented_attention",
        label,
        asdict(s) | {"queries": queries, "keys": sum(keys), "segments": len(keys)},
        4 * s.head_dim * s.heads * seen,
        lambda dtype: rows * s.head_dim * dtype.itemsize + 4 * queries * s.heads,
        make,
        lambda ops, backend: segmented_attention(
            ops[0], ops[1], scale, causal_last=True, rows_alone=rows_alone, backend=backend
        ),
        lambda ops: _attention_pieces(s, *ops, rows_alone),
        lambda dtype: (ATTENTION_TOLERANCE[dtype], 1e-4),
        lambda ops, backend: choose_attention(backend, *ops),
        is_segmented=True,
        rows_alone=rows_alone,
    )


def block(s: Sizes) -> Case:
    """Build the case of the last block, which sees the anchor, what all others pass on, and causally itself."""

    def segments(draw: Draw) -> list:
        local = local_kv(draw, s, s.anchor + s.block)
        anchor, block = ([x[:, :, rows] for x in local] for rows in (slice(s.anchor), slice(s.anchor, None)))
        return [anchor, *_passed(draw, s), block]

    keys = [s.anchor, *[s.passing] * (2 * s.hosts - 1), s.block]
    return _segmented(s, "anchor, passing blocks, block", s.block, keys, segments)


def block_with_anchor(s: Sizes) -> Case:
    """Build the case of :func:`block` with the anchor's own queries, which see only the anchor."""
    rows = s.anchor + s.block

    def segments(draw: Draw) -> list:
        return [*_passed(draw, s), local_kv(draw, s, rows)]

    keys = [*[s.passing] * (2 * s.hosts - 1), rows]
    return _segmented(s, "passing blocks, anchor and block", rows, keys, segments, s.anchor)


def causal(s: Sizes) -> Case:
    """Build the case of a whole prompt."""
    return _segmented(s, "causal", s.tokens, [s.tokens])


def query(s: Sizes) -> Case:
    """Build the case of the question over a host's slice of the anchor, its two blocks, and the question."""
    return _segmented(s, "query block", s.query_len, [s.anchor // s.hosts, 2 * s.block + s.query_len])


def _passed(draw: Draw, s: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Draw passing blocks as they arrive: one buffer with K and V per sender."""
    return [tuple(draw.randn(2, 1, s.kv_heads, s.passing, s.head_dim)) for _ in range(2 * s.hosts - 1)]


def _attention_pieces(s: Sizes, q: Tensor, segments: list, rows_alone: int) -> Iterator[Piece]:
    """Yield the exact results of runs of queries, KV head by KV head."""
    queries, scale = q.shape[2], s.head_dim**-0.5
    for group, one in heads_of(s):
        *before, last = ([x[:, one] for x in pair] for pair in segments)
        for rows in _runs(queries):
            # Without the keys that only later rows see, causality is bottom-right for these rows alone.
            seen = [x[:, :, : x.shape[2] - queries + rows.stop] for x in last]
            alone = min(max(0, rows_alone - rows.start), rows.stop - rows.start)
            place = slice(None), group, rows
            exact = reference.segmented_attention(
                q[place].double(), [*before, seen], scale, True, rows_alone=alone
            )
            yield place, exact


def _runs(length: int) -> list[slice]:
    """Return the rows to compare: all, or runs that are spread evenly from the first to the last row."""
    if length <= _CHECKED_QUERIES:
        starts = range(0, length, _RUN)
    else:
        count = _CHECKED_QUERIES // _RUN
        starts = [i * (length - _RUN) // (count - 1) for i in range(count)]
    return [slice(start, min(start + _RUN, length)) for start in starts]


def verify(s: Sizes, queries: int, tree: bool = False) -> Case:
    """Build the case of a few new tokens over long KV, in a row or in a tree."""
    past, scale = s.tokens - queries, s.head_dim**-0.5
    masked = int(_binary_tree(queries).sum()) if tree else queries * (queries + 1) // 2
    rows = 2 * queries * s.heads + 2 * s.tokens * s.kv_heads
    what = ", a tree" if tree else ""

    def make(draw: Draw) -> tuple:
        return (
            draw.states(s.heads, queries, s.head_dim),
            # In the cache a head's rows lie one after the other.
            draw.randn(1, s.kv_heads, s.tokens, s.head_dim),
            draw.randn(1, s.kv_heads, s.tokens, s.head_dim),
            _binary_tree(queries).to(draw.device) if tree else None,
        )

    def exact(ops: tuple) -> Iterator[Piece]:
        q, k, v, visible = ops
        for group, one in heads_of(s):
            own = q[:, group].double(), k[:, one], v[:, one]
            yield (slice(None), group), reference.verify_attention(*own, scale, visible=visible)

    return Case(
        "verify_attention",
        f"{queries} {'token' if queries == 1 else 'tokens'}{what}",
        asdict(s) | {"queries": queries, "keys": s.tokens},
        4 * s.head_dim * s.heads * (queries * past + masked),
        lambda dtype: rows * s.head_dim * dtype.itemsize,
        make,
        lambda ops, backend: verify_attention(*ops[:3], scale, visible=ops[3], backend=backend),
        exact,
        lambda dtype: (ATTENTION_TOLERANCE[dtype], 1e-4),
    )


def _binary_tree(nodes: int) -> Tensor:
    """Return the mask ``[S, S]`` of a complete binary tree, whose nodes see themselves and their ancestors."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        visible[node] |= visible[(node - 1) // 2]
    return visible
