"""The operators at the sizes that a prefill and a decoding step give them.

Counted are the floating-point operations of the matrix products, where keys that nobody sees cost nothing, and the
fewest bytes: every operand read once, every result written once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apbv.kernels import (
    ListedBlocks,
    antidiagonal_scores,
    block_means,
    block_sparse_attention,
    kv_importance,
    merge_states,
    segmented_attention,
    select_topk,
    verify_attention,
)
from apbv.kernels.backends import choose
from apbv.kernels.library_attention import choose_attention
from apbv.layout import FEWEST_ANCHOR, FEWEST_PASSING

Outputs = tuple[Tensor, ...]
_BLOCK, _KEY_BLOCK = 128, 64  # queries, and keys where a block of keys is shorter, as in SpargeAttn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of a prompt.

    Attributes:
        tokens: n, the context's length, and the number of keys after which tokens are verified.
        hosts: H; the context is cut into 2H blocks.
        heads, kv_heads, head_dim: of attention.
        query_len: tokens of the question.
    """

    tokens: int
    hosts: int
    heads: int
    kv_heads: int
    head_dim: int
    query_len: int

    @property
    def block(self) -> int:
        """Return the length of a block."""
        return self.tokens // (2 * self.hosts)

    @property
    def anchor(self) -> int:
        """Return the anchor's length, l_a."""
        return max(FEWEST_ANCHOR, -(-self.tokens // 64))

    @property
    def passing(self) -> int:
        """Return how many KV pairs a block passes on, l_p."""
        return min(self.block, max(FEWEST_PASSING, -(-self.tokens // 128)))


class Draw:
    """A source of random operands, which differ from seed to seed."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def states(self, heads: int, rows: int, dim: int) -> Tensor:
        """Draw ``[1, H, S, D]`` as projections leave it, with the heads of a token side by side."""
        return self.randn(1, rows, heads, dim).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """An operator on operands of one size.

    Attributes:
        op, label: the operator, and what distinguishes the case from its others.
        flops: floating-point operations of one call.
        bytes: function of the dtype that counts the fewest bytes of one call.
        make: function that draws operands.
        run: function of (operands, backend) that returns the outputs.
        chosen: function of (operands, backend) that returns the backend that would run, or raises BackendError.
        is_segmented: whether libraries of attention kernels compute it.
        sizes: of the model and the prompt.
    """

    op: str
    label: str
    flops: int
    bytes: Callable[[torch.dtype], int]
    make: Callable[[Draw], tuple]
    run: Callable[[tuple, str], Outputs]
    chosen: Callable[[tuple, str], str] = lambda ops, backend: choose(backend, ops[0])
    is_segmented: bool = False
    sizes: Sizes | None = None


def local_kv(draw: Draw, s: Sizes, rows: int) -> tuple[Tensor, Tensor]:
    """Draw K and V as projections leave them."""
    return draw.states(s.kv_heads, rows, s.head_dim), draw.states(s.kv_heads, rows, s.head_dim)


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
        4 * s.head_dim * s.heads * seen,
        lambda dtype: rows * s.head_dim * dtype.itemsize + 4 * queries * s.heads,
        make,
        lambda ops, backend: segmented_attention(
            ops[0], ops[1], scale, causal_last=True, rows_alone=rows_alone, backend=backend
        ),
        lambda ops, backend: choose_attention(backend, *ops),
        is_segmented=True,
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


def verify(s: Sizes, queries: int) -> Case:
    """Build the case of a few new tokens over long KV."""
    past, scale = s.tokens - queries, s.head_dim**-0.5
    rows = 2 * queries * s.heads + 2 * s.tokens * s.kv_heads

    def make(draw: Draw) -> tuple:
        # In the cache a head's rows lie one after the other.
        kv = (draw.randn(1, s.kv_heads, s.tokens, s.head_dim) for _ in range(2))
        return draw.states(s.heads, queries, s.head_dim), *kv

    return Case(
        "verify_attention",
        f"{queries} {'token' if queries == 1 else 'tokens'}",
        4 * s.head_dim * s.heads * (queries * past + queries * (queries + 1) // 2),
        lambda dtype: rows * s.head_dim * dtype.itemsize,
        make,
        lambda ops, backend: verify_attention(*ops, scale, backend=backend),
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
        2 * sum(rows) * wide,
        lambda dtype: (rows[0] + sum(rows)) * (wide * dtype.itemsize + s.heads * itemsize),
        make,
        lambda ops, backend: merge_states(*ops[1:], out=ops[0], backend=backend),
    )


def importance(s: Sizes, reduce: str) -> Case:
    """Build the case of ranking a block's keys by the question, whose attention to them is known."""
    scale = s.head_dim**-0.5
    rows = s.kv_heads if reduce == "dot" else s.heads * s.query_len

    def make(draw: Draw) -> tuple:
        q, k = draw.states(s.heads, s.query_len, s.head_dim), draw.states(s.kv_heads, s.block, s.head_dim)
        return q, k, segmented_attention(q, [(k, k)], scale, causal_last=False, backend="torch")[1]

    return Case(
        "kv_importance",
        reduce,
        2 * s.head_dim * rows * s.block,
        lambda dtype: (
            (s.query_len * s.heads + s.block * s.kv_heads) * s.head_dim * dtype.itemsize + 4 * s.block * s.kv_heads
        ),
        make,
        lambda ops, backend: (kv_importance(*ops[:2], scale, reduce, lse=ops[2], backend=backend),),
    )


def topk(s: Sizes) -> Case:
    """Build the case of a block's best KV pairs, which are copied to the buffer that is sent."""

    def make(draw: Draw) -> tuple:
        return draw.randn(1, s.kv_heads, s.block, dtype=torch.float32), *local_kv(draw, s, s.block), s.passing

    return Case(
        "select_topk",
        f"{s.passing} of {s.block}",
        0,
        lambda dtype: s.kv_heads * (4 * s.block + s.passing * (4 * s.head_dim * dtype.itemsize + 8)),
        make,
        lambda ops, backend: select_topk(*ops, backend=backend),
    )


def listed_blocks(s: Sizes, share: float) -> Case:
    """Build the case of a whole prompt of whose earlier blocks each head lists a share, drawn at random."""
    blocks, scale = -(-s.tokens // _BLOCK), s.head_dim**-0.5
    # Of i blocks before the i-th, counting from 0.
    counts = [round(share * i) for i in range(blocks)]
    rows = [min(_BLOCK, s.tokens - i * _BLOCK) for i in range(blocks)]
    scores = sum(n * (_BLOCK * count) + n * (n + 1) // 2 for n, count in zip(rows, counts, strict=True))

    def make(draw: Draw) -> tuple:
        order = draw.randn(1, s.heads, blocks, blocks, dtype=torch.float32)
        places = torch.arange(blocks, device=draw.device)
        order.masked_fill_(places >= places[:, None], float("-inf"))
        ranks = order.argsort(dim=-1, descending=True).argsort(dim=-1)
        kept = ranks < torch.tensor(counts, device=draw.device)[:, None]
        listed = ListedBlocks.of(kept, _BLOCK, _BLOCK)
        return draw.states(s.heads, s.tokens, s.head_dim), *local_kv(draw, s, s.tokens), listed

    return Case(
        "block_sparse_attention",
        f"{share:.0%} of the blocks",
        4 * s.head_dim * s.heads * scores,
        lambda dtype: (
            2 * s.tokens * (s.heads + s.kv_heads) * s.head_dim * dtype.itemsize
            + 4 * s.heads * (s.tokens + sum(counts) + blocks)
        ),
        make,
        lambda ops, backend: block_sparse_attention(*ops, scale, backend=backend),
    )


def antidiagonals(s: Sizes, stride: int) -> Case:
    """Build the case of XAttention's scores of a whole prompt's blocks."""
    groups, blocks, scale = -(-s.tokens // stride), -(-s.tokens // _BLOCK), s.head_dim**-0.5

    return Case(
        "antidiagonal_scores",
        f"a stride of {stride}",
        s.heads * groups * (groups + 1) * stride * s.head_dim,
        lambda dtype: s.tokens * (s.heads + s.kv_heads) * s.head_dim * dtype.itemsize + 4 * s.heads * blocks**2,
        lambda draw: (draw.states(s.heads, s.tokens, s.head_dim), draw.states(s.kv_heads, s.tokens, s.head_dim)),
        lambda ops, backend: (antidiagonal_scores(*ops, scale, stride, _BLOCK, backend=backend),),
    )


def means(s: Sizes) -> Case:
    """Build the case of SpargeAttn's means of a prompt's blocks of keys."""
    blocks = -(-s.tokens // _KEY_BLOCK)
    return Case(
        "block_means",
        f"blocks of {_KEY_BLOCK} keys",
        0,
        lambda dtype: s.kv_heads * (s.tokens * s.head_dim * dtype.itemsize + 4 * blocks * (s.head_dim + 1)),
        lambda draw: (
            draw.states(s.kv_heads, s.tokens, s.head_dim),
            draw.randn(1, s.kv_heads, s.head_dim, dtype=torch.float32),
        ),
        lambda ops, backend: block_means(ops[0], _KEY_BLOCK, center=ops[1], backend=backend),
    )


@dataclass(frozen=True)
class Preset:
    """The sizes of the cases, and of the copy and the square matrix product that show the ceilings."""

    sizes: Sizes
    tokens: list[int]
    copy_bytes: int
    matrix_side: int


PRESETS = {
    "quick": Preset(Sizes(600, 2, 4, 2, 32, 9), [600], 2**24, 256),
    "cpu": Preset(Sizes(8192, 2, 8, 2, 64, 32), [8192], 2**28, 2048),
    # The heads of Qwen2.5-VL-7B.
    "h200": Preset(Sizes(131072, 8, 28, 4, 128, 64), [8192, 32768, 131072], 2**30, 8192),
}


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """Build all cases for every context length."""
    found: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        of_length = [block(s), block_with_anchor(s), causal(s), query(s)]
        of_length += [verify(s, queries) for queries in (1, 4, 16)]
        of_length += [importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        of_length += [topk(s), merge_into_place(s)]
        of_length += [listed_blocks(s, share) for share in (0.05, 0.1, 0.2, 0.5)]
        of_length += [*(antidiagonals(s, stride) for stride in (8, 16)), means(s)]
        found += [replace(case, sizes=s) for case in of_length]
    return found
