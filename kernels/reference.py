"""Reference of every operator in plain PyTorch and fp64; every other backend must match it.

Each function is called like the operator of its name in :mod:`apbv.kernels`, which documents shapes
and units, without ``backend``.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from .listed_blocks import SKIPPING_ROWS, ListedBlocks
from .segments import Segment
from .sequences import PackedSequences, SequenceBuffers


def segmented_attention(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    causal_last: bool,
    *,
    num_anchor_queries: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend over the concatenation of several segments, materialising every score."""
    queries = q.shape[2]
    k = torch.cat([k for k, _ in segments], dim=2)
    v = torch.cat([v for _, v in segments], dim=2)
    num_last = segments[-1][0].shape[2]
    num_past = k.shape[2] - num_last
    # [S, T]
    visible = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device)
    visible[:num_anchor_queries, :num_past] = False
    if causal_last:
        triangle = visible.new_ones(queries, num_last).tril(num_last - queries)
        visible[:, num_past:] &= triangle
    return _attend(q, k, v, scale, visible)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    visible: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from a few new tokens under one mask of all keys."""
    if num_keys is not None:
        k = k[:, :, : int(num_keys)]
        v = v[:, :, : int(num_keys)]
    queries = q.shape[2]
    if visible is None:
        visible = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril()
    num_past = k.shape[2] - visible.shape[1]
    # [S, T]
    visible = functional.pad(visible, (num_past, 0), value=True)
    return _attend(q, k, v, scale, visible)


def batch_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers, scale: float
) -> Tensor:
    """Append to one sequence after the other, and attend to it."""
    counts = buffers.counts or 1
    outs = []
    for query, key, value, keys, values, length in zip(
        q.split(counts, dim=2),
        k.split(counts, dim=2),
        v.split(counts, dim=2),
        buffers.keys,
        buffers.values,
        buffers.lengths,
        strict=True,
    ):
        stop = length + query.shape[2]
        keys[:, :, length:stop] = key
        values[:, :, length:stop] = value
        seen = (keys[:, :, :stop], values[:, :, :stop])
        out, _ = segmented_attention(query, [seen], scale, True)
        outs.append(out)
    return torch.cat(outs, dim=2).to(q.dtype)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """Attend within one sequence after the other."""
    lengths = sequences.boundaries.diff().tolist()
    outs = []
    for query, keys, values in zip(
        q.transpose(0, 1)[None].split(lengths, dim=2),
        k.transpose(0, 1)[None].split(lengths, dim=2),
        v.transpose(0, 1)[None].split(lengths, dim=2),
        strict=True,
    ):
        out, _ = segmented_attention(query, [(keys, values)], scale, False)
        outs.append(out)
    return torch.cat(outs, dim=2)[0].transpose(0, 1).contiguous()


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: ListedBlocks,
    scale: float,
    *,
    skip_below: float | None = None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend under the mask of listed blocks and the diagonal."""
    tokens = torch.arange(q.shape[2], device=q.device)
    rows = tokens // blocks.query_block
    columns = tokens // blocks.key_block
    is_own_block = rows[:, None] == rows
    is_listed = blocks.kept[:, :, rows][..., columns]
    visible = (is_listed | is_own_block) & (tokens <= tokens[:, None])
    result, lse = _attend(q, k, v, scale, visible)
    if skip_below is not None:
        # Of the exact result, take away what the left-out values add.
        is_left_out = _left_out(q, k, blocks, scale, skip_below)
        if is_left_out.any():
            part, part_lse = _attend(q, k, v, scale, visible & is_left_out)
            share = (part_lse - lse).exp().nan_to_num(0.0)[..., None]
            result = result - share * part.nan_to_num(0.0)
    return out.copy_(result), lse


