"""Block scores with torch."""

import torch
from torch import Tensor
from torch.nn import functional

# Maximum scores of groups in memory at a time, and maximum numbers of widened rows.
_MOST_SCORES = 2**22
_MOST_NUMBERS = 2**20


def antidiagonal_scores(q: Tensor, k: Tensor, scale: float, stride: int, block: int) -> Tensor:
    """Score blocks as :func:`apbv.kernels.antidiagonal_scores` does, a few blocks of queries at a
    time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = k.shape[1]
    of_head = q.shape[1] // k.shape[1]
    # A row of a product's operand is a group: its tokens' numbers, the queries' from the last token
    # to the first.
    columns = _groups(k.to(wide), stride).flatten(3).transpose(2, 3)
    groups = columns.shape[3]
    of_block = block // stride
    blocks = -(-groups // of_block)
    shares = columns.new_zeros(*q.shape[:2], blocks, blocks)
    queries = q.shape[0] * q.shape[1] * of_block  # groups of a block, in all heads
    most = min(
        _MOST_SCORES // max(1, queries * groups),
        _MOST_NUMBERS // max(1, queries * stride * q.shape[3]),
    )
    step = max(1, most) * of_block
    for first in range(0, groups, step):
        last = min(first + step, groups)
        rows = _groups(q[:, :, first * stride : last * stride].to(wide) * (scale / stride), stride)
        rows = rows.flip(3).flatten(3).unflatten(1, (heads, of_head)).flatten(2, 3)
        scores = (rows @ columns[..., :last]).view(*q.shape[:2], last - first, last)
        places = torch.arange(last, device=q.device)
        scores.masked_fill_(places > places[first:, None], float("-inf"))
        scores = scores.softmax(dim=-1)
        scores = functional.pad(scores, (0, -last % of_block, 0, -(last - first) % of_block))
        sums = (
            scores.unflatten(3, (-1, of_block)).sum(dim=4).unflatten(2, (-1, of_block)).sum(dim=3)
        )
        shares[:, :, first // of_block : first // of_block + sums.shape[2], : sums.shape[3]] = sums
    return per_group(shares, groups, of_block)


def per_group(sums: Tensor, groups: int, of_block: int) -> Tensor:
    """Divide what blocks of queries sum up, ``[B, Hq, n, n]``, by how many groups each has."""
    firsts = torch.arange(0, groups, of_block, device=sums.device)
    return sums / (groups - firsts).clamp_max(of_block)[:, None]


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute means and similarities as :func:`apbv.kernels.block_means` does, some blocks at a
    time."""
    batch, heads, _, dim = states.shape
    rows = max(1, _MOST_NUMBERS // max(1, batch * heads * block * dim)) * block
    parts = [_means(part, block, center) for part in states.split(rows, dim=2)]
    means, similarities = (torch.cat(of_parts, dim=2) for of_parts in zip(*parts, strict=True))
    return means, similarities


def _means(states: Tensor, block: int, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute means and similarities of whole blocks, and of what is left at the end."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if center is not None:
        states = states - center[:, :, None].to(states.dtype)
    firsts = torch.arange(0, states.shape[2], block, device=states.device)
    counts = (states.shape[2] - firsts).clamp_max(block)[:, None]
    means = _groups(states, block).sum(dim=3) / counts
    units = _groups(functional.normalize(states, dim=-1), block).sum(dim=3) / counts
    return means, units.square().sum(dim=-1)


def _groups(states: Tensor, rows: int) -> Tensor:
    """Cut ``[B, H, S, D]`` to ``[B, H, n, rows, D]``, with zeros after the last row."""
    return functional.pad(states, (0, 0, 0, -states.shape[2] % rows)).unflatten(2, (-1, rows))
