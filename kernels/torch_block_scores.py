"""Block scores with torch."""

import torch
from torch import Tensor
from torch.nn import functional

from .strides import cdiv

# Maximum scores of groups in memory at a time, and maximum numbers of widened rows.
_MOST_SCORES = 2**22
MOST_NUMBERS = 2**20


def antidiagonal_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    stride: int,
    block: int,
) -> Tensor:
    """Score blocks as :func:`apbv.kernels.antidiagonal_scores` does, some blocks at a time."""
    batch, heads, _, dim = q.shape
    kv_heads = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    # A row of a product's operand is a group: its tokens' numbers, the queries' from the last token
    # to the first.
    # [B, Hkv, stride * D, num_groups]
    columns = _groups(k.to(wide), stride).flatten(3).transpose(2, 3)
    num_groups = columns.shape[3]
    groups_per_block = block // stride
    num_blocks = cdiv(num_groups, groups_per_block)
    shares = columns.new_zeros(batch, heads, num_blocks, num_blocks)

    # How many blocks of queries fit into memory at a time, with their scores.
    groups_of_all_heads = batch * heads * groups_per_block
    blocks_by_scores = _MOST_SCORES // max(1, groups_of_all_heads * num_groups)
    blocks_by_numbers = MOST_NUMBERS // max(1, groups_of_all_heads * stride * dim)
    groups_at_once = max(1, min(blocks_by_scores, blocks_by_numbers)) * groups_per_block
    for first in range(0, num_groups, groups_at_once):
        last = min(first + groups_at_once, num_groups)
        # [B, Hkv, G * (last - first), stride * D]
        queries = q[:, :, first * stride : last * stride].to(wide) * (scale / stride)
        rows = _groups(queries, stride).flip(3).flatten(3)
        rows = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
        # [B, Hq, last - first, last]
        scores = (rows @ columns[..., :last]).view(batch, heads, last - first, last)
        groups = torch.arange(last, device=q.device)
        scores.masked_fill_(groups > groups[first:, None], float("-inf"))
        sums = sum_squares(scores.softmax(dim=-1), groups_per_block)
        first_block = first // groups_per_block
        last_block = first_block + sums.shape[2]
        shares[:, :, first_block:last_block, : sums.shape[3]] = sums
    return per_group(shares, num_groups, groups_per_block)


def sum_squares(values: Tensor, size: int) -> Tensor:
    """Sum up squares of ``[B, H, M, N]``, of ``size`` rows and columns; the last may be smaller."""
    rows, columns = values.shape[2:]
    values = functional.pad(values, (0, -columns % size, 0, -rows % size))
    values = values.unflatten(3, (-1, size)).sum(dim=4)
    return values.unflatten(2, (-1, size)).sum(dim=3)


def per_group(sums: Tensor, num_groups: int, groups_per_block: int) -> Tensor:
    """Divide the sums of blocks of queries, ``[B, Hq, n, n]``, by how many groups each has."""
    firsts = torch.arange(0, num_groups, groups_per_block, device=sums.device)
    return sums / (num_groups - firsts).clamp_max(groups_per_block)[:, None]


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`apbv.kernels.block_means` does, some blocks at a time."""
    batch, heads, _, dim = states.shape
    numbers_of_block = batch * heads * block * dim
    blocks_at_once = max(1, MOST_NUMBERS // max(1, numbers_of_block))
    means = []
    similarities = []
    for part in states.split(blocks_at_once * block, dim=2):
        part_means, part_similarities = _means(part, block, center)
        means.append(part_means)
        similarities.append(part_similarities)
    return torch.cat(means, dim=2), torch.cat(similarities, dim=2)


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