def _left_out(
    q: Tensor, k: Tensor, blocks: ListedBlocks, scale: float, skip_below: float
) -> Tensor:
    """Return which keys' values each row leaves out, bool ``[B, Hq, S, S]``."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    is_left_out = torch.zeros_like(scores, dtype=torch.bool)
    tokens = q.shape[2]
    places = product(range(q.shape[0]), range(q.shape[1]), range(0, tokens, SKIPPING_ROWS))
    for batch, head, first in places:
        rows = slice(first, min(first + SKIPPING_ROWS, tokens))
        block = first // blocks.query_block
        highest = torch.full([rows.stop - rows.start], float("-inf"), dtype=torch.float64)
        for number in range(int(blocks.counts[batch, head, block])):
            start = int(blocks.indices[batch, head, block, number]) * blocks.key_block
            keys = slice(start, start + blocks.key_block)
            of_block = scores[batch, head, rows, keys].amax(dim=-1).cpu()
            highest = torch.maximum(highest, of_block)
            if (of_block - highest).max() < skip_below:
                is_left_out[batch, head, rows, keys] = True
    return is_left_out


def antidiagonal_scores(q: Tensor, k: Tensor, scale: float, stride: int, block: int) -> Tensor:
    """Sum up the antidiagonals of all scores' squares, and the shares of squares of groups."""
    padding = (0, 0, 0, -q.shape[2] % stride)
    q = functional.pad(q.double(), padding)
    k = functional.pad(k.double(), padding)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) * scale / stride
    # [B, Hq, n, stride, n, stride]
    squares = scores.unflatten(3, (-1, stride)).unflatten(2, (-1, stride))
    sums = squares.flip(3).diagonal(dim1=3, dim2=5).sum(dim=-1)
    later = torch.ones_like(sums[0, 0], dtype=torch.bool).triu(1)
    shares = sums.masked_fill(later, float("-inf")).softmax(dim=-1)
    groups_per_block = block // stride
    blocks = []
    for rows in shares.split(groups_per_block, dim=2):
        mean = rows.mean(dim=2)
        sums = [columns.sum(dim=-1) for columns in mean.split(groups_per_block, dim=-1)]
        blocks.append(torch.stack(sums, dim=-1))
    return torch.stack(blocks, dim=2).float()


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the mean of every block, and that of the cosines of all pairs of its rows."""
    states = states.double()
    if center is not None:
        states = states - center.double()[:, :, None]
    means = []
    similarities = []
    for rows in states.split(block, dim=2):
        units = functional.normalize(rows, dim=-1)
        cosines = units @ units.transpose(-1, -2)
        means.append(rows.mean(dim=2))
        similarities.append(cosines.mean(dim=(-2, -1)))
    return torch.stack(means, dim=2).float(), torch.stack(similarities, dim=2).float()


def merge_states(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint keys in fp64."""
    wide = torch.float64 if lses[0].dtype == torch.float64 else torch.float32
    queries = max(lse.shape[2] for lse in lses) if out is None else out.shape[2]
    # A partial result is of the last queries: the others saw nothing.
    padded_outs = []
    padded_lses = []
    for partial, lse in zip(outs, lses, strict=True):
        first = queries - lse.shape[2]
        padded_outs.append(functional.pad(partial.double(), (0, 0, first, 0)))
        padded_lses.append(functional.pad(lse.double(), (first, 0), value=-math.inf))
    stacked_outs = torch.stack(padded_outs)
    stacked_lses = torch.stack(padded_lses)
    stacked_lses[stacked_lses == math.inf] = -math.inf

    lse = stacked_lses.logsumexp(dim=0)
    weights = torch.exp(stacked_lses - lse.masked_fill(lse == -math.inf, 0.0))[..., None]
    merged = (weights * stacked_outs.masked_fill(weights == 0, 0.0)).sum(dim=0)
    if out is None:
        return merged.to(wide), lse.to(wide)
    return out.copy_(merged), lse.to(wide)


def kv_importance(
    q_query: Tensor,
    k: Tensor,
    scale: float,
    reduce: str = "peak",
    *,
    pool: int = 1,
    lse: Tensor | None = None,
) -> Tensor:
    """Score each key by how much the question attends to it; ``lse`` only saves work elsewhere."""
    rows = q_query.double().unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, Hkv, G * n_q, D]
    scores = rows @ k.double().transpose(-1, -2) * scale
    if reduce == "dot":
        importance = scores.mean(dim=2)
    else:
        probabilities = scores.softmax(dim=-1)
        importance = probabilities.amax(dim=2) if reduce == "peak" else probabilities.mean(dim=2)
    return functional.max_pool1d(importance, pool, stride=1, padding=pool // 2).float()


def select_topk(
    scores: Tensor, k: Tensor, v: Tensor, count: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy the best rows of each KV head, found by a stable sort."""
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
    places = chosen[..., None].expand(-1, -1, -1, k.shape[3])
    if out is None:
        out = k.new_empty(2, *k.shape[:2], count, k.shape[3])
    out[0, :, :, :count] = k.gather(2, places)
    out[1, :, :, :count] = v.gather(2, places)
    return chosen, out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend under a mask; the result is zeros and an lse of -inf where nothing is visible."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    # Invisible values may be anything, including NaN: they must not be multiplied in.
    is_seen = visible.any(dim=-2).expand(*k.shape[:-1])[..., None]
    k = k.masked_fill(~is_seen, 0.0)
    v = v.masked_fill(~is_seen, 0.0)
    scores = (q.double() @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (weights @ v).to(q.dtype), lse.to(lse_dtype)
