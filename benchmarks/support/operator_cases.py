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
_BLOCK = 128  # queries, and keys
_KEY_BLOCK = 64  # keys in SpargeAttn, where a block of keys is shorter
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
    def num_senders(self) -> int:
        """Return how many blocks the last one gets KV pairs from."""
        return 2 * self.hosts - 1

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
        keys = self.states(s.kv_heads, rows, s.head_dim)
        values = self.states(s.kv_heads, rows, s.head_dim)
        return keys, values

    def passed(self, s: Sizes) -> list[tuple[Tensor, Tensor]]:
        """Draw passing blocks as they arrive: one buffer with K and V per sender."""
        blocks = []
        for _ in range(s.num_senders):
            keys, values = self.randn(2, 1, s.kv_heads, s.passing, s.head_dim)
            blocks.append((keys, values))
        return blocks


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
        """Run the operator on operands that :attr:`make` has drawn."""
        operands, settings = drawn
        operator = getattr(kernels, self.op)
        outputs = operator(*operands, **settings, backend=backend)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

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
    s: Sizes,
    label: str,
    queries: int,
    keys: list[int],
    draw_segments: Callable[[Draw], list] | None = None,
    num_anchor_queries: int = 0,
) -> Case:
    """Build a case whose last segment is causal, and at least as long as there are queries.

    Args:
        keys: the segments' lengths.
        draw_segments: draws their keys and values; None: they are as projections leave them.
        num_anchor_queries: the first queries, which see only the last segment.
    """

    def make(draw: Draw) -> Drawn:
        if draw_segments is None:
            segments = [draw.kv(s, length) for length in keys]
        else:
            segments = draw_segments(draw)
        operands = (draw.queries(s, queries), segments, s.scale)
        return operands, {"causal_last": True, "num_anchor_queries": num_anchor_queries}

    before = sum(keys[:-1])
    last = keys[-1]
    pairs = (queries - num_anchor_queries) * before
    pairs += queries * (last - queries) + causal_pairs(queries)
    flops = 4 * s.head_dim * s.heads * pairs
    numbers = 2 * (queries * s.heads + sum(keys) * s.kv_heads) * s.head_dim
    return Case(s, "segmented_attention", label, flops, numbers, _FP32 * queries * s.heads, make)


def block(s: Sizes) -> Case:
    """Build the case of the last block.

    It sees the anchor, what all others pass on, and causally itself.
    """

    def draw_segments(draw: Draw) -> list:
        keys, values = draw.kv(s, s.anchor + s.block)
        anchor = [keys[:, :, : s.anchor], values[:, :, : s.anchor]]
        block = [keys[:, :, s.anchor :], values[:, :, s.anchor :]]
        return [anchor, *draw.passed(s), block]

    keys = [s.anchor] + [s.passing] * s.num_senders + [s.block]
    return _segmented(s, "anchor, passing blocks, block", s.block, keys, draw_segments)


def block_with_anchor(s: Sizes) -> Case:
    """Build the case of :func:`block` with the anchor's own queries, which see only the anchor."""
    rows = s.anchor + s.block

    def draw_segments(draw: Draw) -> list:
        return [*draw.passed(s), draw.kv(s, rows)]

    keys = [s.passing] * s.num_senders + [rows]
    return _segmented(
        s,
        "passing blocks, anchor and block",
        rows,
        keys,
        draw_segments,
        num_anchor_queries=s.anchor,
    )


def causal(s: Sizes) -> Case:
    """Build the case of a whole prompt."""
    return _segmented(s, "causal", s.tokens, [s.tokens])


