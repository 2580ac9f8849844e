"""The operators at the sizes that a prefill and a decoding step give them.

Counted are the floating-point operations of the matrix products, where keys that nobody sees cost
nothing, and the fewest bytes: every operand read once, every result written once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from apbv import kernels
from apbv.kernels import ListedBlocks
from apbv.kernels.backends import choose
from apbv.kernels.library_attention import choose_attention
from apbv.layout import FEWEST_ANCHOR, FEWEST_PASSING

from .arguments import presets_of
from .cost_model import causal_pairs

Outputs = tuple[Tensor, ...]
Drawn = tuple[tuple, dict[str, Any]]  # an operator's positional and keyword arguments
_BLOCK, _KEY_BLOCK = 128, 64  # queries, and keys where a block of keys is shorter, as in SpargeAttn
_FP32 = torch.float32.itemsize


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

    @property
    def scale(self) -> float:
        """Return the factor of scores."""
        return self.head_dim**-0.5


class Draw:
    """A source of random operands, which differ from seed to seed."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(
            *shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype
        )

    def states(self, heads: int, rows: int, dim: int) -> Tensor:
        """Draw ``[1, H, S, D]`` as projections leave it, with the heads of a token side by side."""
        return self.randn(1, rows, heads, dim).transpose(1, 2)

    def queries(self, s: Sizes, rows: int) -> Tensor:
        """Draw Q as a projection leaves it."""
        return self.states(s.heads, rows, s.head_dim)

    def kv(self, s: Sizes, rows: int) -> tuple[Tensor, Tensor]:
        """Draw K and V as projections leave them."""
        return self.states(s.kv_heads, rows, s.head_dim), self.states(s.kv_heads, rows, s.head_dim)

    def passed(self, s: Sizes) -> list[tuple[Tensor, Tensor]]:
        """Draw passing blocks as they arrive: one buffer with K and V per sender."""
        shape = 2, 1, s.kv_heads, s.passing, s.head_dim
        return [tuple(self.randn(*shape)) for _ in range(2 * s.hosts - 1)]


@dataclass(frozen=True)
class Case:
    """An operator on operands of one size.

    Attributes:
        sizes: of the model and the prompt.
        op, label: the operator, and what distinguishes the case from its others.
        flops: floating-point operations of one call.
        numbers, other_bytes: how many numbers of the operands' dtype one call moves at least, and
            bytes besides.
        make: function that draws operands.
    """

    sizes: Sizes
    op: str
    label: str
    flops: int
    numbers: int
    other_bytes: int
    make: Callable[[Draw], Drawn]

    @property
    def is_segmented(self) -> bool:
        """Return whether libraries of attention kernels compute it."""
        return self.op == "segmented_attention"

    def bytes(self, dtype: torch.dtype) -> int:
        """Count the fewest bytes of one call."""
        return self.numbers * dtype.itemsize + self.other_bytes

    def run(self, drawn: Drawn, backend: str) -> Outputs:
        operands, settings = drawn
        found = getattr(kernels, self.op)(*operands, **settings, backend=backend)
        return (found,) if isinstance(found, Tensor) else found

    def chosen(self, drawn: Drawn, backend: str) -> str:
        """Return the backend that would run.

        Raises:
            BackendError: this one cannot.
        """
        operands, _ = drawn
        if self.is_segmented:
            return choose_attention(backend, *operands[:2])
        return choose(backend, tree_leaves(operands)[0])


def _segmented(
    s: Sizes, label: str, queries: int, keys: list[int], segments=None, num_anchor_queries: int = 0
) -> Case:
    """Build a case whose last segment is causal, and at least as long as there are queries.

    Args:
        keys: the segments' lengths.
        segments: function that draws their keys and values; None: they are as projections leave
            them.
    """
    last = keys[-1]
    before = sum(keys[:-1])
    seen = (
        (queries - num_anchor_queries) * before + queries * (last - queries) + causal_pairs(queries)
    )
    numbers = 2 * (queries * s.heads + sum(keys) * s.kv_heads) * s.head_dim

    def make(draw: Draw) -> Drawn:
        drawn = segments(draw) if segments else [draw.kv(s, length) for length in keys]
        return (draw.queries(s, queries), drawn, s.scale), {
            "causal_last": True,
            "num_anchor_queries": num_anchor_queries,
        }

    flops = 4 * s.head_dim * s.heads * seen
    return Case(s, "segmented_attention", label, flops, numbers, _FP32 * queries * s.heads, make)


