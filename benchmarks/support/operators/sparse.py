"""The cases of sparse attention: over listed blocks, and the scores that choose them."""

from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from apbv.kernels import ListedBlocks, antidiagonal_scores, block_means, block_sparse_attention, reference

from .case import ATTENTION_TOLERANCE, FP32_TOLERANCE, Case, Draw, Piece, Sizes, heads_of, local_kv, whole

_BLOCK, _KEY_BLOCK = 128, 64  # queries, and keys where a block of keys is shorter, as in SpargeAttn
_CHECKED_BLOCKS, _CHECKED_TOKENS = 16, 2048  # fp64 scores take memory


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

    def exact(ops: tuple) -> Iterator[Piece]:
        """Yield the exact results of some blocks of queries, each of one head."""
        q, k, v, listed = ops
        for i in range(_CHECKED_BLOCKS):
            block, head = i * (blocks - 1) // (_CHECKED_BLOCKS - 1), i % s.heads
            own = slice(block * _BLOCK, block * _BLOCK + rows[block])
            chosen = listed.indices[0, head, block, : counts[block]].tolist()
            pair = [x[:, head // (s.heads // s.kv_heads)][:, None] for x in (k, v)]
            segments = [[_rows(x, chosen) for x in pair], [x[:, :, own] for x in pair]]
            place = slice(None), slice(head, head + 1), own
            yield place, reference.segmented_attention(q[place].double(), segments, scale, True)

    return Case(
        "block_sparse_attention",
        f"{share:.0%} of the blocks",
        asdict(s) | {"queries": s.tokens, "keys": s.tokens},
        4 * s.head_dim * s.heads * scores,
        lambda dtype: (
            2 * s.tokens * (s.heads + s.kv_heads) * s.head_dim * dtype.itemsize
            + 4 * s.heads * (s.tokens + sum(counts) + blocks)
        ),
        make,
        lambda ops, backend: block_sparse_attention(*ops, scale, backend=backend),
        exact,
        lambda dtype: (ATTENTION_TOLERANCE[dtype], 1e-4),
    )


def _rows(states: Tensor, blocks: list[int]) -> Tensor:
    pieces = [states[:, :, block * _BLOCK : (block + 1) * _BLOCK] for block in blocks]
    return torch.cat([states[:, :, :0], *pieces], dim=2)


def antidiagonals(s: Sizes, stride: int) -> Case:
    """Build the case of XAttention's scores of a whole prompt's blocks."""
    groups, blocks, scale = -(-s.tokens // stride), -(-s.tokens // _BLOCK), s.head_dim**-0.5

    def exact(ops: tuple) -> Iterator[Piece]:
        """Yield the exact scores of the first blocks, which do not depend on the others, by KV head."""
        first = slice(min(_CHECKED_TOKENS, s.tokens) // _BLOCK)
        q, k = (x[:, :, : first.stop * _BLOCK] for x in ops)
        for group, one in heads_of(s):
            scores = reference.antidiagonal_scores(q[:, group], k[:, one], scale, stride, _BLOCK)
            yield (slice(None), group, first, first), (scores,)

    return Case(
        "antidiagonal_scores",
        f"a stride of {stride}",
        asdict(s) | {"queries": s.tokens, "keys": s.tokens},
        s.heads * groups * (groups + 1) * stride * s.head_dim,
        lambda dtype: s.tokens * (s.heads + s.kv_heads) * s.head_dim * dtype.itemsize + 4 * s.heads * blocks**2,
        lambda draw: (draw.states(s.heads, s.tokens, s.head_dim), draw.states(s.kv_heads, s.tokens, s.head_dim)),
        lambda ops, backend: (antidiagonal_scores(*ops, scale, stride, _BLOCK, backend=backend),),
        exact,
    )


def means(s: Sizes) -> Case:
    """Build the case of SpargeAttn's means of a prompt's blocks of keys."""
    blocks = -(-s.tokens // _KEY_BLOCK)
    return Case(
        "block_means",
        f"blocks of {_KEY_BLOCK} keys",
        asdict(s) | {"keys": s.tokens},
        0,
        lambda dtype: s.kv_heads * (s.tokens * s.head_dim * dtype.itemsize + 4 * blocks * (s.head_dim + 1)),
        lambda draw: (
            draw.states(s.kv_heads, s.tokens, s.head_dim),
            draw.randn(1, s.kv_heads, s.head_dim, dtype=torch.float32),
        ),
        lambda ops, backend: block_means(ops[0], _KEY_BLOCK, center=ops[1], backend=backend),
        whole(lambda keys, center: reference.block_means(keys, _KEY_BLOCK, center=center)),
        lambda dtype: (FP32_TOLERANCE[dtype], FP32_TOLERANCE[dtype]),
    )
