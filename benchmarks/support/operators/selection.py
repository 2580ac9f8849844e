"""The cases of merging, choosing keys and scoring visual tokens."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from apbv.kernels import (
    kv_importance,
    merge_states,
    reference,
    segmented_attention,
    select_topk,
    similarity_to,
    spatial_variety,
    temporal_change,
)

from .case import ATTENTION_TOLERANCE, Case, Draw, Piece, Sizes, heads_of, local_kv, whole

_CROP = 5  # tokens per side, as in HIPPO


def merge(s: Sizes) -> Case:
    """Build the case of the question's partial results of all hosts."""
    rows = s.query_len * s.heads

    def make(draw: Draw) -> tuple:
        outs = draw.randn(s.hosts, 1, s.heads, s.query_len, s.head_dim)
        return outs, draw.randn(*outs.shape[:4], dtype=torch.float32)

    return Case(
        "merge_states",
        "query block of all hosts",
        asdict(s),
        2 * s.hosts * rows * s.head_dim,
        lambda dtype: rows * (s.hosts * (s.head_dim * dtype.itemsize + 4) + 4 * s.head_dim + 4),
        make,
        lambda ops, backend: merge_states(*ops, backend=backend),
        whole(reference.merge_states),
        lambda dtype: (1e-5, 1e-5),
    )


def merge_into_place(s: Sizes) -> Case:
    """Build the case of the first block with the anchor, and of what the block sees of others, in one output."""
    rows = (s.anchor + s.block, s.block)
    wide, itemsize = s.heads * s.head_dim, torch.float32.itemsize

    def make(draw: Draw) -> tuple:
        outs = [draw.states(s.heads, count, s.head_dim) for count in rows]
        lses = [draw.randn(1, s.heads, count, dtype=torch.float32) for count in rows]
        return torch.empty_like(outs[0]), outs, lses

    return Case(
        "merge_states",
        "first block, in its place",
        asdict(s),
        2 * sum(rows) * wide,
        lambda dtype: (rows[0] + sum(rows)) * (wide * dtype.itemsize + s.heads * itemsize),
        make,
        lambda ops, backend: merge_states(*ops[1:], out=ops[0], backend=backend),
        whole(lambda out, *partial: reference.merge_states(*partial)),
        lambda dtype: (ATTENTION_TOLERANCE[dtype], 1e-5),
    )


def importance(s: Sizes, reduce: str) -> Case:
    """Build the case of ranking a block's keys by the question, whose attention to them is known."""
    scale = s.head_dim**-0.5
    rows = s.kv_heads if reduce == "dot" else s.heads * s.query_len

    def make(draw: Draw) -> tuple:
        q, k = draw.states(s.heads, s.query_len, s.head_dim), draw.states(s.kv_heads, s.block, s.head_dim)
        return q, k, segmented_attention(q, [(k, k)], scale, causal_last=False, backend="torch")[1]

    def exact(ops: tuple) -> Iterator[Piece]:
        q, k, _ = ops
        for group, one in heads_of(s):
            yield (slice(None), one), (reference.kv_importance(q[:, group], k[:, one], scale, reduce),)

    return Case(
        "kv_importance",
        reduce,
        asdict(s) | {"queries": s.query_len, "keys": s.block},
        2 * s.head_dim * rows * s.block,
        lambda dtype: (
            (s.query_len * s.heads + s.block * s.kv_heads) * s.head_dim * dtype.itemsize + 4 * s.block * s.kv_heads
        ),
        make,
        lambda ops, backend: (kv_importance(*ops[:2], scale, reduce, lse=ops[2], backend=backend),),
        exact,
    )


def topk(s: Sizes) -> Case:
    """Build the case of a block's best KV pairs, which are copied to the buffer that is sent."""

    def make(draw: Draw) -> tuple:
        return draw.randn(1, s.kv_heads, s.block, dtype=torch.float32), *local_kv(draw, s, s.block), s.passing

    return Case(
        "select_topk",
        f"{s.passing} of {s.block}",
        asdict(s) | {"keys": s.block},
        0,
        lambda dtype: s.kv_heads * (4 * s.block + s.passing * (4 * s.head_dim * dtype.itemsize + 8)),
        make,
        lambda ops, backend: select_topk(*ops, backend=backend),
        whole(reference.select_topk),
        lambda dtype: (0.0, 0.0),
    )


def visual_scores(s: Sizes) -> list[Case]:
    """Build the cases of scoring a video's tokens: by change, by variety, and by similarity to one direction."""
    count, label = s.frames * s.height * s.width, f"{s.frames} frames of {s.height} x {s.width}"

    def crops(length: int) -> list[int]:
        """Return the lengths into which crops cut a side; the last may be shorter."""
        return [min(_CROP, length - start) for start in range(0, length, _CROP)]

    def exact_variety(ops: tuple) -> Iterator[Piece]:
        for frame in range(s.frames):
            one = slice(frame, frame + 1)
            yield one, (reference.spatial_variety(ops[0][one], s.height, s.width, _CROP),)

    def case(op: str, products: int, run: Callable[[tuple], Tensor], exact) -> Case:
        return Case(
            op,
            label,
            asdict(s),
            2 * products * s.hidden,
            lambda dtype: count * (s.hidden * dtype.itemsize + 4),
            lambda draw: (draw.randn(s.frames, s.height * s.width, s.hidden), draw.randn(s.hidden)),
            lambda ops, backend: (run(ops),),
            exact,
            chosen=lambda ops, backend: "torch",
        )

    neighbours = sum(h * h for h in crops(s.height)) * sum(w * w for w in crops(s.width)) * s.frames
    return [
        case(
            "temporal_change",
            2 * count,
            lambda ops: temporal_change(ops[0]),
            whole(lambda frames, _: reference.temporal_change(frames)),
        ),
        case(
            "spatial_variety",
            neighbours,
            lambda ops: spatial_variety(ops[0], s.height, s.width, _CROP),
            exact_variety,
        ),
        case(
            "similarity_to",
            2 * count,
            lambda ops: similarity_to(ops[0].flatten(0, 1), ops[1]),
            whole(lambda frames, direction: reference.similarity_to(frames.flatten(0, 1), direction)),
        ),
    ]
