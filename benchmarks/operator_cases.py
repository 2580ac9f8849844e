"""The operators at the sizes that a prefill and a decoding step give them: operands, exact results and counts.

Counted are the floating-point operations of the matrix products, where what nobody sees costs nothing, and the
fewest bytes: every operand read once, every result written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

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
    verify_attention,
)
from apbv.kernels.backends import choose
from apbv.kernels.library_attention import choose_attention

Outputs = tuple[Tensor, ...]
# Picks what an exact result is of out of an operator's outputs; and that exact result.
Piece = tuple[Callable[[Outputs], Outputs], Outputs]

# |out - exact| / |exact| of an attention's output: half precision rounds the weights, and every partial result.
_OUT = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Of results in fp32 of operands in a lower precision, whose products are exact.
_FP32 = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
# Exact results of so many queries, in runs of so many, are compared: every score is an fp64 number in memory.
_CHECKED_QUERIES, _RUN = 2048, 128
_CROP = 5  # tokens per side, HIPPO's


@dataclass(frozen=True)
class Sizes:
    """A model's and a prompt's.

    Attributes:
        tokens: n, in the context; keys behind which tokens are verified.
        hosts: H; the context is cut into 2H blocks.
        query_len: tokens of the question.
        frames, height, width: the video's visual tokens.
        hidden: numbers of a visual token's embedding.
    """

    tokens: int
    hosts: int
    heads: int
    kv_heads: int
    head_dim: int
    query_len: int
    frames: int
    height: int
    width: int
    hidden: int

    @property
    def block(self) -> int:
        return self.tokens // (2 * self.hosts)

    @property
    def anchor(self) -> int:
        return max(128, -(-self.tokens // 64))

    @property
    def passing(self) -> int:
        return min(self.block, max(128, -(-self.tokens // 128)))


class Draw:
    """Random operands, others for every seed."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def states(self, heads: int, rows: int, dim: int) -> Tensor:
        """``[1, H, S, D]`` as projections leave it: the heads of a token lie side by side."""
        return self.randn(1, rows, heads, dim).transpose(1, 2)

    def subset(self, heads: int, of: int, count: int) -> Tensor:
        """``[1, H, M]``: ascending places."""
        noise = torch.rand(1, heads, of, generator=self._generator, device=self.device)
        return noise.topk(count, dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True)
class Case:
    """An operator on operands of one size.

    Attributes:
        make: draws operands.
        run: (operands, backend) to outputs.
        exact: (operands) to pieces of the result in fp64.
        tolerance: dtype to the relative error allowed for each output.
        chosen: (operands, backend) to the back end that would run; raises BackendError.
        is_segmented: whether libraries of attention kernels compute it.
        rows_alone: see :func:`apbv.kernels.segmented_attention`.
    """

    op: str
    label: str
    sizes: dict[str, int]
    flops: int
    bytes: Callable[[torch.dtype], int]
    make: Callable[[Draw], tuple]
    run: Callable[[tuple, str], Outputs]
    exact: Callable[[tuple], Iterator[Piece]]
    tolerance: Callable[[torch.dtype], tuple[float, ...]]
    chosen: Callable[[tuple, str], str]
    is_segmented: bool = False
    rows_alone: int = 0


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """All cases: those of attention and of choosing keys for every context length, the others once."""
    found: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        found += [_block(s), _block_with_anchor(s), _causal(s), _query(s)]
        found += [_verify(s, queries) for queries in (1, 4, 16)]
        found += [_verify(s, 4, kept=True), _verify(s, 16, tree=True)]
        found += [_importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        found.append(_topk(s))
    return [*found, _merge(sizes), _temporal(sizes), _spatial(sizes), _similarity(sizes)]


# --- attention over segments ---


def _segmented(s: Sizes, label: str, queries: int, keys: list[int], make, rows_alone: int = 0) -> Case:
    """The last segment is causal, and as long as there are queries at least."""
    last, before = keys[-1], sum(keys[:-1])
    seen = (queries - rows_alone) * before + queries * (last - queries) + queries * (queries + 1) // 2
    rows = 2 * queries * s.heads + 2 * sum(keys) * s.kv_heads
    scale = s.head_dim**-0.5
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
        lambda ops: _attention_pieces(*ops, scale, rows_alone),
        lambda dtype: (_OUT[dtype], 1e-4),
        lambda ops, backend: choose_attention(backend, *ops),
        is_segmented=True,
        rows_alone=rows_alone,
    )


