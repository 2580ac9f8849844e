"""What XAttention, SpargeAttn and FlexPrefill compute, in loops over one head at a time, as their
authors have it.

Nothing here is shared with the implementation.
"""

from itertools import accumulate
from math import log, sqrt

import torch
from torch import Tensor

from apbv import SparseConfig


def chosen_pairs(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> Tensor:
    """Which key each query of a run of tokens sees, bool ``[Hq, l, l]``.

    Args:
        q: ``[Hq, l, D]``.
        k: ``[Hkv, l, D]``.
    """
    group = q.shape[0] // k.shape[0]
    length = q.shape[1]
    if sparse.share == 1:
        return torch.ones(q.shape[0], length, length, dtype=torch.bool).tril()
    choose = {"xattention": _xattention, "spargeattn": _spargeattn, "flexprefill": _flexprefill}[
        sparse.method
    ]
    key_block = sparse.block_size // (2 if sparse.method == "spargeattn" else 1)
    pairs = torch.zeros(q.shape[0], length, length, dtype=torch.bool)
    for head in range(q.shape[0]):
        for block, listed in enumerate(choose(q[head], k[head // group], scale, sparse)):
            for row in range(
                block * sparse.block_size, min((block + 1) * sparse.block_size, length)
            ):
                pairs[head, row, block * sparse.block_size : row + 1] = True
                for chosen in listed:
                    pairs[
                        head, row, chosen * key_block : min((chosen + 1) * key_block, row + 1)
                    ] = True
    return pairs


def _xattention(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> list[set[int]]:
    """Algorithm 1: antidiagonal sums, softmax, sums over blocks, and the fewest blocks that hold
    the threshold."""
    stride = sparse.stride
    of_block = sparse.block_size // sparse.stride
    groups = -(-len(q) // stride)
    zeros = q.new_zeros(groups * stride - len(q), q.shape[1])
    q = torch.cat([q, zeros])
    k = torch.cat([k, zeros])

    def antidiagonal(i: int, j: int) -> Tensor:
        return sum(
            q[i * stride + stride - 1 - step] @ k[j * stride + step] for step in range(stride)
        )

    lists = []
    for first in range(0, groups, of_block):
        block = first // of_block
        held = [0.0] * (block + 1)
        for i in range(first, min(first + of_block, groups)):
            sums = torch.stack([antidiagonal(i, j) for j in range(i + 1)])
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
    """Algorithm 1: block means, blocks that are not similar to themselves, and TopCdf.

    In the released code a block that is not full is never similar to itself.
    """
    rows = sparse.block_size
    columns = sparse.block_size // 2
    queries = q.split(rows)
    keys = k.split(columns)
    centred = (k - k.mean(dim=0)).split(columns)
    is_alike = [
        len(block) == columns and _mean_cosine(block) > sparse.similarity for block in centred
    ]
    lists = []
    for i, block in enumerate(queries):
        seen = [j for j in range(len(keys)) if j * columns < (i + 1) * rows]
        alike = [j for j in seen if is_alike[j]]
        listed = {j for j in seen if not is_alike[j]}
        if len(block) < rows or _mean_cosine(block) <= sparse.similarity:
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


def _flexprefill(q: Tensor, k: Tensor, scale: float, sparse: SparseConfig) -> list[set[int]]:
    """Algorithms 1 to 4 as in the released code, with blocks in place of its 128 tokens."""
    block = sparse.block_size
    last = range(max(0, len(q) - sparse.block_size), len(q))
    q_means = [rows.mean(dim=0) for rows in q.split(block)]
    k_means = [rows.mean(dim=0) for rows in k.split(block)]
    number = len(q_means)
    # Of tokens; a diagonal by how far behind it is.
    columns = [0.0] * len(q)
    diagonals = [0.0] * len(q)
    for row in last:
        for key, share in enumerate((k[: row + 1] @ q[row] * scale).softmax(dim=0).tolist()):
            columns[key] += share / len(last)
            diagonals[row - key] += share / len(last)
    in_columns = [0.0] * number
    in_diagonals = [0.0] * number
    for token in range(len(q)):
        in_columns[token // block] += columns[token]
        in_diagonals[number - 1 - (len(q) - 1 - token) // block] += diagonals[token]
    estimate = torch.stack(
        [q[last.start :].mean(dim=0) @ mean * scale for mean in k_means]
    ).softmax(dim=0)
    divergence = 0.0
    for pair in zip(estimate.tolist(), in_columns, strict=True):
        divergence += sum(p * log(2 * p / sum(pair)) / 2 for p in pair if p > 0)
    is_aware = sqrt(max(divergence, 0.0)) < sparse.divergence
    kept = []
    for of_tokens, of_blocks in ((columns, in_columns), (diagonals, in_diagonals)):
        wanted = sparse.min_blocks
        if not is_aware:
            held = list(accumulate(sorted(of_tokens, reverse=True)))
            wanted = max(
                wanted, (sum(together <= sparse.share for together in held) + 1) // block + 1
            )
        others = sorted(range(1, number), key=lambda line, sums=of_blocks: (-sums[line], line))
        kept.append({0, *others[: wanted - 1]})
    columns_kept, diagonals_kept = kept
    lists = []
    for i in range(number):
        lists.append({j for j in range(i + 1) if j in columns_kept or i - j in diagonals_kept})
    if is_aware:
        pairs = {}
        for i, mean in enumerate(q_means):
            shares = (torch.stack(k_means[: i + 1]) @ mean * scale).softmax(dim=0)
            pairs |= {(i, j): share for j, share in enumerate(shares.tolist())}
        together = 0.0
        for i, j in sorted(pairs, key=lambda pair: (-pairs[pair], pair)):
            together += pairs[i, j]
            if together > sparse.share * number:
                break
            lists[i].add(j)
    return lists


def _mean_cosine(rows: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).mean())
