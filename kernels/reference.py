"""Reference of every operator in plain PyTorch and fp64; every other backend must match it.

Each function is called as the operator of its name, without ``backend``; see there for shapes and
units.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .listed_blocks import ListedBlocks
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
    """Attend over the concatenation of several segments with every score materialised, in O(S * T)
    memory."""
    queries = q.shape[2]
    last = segments[-1][0].shape[2]
    k, v = (torch.cat(states, dim=2) for states in zip(*segments, strict=True))
    visible = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device)
    visible[:num_anchor_queries, : k.shape[2] - last] = False
    if causal_last:
        visible[:, k.shape[2] - last :] &= visible.new_ones(queries, last).tril(last - queries)
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
        k, v = (states[:, :, : int(num_keys)] for states in (k, v))
    queries = q.shape[2]
    keys = k.shape[2]
    if visible is None:
        visible = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril()
    return _attend(
        q, k, v, scale, functional.pad(visible, (keys - visible.shape[1], 0), value=True)
    )


def batch_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, buffers: SequenceBuffers, scale: float
) -> Tensor:
    """Append to one sequence after the other, and attend to it."""
    outs = []
    newest = (states.split(buffers.counts or 1, dim=2) for states in (q, k, v))
    for query, key, value, keys, values, length in zip(
        *newest, buffers.keys, buffers.values, buffers.lengths, strict=True
    ):
        stop = length + query.shape[2]
        keys[:, :, length:stop] = key
        values[:, :, length:stop] = value
        outs.append(
            segmented_attention(query, [(keys[:, :, :stop], values[:, :, :stop])], scale, True)[0]
        )
    return torch.cat(outs, dim=2).to(q.dtype)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """Attend within one sequence after the other."""
    lengths = sequences.boundaries.diff().tolist()
    parts = (states.transpose(0, 1)[None].split(lengths, dim=2) for states in (q, k, v))
    outs = [
        segmented_attention(q, [(k, v)], scale, False)[0] for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1).contiguous()


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: ListedBlocks, scale: float, *, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend under the mask of what every query sees of listed blocks and of its own; skips no
    values."""
    tokens = torch.arange(q.shape[2], device=q.device)
    rows = tokens // blocks.query_block
    columns = tokens // blocks.key_block
    own = rows[:, None] == rows
    visible = (blocks.kept[:, :, rows][..., columns] | own) & (tokens <= tokens[:, None])
    result, lse = _attend(q, k, v, scale, visible)
    return out.copy_(result), lse


def antidiagonal_scores(q: Tensor, k: Tensor, scale: float, stride: int, block: int) -> Tensor:
    """Sum up the antidiagonals of every square of all scores, and the shares of every square of
    groups."""
    pad = -q.shape[2] % stride
    q, k = (functional.pad(states.double(), (0, 0, 0, pad)) for states in (q, k))
    scores = (
        q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) * scale / stride
    )
    # [B, Hq, n, stride, n, stride]
    squares = scores.unflatten(3, (-1, stride)).unflatten(2, (-1, stride))
    sums = squares.flip(3).diagonal(dim1=3, dim2=5).sum(dim=-1)
    later = torch.ones_like(sums[0, 0], dtype=torch.bool).triu(1)
    shares = sums.masked_fill(later, float("-inf")).softmax(dim=-1)
    cuts = range(0, shares.shape[2], block // stride)
    rows = [shares[:, :, cut : cut + block // stride].mean(dim=2) for cut in cuts]
    columns = [
        torch.stack([row[..., cut : cut + block // stride].sum(dim=-1) for cut in cuts], -1)
        for row in rows
    ]
    return torch.stack(columns, dim=2).float()


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the mean of every block, and that of the cosines of all pairs of its rows."""
    states = states.double()
    if center is not None:
        states = states - center.double()[:, :, None]
    blocks = states.split(block, dim=2)
    units = [functional.normalize(rows, dim=-1) for rows in blocks]
    means = torch.stack([rows.mean(dim=2) for rows in blocks], dim=2)
    similarities = torch.stack(
        [(unit @ unit.transpose(-1, -2)).mean(dim=(-2, -1)) for unit in units], dim=2
    )
    return means.float(), similarities.float()


def merge_states(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint keys in fp64."""
    wide = torch.float64 if lses[0].dtype == torch.float64 else torch.float32
    queries = max(lse.shape[2] for lse in lses) if out is None else out.shape[2]
    behind = [queries - lse.shape[2] for lse in lses]  # a partial result is of the last queries
    lses = [
        functional.pad(x.double(), (n, 0), value=-math.inf)
        for x, n in zip(lses, behind, strict=True)
    ]
    lses = torch.stack(lses).masked_fill_(torch.stack(lses) == math.inf, -math.inf)
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))[..., None]
    outs = [functional.pad(x.double(), (0, 0, n, 0)) for x, n in zip(outs, behind, strict=True)]
    merged = (weights * torch.stack(outs).masked_fill(weights == 0, 0.0)).sum(dim=0)
    return merged.to(wide) if out is None else out.copy_(merged), lse.to(wide)


def kv_importance(
    q_query: Tensor,
    k: Tensor,
    scale: float,
    reduce: str = "peak",
    *,
    pool: int = 1,
    lse: Tensor | None = None,
) -> Tensor:
    """Score each key by how much the question attends to it; ``lse``, which only saves work, is
    ignored."""
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
    groups = q.shape[1] // k.shape[1]
    k, v = (states.double().repeat_interleave(groups, dim=1) for states in (k, v))
    # Invisible values may be anything, including NaN: they must not be multiplied in.
    seen = visible.any(dim=-2).expand(*k.shape[:-1])[..., None]
    k, v = (states.masked_fill(~seen, 0.0) for states in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v).to(q.dtype), lse.to(
        torch.float64 if q.dtype == torch.float64 else torch.float32
    )