def _block(s: Sizes) -> Case:
    """The last block, which sees the anchor, what all others pass on, and causally itself."""
    senders = 2 * s.hosts - 1

    def make(draw: Draw) -> tuple:
        local = _local(draw, s, s.anchor + s.block)
        anchor, block = ([x[:, :, rows] for x in local] for rows in (slice(s.anchor), slice(s.anchor, None)))
        return draw.states(s.heads, s.block, s.head_dim), [anchor, *_passed(draw, s, senders), block]

    keys = [s.anchor, *[s.passing] * senders, s.block]
    return _segmented(s, "anchor, passing blocks, block", s.block, keys, make)


def _block_with_anchor(s: Sizes) -> Case:
    """The same together with the anchor's own queries, which see only themselves."""
    senders = 2 * s.hosts - 1

    def make(draw: Draw) -> tuple:
        rows = s.anchor + s.block
        return draw.states(s.heads, rows, s.head_dim), [*_passed(draw, s, senders), _local(draw, s, rows)]

    keys = [*[s.passing] * senders, s.anchor + s.block]
    return _segmented(s, "passing blocks, anchor and block", s.anchor + s.block, keys, make, s.anchor)


def _causal(s: Sizes) -> Case:
    def make(draw: Draw) -> tuple:
        return draw.states(s.heads, s.tokens, s.head_dim), [_local(draw, s, s.tokens)]

    return _segmented(s, "causal", s.tokens, [s.tokens], make)