def block(s: Sizes) -> Case:
    """Build the case of the last block, which sees the anchor, what all others pass on, and
    causally itself."""

    def segments(draw: Draw) -> list:
        local = draw.kv(s, s.anchor + s.block)
        anchor, block = (
            [x[:, :, rows] for x in local] for rows in (slice(s.anchor), slice(s.anchor, None))
        )
        return [anchor, *draw.passed(s), block]

    keys = [s.anchor, *[s.passing] * (2 * s.hosts - 1), s.block]
    return _segmented(s, "anchor, passing blocks, block", s.block, keys, segments)


def block_with_anchor(s: Sizes) -> Case:
    """Build the case of :func:`block` with the anchor's own queries, which see only the anchor."""
    rows = s.anchor + s.block
    keys = [*[s.passing] * (2 * s.hosts - 1), rows]
    label = "passing blocks, anchor and block"
    return _segmented(
        s, label, rows, keys, lambda draw: [*draw.passed(s), draw.kv(s, rows)], s.anchor
    )


def causal(s: Sizes) -> Case:
    """Build the case of a whole prompt."""
    return _segmented(s, "causal", s.tokens, [s.tokens])


def query(s: Sizes) -> Case:
    """Build the case of the question over a host's slice of the anchor, its two blocks, and the
    question."""
    return _segmented(
        s, "query block", s.query_len, [s.anchor // s.hosts, 2 * s.block + s.query_len]
    )


def verify(s: Sizes, queries: int) -> Case:
    """Build the case of a few new tokens over long KV."""

    def make(draw: Draw) -> Drawn:
        # In the cache a head's rows lie one after the other.
        kv = (draw.randn(1, s.kv_heads, s.tokens, s.head_dim) for _ in range(2))
        return (draw.queries(s, queries), *kv, s.scale), {}

    label = f"{queries} {'token' if queries == 1 else 'tokens'}"
    flops = 4 * s.head_dim * s.heads * (queries * (s.tokens - queries) + causal_pairs(queries))
    numbers = 2 * (queries * s.heads + s.tokens * s.kv_heads) * s.head_dim
    return Case(s, "verify_attention", label, flops, numbers, 0, make)


def merge_into_place(s: Sizes) -> Case:
    """Build the case of the first block with the anchor, and of what the block sees of others, in
    one output."""
    rows = (s.anchor + s.block, s.block)

    def make(draw: Draw) -> Drawn:
        outs = [draw.queries(s, count) for count in rows]
        lses = [draw.randn(1, s.heads, count, dtype=torch.float32) for count in rows]
        return (outs, lses), {"out": torch.empty_like(outs[0])}

    wide = s.heads * s.head_dim
    moved = rows[0] + sum(rows)
    label = "first block, in its place"
    return Case(
        s, "merge_states", label, 2 * sum(rows) * wide, moved * wide, moved * s.heads * _FP32, make
    )


def importance(s: Sizes, reduce: str) -> Case:
    """Build the case of ranking a block's keys by the question, whose attention to them is
    known."""

    def make(draw: Draw) -> Drawn:
        q, k = draw.queries(s, s.query_len), draw.states(s.kv_heads, s.block, s.head_dim)
        _, lse = kernels.segmented_attention(
            q, [(k, k)], s.scale, causal_last=False, backend="torch"
        )
        return (q, k, s.scale, reduce), {"lse": lse}

    flops = 2 * s.head_dim * (s.kv_heads if reduce == "dot" else s.heads * s.query_len) * s.block
    numbers = (s.query_len * s.heads + s.block * s.kv_heads) * s.head_dim
    return Case(s, "kv_importance", reduce, flops, numbers, _FP32 * s.block * s.kv_heads, make)


def topk(s: Sizes) -> Case:
    """Build the case of a block's best KV pairs, which are copied to the buffer that is sent."""

    def make(draw: Draw) -> Drawn:
        scores = draw.randn(1, s.kv_heads, s.block, dtype=torch.float32)
        return (scores, *draw.kv(s, s.block), s.passing), {}

    numbers = s.kv_heads * s.passing * 4 * s.head_dim
    others = s.kv_heads * (_FP32 * s.block + s.passing * torch.int64.itemsize)
    return Case(s, "select_topk", f"{s.passing} of {s.block}", 0, numbers, others, make)


def listed_blocks(s: Sizes, share: float) -> Case:
    """Build the case of a whole prompt of whose earlier blocks each head lists a share, drawn at
    random."""
    blocks = -(-s.tokens // _BLOCK)
    # Of i blocks before the i-th, counting from 0.
    counts = [round(share * i) for i in range(blocks)]
    rows = [min(_BLOCK, s.tokens - i * _BLOCK) for i in range(blocks)]
    scores = sum(
        n * _BLOCK * count + causal_pairs(n) for n, count in zip(rows, counts, strict=True)
    )

    def make(draw: Draw) -> Drawn:
        order = draw.randn(1, s.heads, blocks, blocks, dtype=torch.float32)
        places = torch.arange(blocks, device=draw.device)
        order.masked_fill_(places >= places[:, None], float("-inf"))
        ranks = order.argsort(dim=-1, descending=True).argsort(dim=-1)
        listed = ListedBlocks.of(
            ranks < torch.tensor(counts, device=draw.device)[:, None], _BLOCK, _BLOCK
        )
        return (draw.queries(s, s.tokens), *draw.kv(s, s.tokens), listed, s.scale), {}

    flops = 4 * s.head_dim * s.heads * scores
    numbers = 2 * s.tokens * (s.heads + s.kv_heads) * s.head_dim
    others = 4 * s.heads * (s.tokens + sum(counts) + blocks)
    return Case(
        s, "block_sparse_attention", f"{share:.0%} of the blocks", flops, numbers, others, make
    )


def antidiagonals(s: Sizes, stride: int) -> Case:
    """Build the case of XAttention's scores of a whole prompt's blocks."""
    groups = -(-s.tokens // stride)
    blocks = -(-s.tokens // _BLOCK)

    def make(draw: Draw) -> Drawn:
        q, k = draw.queries(s, s.tokens), draw.states(s.kv_heads, s.tokens, s.head_dim)
        return (q, k, s.scale, stride, _BLOCK), {}

    flops = s.heads * groups * (groups + 1) * stride * s.head_dim
    numbers = s.tokens * (s.heads + s.kv_heads) * s.head_dim
    return Case(
        s,
        "antidiagonal_scores",
        f"a stride of {stride}",
        flops,
        numbers,
        _FP32 * s.heads * blocks**2,
        make,
    )


def means(s: Sizes) -> Case:
    """Build the case of SpargeAttn's means of a prompt's blocks of keys."""

    def make(draw: Draw) -> Drawn:
        k = draw.states(s.kv_heads, s.tokens, s.head_dim)
        return (k, _KEY_BLOCK), {
            "center": draw.randn(1, s.kv_heads, s.head_dim, dtype=torch.float32)
        }

    others = _FP32 * s.kv_heads * -(-s.tokens // _KEY_BLOCK) * (s.head_dim + 1)
    numbers = s.kv_heads * s.tokens * s.head_dim
    return Case(s, "block_means", f"blocks of {_KEY_BLOCK} keys", 0, numbers, others, make)


def sizes_of(preset: str) -> Sizes:
    """Return the sizes of a preset's cases, with the longest of its prompts."""
    found = presets_of("operators")[preset]
    return Sizes(found["tokens"][-1], **found["sizes"])


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """Build all cases for every context length."""
    found: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        found += [block(s), block_with_anchor(s), causal(s), query(s)]
        found += [verify(s, queries) for queries in (1, 4, 16)]
        found += [importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        found += [topk(s), merge_into_place(s)]
        found += [listed_blocks(s, share) for share in (0.05, 0.1, 0.2, 0.5)]
        found += [*(antidiagonals(s, stride) for stride in (8, 16)), means(s)]
    return found
