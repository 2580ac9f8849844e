"""Block scores with torch: XAttention's antidiagonals, and the means of blocks of SpargeAttn and
FlexPrefill."""

import torch
from torch import Tensor
from torch.nn import functional

from .strides import cdiv

# Elements in memory at a time: of groups' scores, and of rows in fp32. The keys are all in fp32.
_MOST_SCORES = 2**22
MOST_ELEMENTS = 2**20


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
    # The sum along the antidiagonal of a square of stride x stride scores is one product: of a
    # group's queries, joined from the last to the first, with a group's keys, joined in order.
    # [B, Hkv, stride * D, num_groups]
    columns = _groups(k.to(wide), stride).flatten(3).transpose(2, 3)
    num_groups = columns.shape[3]
    groups_per_block = block // stride
    num_blocks = cdiv(num_groups, groups_per_block)
    shares = columns.new_zeros(batch, heads, num_blocks, num_blocks)

    # How many blocks of queries fit into memory at a time, with their scores.
    rows_of_block = batch * heads * groups_per_block
    blocks_by_scores = _MOST_SCORES // max(1, rows_of_block * num_groups)
    blocks_by_elements = MOST_ELEMENTS // max(1, rows_of_block * stride * dim)
    groups_at_once = max(1, min(blocks_by_scores, blocks_by_elements)) * groups_per_block
    for first in range(0, num_groups, groups_at_once):
        stop = min(first + groups_at_once, num_groups)
        # [B, Hkv, G * (stop - first), stride * D]
        queries = q[:, :, first * stride : stop * stride].to(wide) * (scale / stride)
        rows = _groups(queries, stride).flip(3).flatten(3)
        # The query heads of a KV head share its keys: they are rows of one product.
        rows = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
        # [B, Hq, stop - first, stop]
        scores = (rows @ columns[..., :stop]).view(batch, heads, stop - first, stop)
        groups = torch.arange(stop, device=q.device)
        scores.masked_fill_(groups > groups[first:, None], float("-inf"))
        sums = sum_tiles(scores.softmax(dim=-1), groups_per_block)
        first_block = first // groups_per_block
        stop_block = first_block + sums.shape[2]
        shares[:, :, first_block:stop_block, : sums.shape[3]] = sums
    return mean_of_groups(shares, num_groups, groups_per_block)


def sum_tiles(values: Tensor, size: int) -> Tensor:
    """Sum each tile of ``size`` x ``size`` of ``[B, H, M, N]``; the last ones may be smaller."""
    rows, columns = values.shape[2:]
    values = functional.pad(values, (0, -columns % size, 0, -rows % size))
    values = values.unflatten(3, (-1, size)).sum(dim=4)
    return values.unflatten(2, (-1, size)).sum(dim=3)


def mean_of_groups(sums: Tensor, num_groups: int, groups_per_block: int) -> Tensor:
    """Divide the sums of blocks of queries, ``[B, Hq, n, n]``, by the groups that each has."""
    firsts = torch.arange(0, num_groups, groups_per_block, device=sums.device)
    groups_of_block = (num_groups - firsts).clamp_max(groups_per_block)
    return sums / groups_of_block[:, None]


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`apbv.kernels.block_means` does, some blocks at a time."""
    batch, heads, _, dim = states.shape
    numbers_of_block = batch * heads * block * dim
    blocks_at_once = max(1, MOST_ELEMENTS // max(1, numbers_of_block))
    means = []
    similarities = []
    for part in states.split(blocks_at_once * block, dim=2):
        part_means, part_similarities = _means(part, block, center)
        means.append(part_means)
        similarities.append(part_similarities)
    return torch.cat(means, dim=2), torch.cat(similarities, dim=2)


def _means(states: Tensor, block: int, center: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the means and similarities of blocks; only the last one may be short."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if center is not None:
        states = states - center[:, :, None].to(states.dtype)
    firsts = torch.arange(0, states.shape[2], block, device=states.device)
    counts = (states.shape[2] - firsts).clamp_max(block)[:, None]
    means = _groups(states, block).sum(dim=3) / counts
    mean_units = _groups(functional.normalize(states, dim=-1), block).sum(dim=3) / counts
    # The mean cosine of all pairs of rows is the squared length of the mean unit vector.
    return means, mean_units.square().sum(dim=-1)


def _groups(states: Tensor, rows: int) -> Tensor:
    """Cut ``[B, H, S, D]`` to ``[B, H, n, rows, D]``, with zeros after the last row."""
    return functional.pad(states, (0, 0, 0, -states.shape[2] % rows)).unflatten(2, (-1, rows))