def _query(s: Sizes) -> Case:
    """The question over what a host keeps: its slice of the anchor, two blocks, and the question itself."""
    keys = [s.anchor // s.hosts, 2 * s.block + s.query_len]

    def make(draw: Draw) -> tuple:
        return draw.states(s.heads, s.query_len, s.head_dim), [_local(draw, s, rows) for rows in keys]

    return _segmented(s, "query block", s.query_len, keys, make)


def _local(draw: Draw, s: Sizes, rows: int) -> tuple[Tensor, Tensor]:
    return draw.states(s.kv_heads, rows, s.head_dim), draw.states(s.kv_heads, rows, s.head_dim)


def _passed(draw: Draw, s: Sizes, senders: int) -> list[tuple[Tensor, Tensor]]:
    """As it arrives: one buffer with K and V per sender."""
    return [tuple(draw.randn(2, 1, s.kv_heads, s.passing, s.head_dim)) for _ in range(senders)]


def _attention_pieces(q: Tensor, segments: list, scale: float, rows_alone: int) -> Iterator[Piece]:
    """Runs of queries of one KV head after the other."""
    queries, kv_heads = q.shape[2], segments[0][0].shape[1]
    for head in range(kv_heads):
        group = _group(q, kv_heads, head)
        *before, last = ([x[:, head : head + 1] for x in pair] for pair in segments)
        for rows in _runs(queries):
            # Bottom-right causality of the first rows alone: without the keys that only later rows see.
            seen = [x[:, :, : x.shape[2] - queries + rows.stop] for x in last]
            alone = min(max(0, rows_alone - rows.start), rows.stop - rows.start)
            exact = reference.segmented_attention(
                q[:, group, rows].double(), [*before, seen], scale, True, rows_alone=alone
            )
            yield lambda outs, group=group, rows=rows: tuple(x[:, group, rows] for x in outs), exact


def _group(q: Tensor, kv_heads: int, head: int) -> slice:
    groups = q.shape[1] // kv_heads
    return slice(head * groups, (head + 1) * groups)


def _runs(length: int) -> list[slice]:
    """Rows to compare: all of them, or so many in runs that are spread evenly, from the first to the last row."""
    if length <= _CHECKED_QUERIES:
        starts = range(0, length, _RUN)
    else:
        count = _CHECKED_QUERIES // _RUN
        starts = [i * (length - _RUN) // (count - 1) for i in range(count)]
    return [slice(start, min(start + _RUN, length)) for start in starts]


# --- attention of a few new tokens ---


def _verify(s: Sizes, queries: int, kept: bool = False, tree: bool = False) -> Case:
    past, scale = s.tokens - queries, s.head_dim**-0.5
    count = past // 10 if kept else past
    masked = int(_binary_tree(queries).sum()) if tree else queries * (queries + 1) // 2
    rows = 2 * queries * s.heads + 2 * (count + queries) * s.kv_heads
    what = ", a tenth kept" if kept else ", a tree" if tree else ""

    def make(draw: Draw) -> tuple:
        return (
            draw.states(s.heads, queries, s.head_dim),
            # The cache: a head's rows one after the other.
            draw.randn(1, s.kv_heads, s.tokens, s.head_dim),
            draw.randn(1, s.kv_heads, s.tokens, s.head_dim),
            _binary_tree(queries).to(draw.device) if tree else None,
            draw.subset(s.kv_heads, past, count) if kept else None,
        )

    def run(ops: tuple, backend: str) -> Outputs:
        q, k, v, visible, kept = ops
        return verify_attention(q, k, v, scale, visible=visible, kept=kept, backend=backend)

    def exact(ops: tuple) -> Iterator[Piece]:
        q, k, v, visible, kept = ops
        for head in range(s.kv_heads):
            group, one = _group(q, s.kv_heads, head), slice(head, head + 1)
            chosen = None if kept is None else kept[:, one]
            yield (
                lambda outs, group=group: tuple(x[:, group] for x in outs),
                reference.verify_attention(
                    q[:, group].double(), k[:, one], v[:, one], scale, visible=visible, kept=chosen
                ),
            )

    return Case(
        "verify_attention",
        f"{queries} {'token' if queries == 1 else 'tokens'}{what}",
        asdict(s) | {"queries": queries, "keys": count + queries},
        4 * s.head_dim * s.heads * (queries * count + masked),
        lambda dtype: rows * s.head_dim * dtype.itemsize + 8 * s.kv_heads * (count if kept else 0),
        make,
        run,
        exact,
        lambda dtype: (_OUT[dtype], 1e-4),
        lambda ops, backend: choose(backend, ops[0]),
    )


def _binary_tree(nodes: int) -> Tensor:
    """``[S, S]``: each node of a complete binary tree sees itself and its ancestors."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        visible[node] |= visible[(node - 1) // 2]
    return visible


# --- the other operators ---


def _whole(function: Callable[..., Outputs | Tensor]) -> Callable[[tuple], Iterator[Piece]]:
    """The exact result in one piece."""

    def exact(ops: tuple) -> Iterator[Piece]:
        yield lambda outs: outs, _as_tuple(function(*ops))

    return exact


def _as_tuple(outputs: Outputs | Tensor) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _merge(s: Sizes) -> Case:
    """The question's partial results of all hosts."""
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
        _whole(reference.merge_states),
        lambda dtype: (1e-5, 1e-5),
        lambda ops, backend: choose(backend, ops[1]),
    )


def _importance(s: Sizes, reduce: str) -> Case:
    scale = s.head_dim**-0.5
    rows = s.kv_heads if reduce == "dot" else s.heads * s.query_len

    def make(draw: Draw) -> tuple:
        return draw.states(s.heads, s.query_len, s.head_dim), draw.states(s.kv_heads, s.block, s.head_dim)

    def exact(ops: tuple) -> Iterator[Piece]:
        q, k = ops
        for head in range(s.kv_heads):
            one, group = slice(head, head + 1), _group(q, s.kv_heads, head)
            importance = reference.kv_importance(q[:, group], k[:, one], scale, reduce)
            yield lambda outs, one=one: (outs[0][:, one],), (importance,)

    return Case(
        "kv_importance",
        reduce,
        asdict(s) | {"queries": s.query_len, "keys": s.block},
        2 * s.head_dim * rows * s.block,
        lambda dtype: (
            (s.query_len * s.heads + s.block * s.kv_heads) * s.head_dim * dtype.itemsize + 4 * s.block * s.kv_heads
        ),
        make,
        lambda ops, backend: (kv_importance(*ops, scale, reduce, backend=backend),),
        exact,
        lambda dtype: (_FP32[dtype],),
        lambda ops, backend: choose(backend, ops[1]),
    )


def _topk(s: Sizes) -> Case:
    """A block's best KV pairs, copied to the buffer that is sent."""

    def make(draw: Draw) -> tuple:
        return draw.randn(1, s.kv_heads, s.block, dtype=torch.float32), *_local(draw, s, s.block), s.passing

    return Case(
        "select_topk",
        f"{s.passing} of {s.block}",
        asdict(s) | {"keys": s.block},
        0,
        lambda dtype: s.kv_heads * (4 * s.block + s.passing * (4 * s.head_dim * dtype.itemsize + 8)),
        make,
        lambda ops, backend: select_topk(*ops, backend=backend),
        _whole(reference.select_topk),
        lambda dtype: (0.0, 0.0),
        lambda ops, backend: choose(backend, ops[1]),
    )


def _temporal(s: Sizes) -> Case:
    count = s.frames * s.height * s.width
    return Case(
        "temporal_change",
        f"{s.frames} frames of {s.height} x {s.width}",
        asdict(s),
        4 * count * s.hidden,
        lambda dtype: count * (s.hidden * dtype.itemsize + 4),
        lambda draw: (draw.randn(s.frames, s.height * s.width, s.hidden),),
        lambda ops, backend: (temporal_change(*ops, backend=backend),),
        _whole(reference.temporal_change),
        lambda dtype: (_FP32[dtype],),
        lambda ops, backend: choose(backend, ops[0]),
    )


def _spatial(s: Sizes) -> Case:
    count = s.frames * s.height * s.width
    neighbours = sum(h * h for h in _crops(s.height)) * sum(w * w for w in _crops(s.width)) * s.frames

    def exact(ops: tuple) -> Iterator[Piece]:
        for frame in range(s.frames):
            one = slice(frame, frame + 1)
            yield (
                lambda outs, one=one: (outs[0][one],),
                (reference.spatial_variety(ops[0][one], s.height, s.width, _CROP),),
            )

    return Case(
        "spatial_variety",
        f"{s.frames} frames of {s.height} x {s.width}",
        asdict(s),
        2 * neighbours * s.hidden,
        lambda dtype: count * (s.hidden * dtype.itemsize + 4),
        lambda draw: (draw.randn(s.frames, s.height * s.width, s.hidden),),
        lambda ops, backend: (spatial_variety(*ops, s.height, s.width, _CROP, backend=backend),),
        exact,
        lambda dtype: (_FP32[dtype],),
        lambda ops, backend: choose(backend, ops[0]),
    )


def _crops(length: int) -> list[int]:
    """How crops cut a side: the last may be shorter."""
    return [min(_CROP, length - start) for start in range(0, length, _CROP)]


def _similarity(s: Sizes) -> Case:
    count = s.frames * s.height * s.width
    return Case(
        "similarity_to",
        f"{count} tokens",
        asdict(s),
        4 * count * s.hidden,
        lambda dtype: (count + 1) * s.hidden * dtype.itemsize + 4 * count,
        lambda draw: (draw.randn(count, s.hidden), draw.randn(s.hidden)),
        lambda ops, backend: (similarity_to(*ops, backend=backend),),
        _whole(reference.similarity_to),
        lambda dtype: (_FP32[dtype],),
        lambda ops, backend: choose(backend, ops[0]),
    )