def query(s: Sizes) -> Case:
    """Build the case of the question on one host.

    It sees the host's slice of the anchor, the host's two blocks, and causally itself.
    """
    keys = [s.anchor // s.hosts, 2 * s.block + s.query_len]
    return _segmented(s, "query block", s.query_len, keys)


def verify(s: Sizes, queries: int) -> Case:
    """Build the case of a few new tokens over long KV."""

    def make(draw: Draw) -> Drawn:
        new_queries = draw.queries(s, queries)
        # In the cache a head's rows lie one after the other.
        keys = draw.randn(1, s.kv_heads, s.tokens, s.head_dim)
        values = draw.randn(1, s.kv_heads, s.tokens, s.head_dim)
        return (new_queries, keys, values, s.scale), {}

    label = "1 token" if queries == 1 else f"{queries} tokens"
    pairs = queries * (s.tokens - queries) + causal_pairs(queries)
    flops = 4 * s.head_dim * s.heads * pairs
    numbers = 2 * (queries * s.heads + s.tokens * s.kv_heads) * s.head_dim
    return Case(s, "verify_attention", label, flops, numbers, 0, make)


def merge_into_place(s: Sizes) -> Case:
    """Build the case of merging two attention outputs, into a given one.

    One is the anchor's and the first block's, the other what the block sees of other blocks.
    """
    rows = [s.anchor + s.block, s.block]

    def make(draw: Draw) -> Drawn:
        outs = [draw.queries(s, count) for count in rows]
        lses = [draw.randn(1, s.heads, count, dtype=torch.float32) for count in rows]
        return (outs, lses), {"out": torch.empty_like(outs[0])}

    width = s.heads * s.head_dim
    flops = 2 * sum(rows) * width
    # Both are read, and the first is written.
    moved_rows = sum(rows) + rows[0]
    lse_bytes = moved_rows * s.heads * _FP32
    label = "first block, in its place"
    return Case(s, "merge_states", label, flops, moved_rows * width, lse_bytes, make)


def importance(s: Sizes, reduce: str) -> Case:
    """Build the case of ranking a block's keys by the question, whose attention has been computed.

    Args:
        reduce: how a key's scores become one; "dot" needs one query per KV head.
    """

    def make(draw: Draw) -> Drawn:
        q = draw.queries(s, s.query_len)
        k = draw.states(s.kv_heads, s.block, s.head_dim)
        _, lse = kernels.segmented_attention(
            q, [(k, k)], s.scale, causal_last=False, backend="torch"
        )
        return (q, k, s.scale, reduce), {"lse": lse}

    num_queries = s.kv_heads if reduce == "dot" else s.heads * s.query_len
    flops = 2 * s.head_dim * num_queries * s.block
    numbers = (s.query_len * s.heads + s.block * s.kv_heads) * s.head_dim
    return Case(s, "kv_importance", reduce, flops, numbers, _FP32 * s.block * s.kv_heads, make)


def topk(s: Sizes) -> Case:
    """Build the case of a block's best KV pairs, which are copied to the buffer that is sent."""

    def make(draw: Draw) -> Drawn:
        scores = draw.randn(1, s.kv_heads, s.block, dtype=torch.float32)
        keys, values = draw.kv(s, s.block)
        return (scores, keys, values, s.passing), {}

    numbers = s.kv_heads * s.passing * 4 * s.head_dim
    others = s.kv_heads * (_FP32 * s.block + s.passing * torch.int64.itemsize)
    return Case(s, "select_topk", f"{s.passing} of {s.block}", 0, numbers, others, make)


def listed_blocks(s: Sizes, share: float) -> Case:
    """Build the case of sparse attention in a whole prompt.

    Args:
        share: of the earlier blocks, how many each head attends to, drawn at random.
    """
    blocks = -(-s.tokens // _BLOCK)
    # How many earlier blocks the block with number i lists, of i.
    counts = [round(share * number) for number in range(blocks)]
    pairs = 0
    for number, count in enumerate(counts):
        rows = min(_BLOCK, s.tokens - number * _BLOCK)
        pairs += rows * _BLOCK * count + causal_pairs(rows)

    def make(draw: Draw) -> Drawn:
        # Later blocks get the lowest scores, so that they are never listed.
        scores = draw.randn(1, s.heads, blocks, blocks, dtype=torch.float32)
        places = torch.arange(blocks, device=draw.device)
        scores.masked_fill_(places >= places[:, None], float("-inf"))
        ranks = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
        is_listed = ranks < torch.tensor(counts, device=draw.device)[:, None]
        listed = ListedBlocks.of(is_listed, _BLOCK, _BLOCK)
        queries = draw.queries(s, s.tokens)
        keys, values = draw.kv(s, s.tokens)
        return (queries, keys, values, listed, s.scale), {}

    label = f"{share:.0%} of the blocks"
    flops = 4 * s.head_dim * s.heads * pairs
    numbers = 2 * s.tokens * (s.heads + s.kv_heads) * s.head_dim
    other_bytes = 4 * s.heads * (s.tokens + sum(counts) + blocks)
    return Case(s, "block_sparse_attention", label, flops, numbers, other_bytes, make)


def antidiagonals(s: Sizes, stride: int) -> Case:
    """Build the case of XAttention's scores of a whole prompt's blocks."""
    groups = -(-s.tokens // stride)
    blocks = -(-s.tokens // _BLOCK)

    def make(draw: Draw) -> Drawn:
        q = draw.queries(s, s.tokens)
        k = draw.states(s.kv_heads, s.tokens, s.head_dim)
        return (q, k, s.scale, stride, _BLOCK), {}

    flops = s.heads * groups * (groups + 1) * stride * s.head_dim
    numbers = s.tokens * (s.heads + s.kv_heads) * s.head_dim
    score_bytes = _FP32 * s.heads * blocks**2
    label = f"a stride of {stride}"
    return Case(s, "antidiagonal_scores", label, flops, numbers, score_bytes, make)


def means(s: Sizes) -> Case:
    """Build the case of SpargeAttn's means of a prompt's blocks of keys."""

    def make(draw: Draw) -> Drawn:
        k = draw.states(s.kv_heads, s.tokens, s.head_dim)
        center = draw.randn(1, s.kv_heads, s.head_dim, dtype=torch.float32)
        return (k, _KEY_BLOCK), {"center": center}

    numbers = s.kv_heads * s.tokens * s.head_dim
    blocks = -(-s.tokens // _KEY_BLOCK)
    # Of each block a mean, and how similar its keys are.
    mean_bytes = _FP32 * s.kv_heads * blocks * (s.head_dim + 1)
    return Case(s, "block_means", f"blocks of {_KEY_BLOCK} keys", 0, numbers, mean_bytes, make)


def sizes_of(preset: str) -> Sizes:
    """Return the sizes of a preset's cases, with the longest of its prompts."""
    options = presets_of("operators")[preset]
    return Sizes(options["tokens"][-1], **options["sizes"])


def cases(sizes: Sizes, tokens: list[int]) -> list[Case]:
    """Build all cases for every context length."""
    all_cases: list[Case] = []
    for length in tokens:
        s = replace(sizes, tokens=length)
        # Attention.
        all_cases += [block(s), block_with_anchor(s), causal(s), query(s)]
        all_cases += [verify(s, queries) for queries in (1, 4, 16)]
        # The choice and the exchange of pairs.
        all_cases += [importance(s, reduce) for reduce in ("peak", "softmax", "dot")]
        all_cases += [topk(s), merge_into_place(s)]
        # Sparse attention, and the choice of its blocks.
        all_cases += [listed_blocks(s, share) for share in (0.05, 0.1, 0.2, 0.5)]
        all_cases += [antidiagonals(s, stride) for stride in (8, 16)]
        all_cases.append(means(s))
    return all_cases
