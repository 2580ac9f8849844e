"""Which blocks XAttention and SpargeAttn choose, written from their papers, with loops over one head at a time.

Nothing here is shared with the implementation.
"""

import torch
from torch import Tensor

from apbv import SparseConfig


def chosen_pairs(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> Tensor:
    """Which key each query of a run of tokens sees, bool ``[Hq, l, l]``.

    Args:
        q: ``[Hq, l, D]``.
        k: ``[Hkv, l, D]``.
    """
    group, length = q.shape[0] // k.shape[0], q.shape[1]
    choose = {"xattention": _xattention, "spargeattn": _spargeattn}[sparse.method]
    key_block = {"xattention": sparse.block_size, "spargeattn": sparse.block_size // 2}[sparse.method]
    pairs = torch.zeros(q.shape[0], length, length, dtype=torch.bool)
    for head in range(q.shape[0]):
        for block, listed in enumerate(choose(q[head], k[head // group], scale, sparse)):
            for row in range(block * sparse.block_size, min((block + 1) * sparse.block_size, length)):
                pairs[head, row, block * sparse.block_size : row + 1] = True
                for chosen in listed:
                    pairs[head, row, chosen * key_block : min((chosen + 1) * key_block, row + 1)] = True
    return pairs


def _xattention(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> list[set[int]]:
    """Algorithm 1: antidiagonal sums, softmax, sums over blocks, and the fewest blocks that hold the threshold."""
    stride, of_block = sparse.stride, sparse.block_size // sparse.stride
    groups = -(-len(q) // stride)
    zeros = q.new_zeros(groups * stride - len(q), q.shape[1])
    q, k = torch.cat([q, zeros]), torch.cat([k, zeros])
    lists = []
    for first in range(0, groups, of_block):
        block = first // of_block
        held = [0.0] * (block + 1)
        for i in range(first, min(first + of_block, groups)):
            sums = torch.stack(
                [
                    sum(q[i * stride + stride - 1 - step] @ k[j * stride + step] for step in range(stride))
                    for j in range(i + 1)
                ]
            )
            for j, share in enumerate((sums * scale / stride).softmax(dim=0).tolist()):
                held[j // of_block] += share
        listed = {0, block}
        for other in sorted(set(range(block)) - listed, key=lambda j: (-held[j], j)):
            if sum(held[j] for j in listed) >= sparse.share * sum(held):
                break
            listed.add(other)
        lists.append(listed)
    return lists


def _spargeattn(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> list[set[int]]:
    """Algorithm 1: block means, blocks that are not similar to themselves, and TopCdf."""
    rows, columns = sparse.block_size, sparse.block_size // 2
    queries, keys = q.split(rows), k.split(columns)
    centred = (k - k.mean(dim=0)).split(columns)
    is_alike = [_mean_cosine(block) > sparse.similarity for block in centred]
    lists = []
    for i, block in enumerate(queries):
        seen = [j for j in range(len(keys)) if j * columns < (i + 1) * rows]
        alike = [j for j in seen if is_alike[j]]
        listed = {j for j in seen if not is_alike[j]}
        if _mean_cosine(block) <= sparse.similarity:
            listed = set(seen)
        elif alike:
            scores = torch.stack([block.mean(dim=0) @ keys[j].mean(dim=0) * scale for j in alike])
            shares = dict(zip(alike, scores.softmax(dim=0).tolist(), strict=True))
            together = 0.0
            for j in sorted(alike, key=lambda j: (-shares[j], j)):
                together += shares[j]
                if together > sparse.share and j != max(alike, key=lambda j: (shares[j], -j)):
                    break
                listed.add(j)
        lists.append(listed)
    return lists


def _mean_cosine(rows: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).mean())
