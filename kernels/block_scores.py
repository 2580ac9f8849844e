"""This module scores blocks of keys for block-sparse attention, cheaply, before attention is computed.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), S tokens, D head dimension, n blocks
of ``block`` tokens each, of which the last may be shorter.
"""

import torch
from torch import Tensor

from .backends import choose, implementation


def antidiagonal_scores(
    q: Tensor, k: Tensor, scale: float, stride: int, block: int, *, backend: str = "auto"
) -> Tensor:
    """Estimate the share of its attention that a block of queries pays to each block of keys, by antidiagonals.

    This is the score of XAttention (Xu et al., 2025, Algorithm 1). ``stride`` neighbouring tokens are a group. A
    group of queries scores a group of keys by the sum of q·k along the antidiagonal of their square of scores (the
    last query with the first key, and so on), times scale / stride. A softmax over the groups up to its own makes
    shares of a query group's scores, and the shares of a block's groups are summed. As in the released code,
    tokens that the last group lacks count as zeros, and the group on the diagonal counts with all of its square.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, Hkv, S, D]``, of the same tokens.
        scale: factor of the scores, usually ``D ** -0.5``.
        stride: tokens of a group; a product with every key would be a stride of 1.
        block: tokens of a block, a multiple of the stride.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        ``[B, Hq, n, n]`` in fp32 (fp64 for fp64 input, except from the reference): for every block of queries the
        mean of its groups' shares, which add up to 1 over the blocks of keys; 0 behind the diagonal.

    Raises:
        ValueError: the stride does not divide the block, or shapes do not fit together.
        BackendError: the back end cannot be used here.
    """
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} are not of the same tokens and groups of heads")
    if stride < 1 or block < 1 or block % stride:
        raise ValueError(f"a stride of {stride} does not divide a block of {block}")
    chosen = choose(backend, q)
    if not q.numel():
        blocks = -(-q.shape[2] // block)
        return q.new_zeros(*q.shape[:2], blocks, blocks, dtype=torch.promote_types(q.dtype, torch.float32))
    return implementation("antidiagonal_scores", chosen)(q, k, scale, stride, block)


def block_means(
    states: Tensor, block: int, *, center: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the mean of each block's rows, and how similar they are to each other.

    SpargeAttn (Zhang et al., 2025) lets a mean stand for its block where the block is similar to itself. The
    similarity is the mean cosine of all pairs of rows, a row with itself included: the squared length of the mean
    unit vector. A row of zeros is similar to nothing.

    Args:
        states: ``[B, H, S, D]``, queries or keys.
        block: rows of a block.
        center: ``[B, H, D]``, what is subtracted from every row first; None: nothing.
        backend: see :mod:`apbv.kernels.backends`.

    Returns:
        means ``[B, H, n, D]``, of the rows without ``center``, and similarities ``[B, H, n]``, both in fp32 (fp64
        for fp64 input, except from the reference).

    Raises:
        ValueError: the block is not positive, or ``center`` is of another shape.
        BackendError: the back end cannot be used here.
    """
    if block < 1:
        raise ValueError(f"a block must have at least one row, not {block}")
    if center is not None and center.shape != (*states.shape[:2], states.shape[3]):
        raise ValueError(f"center {list(center.shape)} does not fit states of shape {list(states.shape)}")
    chosen = choose(backend, states)
    if not states.numel():
        wide = torch.promote_types(states.dtype, torch.float32)
        means = states.new_zeros(*states.shape[:2], -(-states.shape[2] // block), states.shape[3], dtype=wide)
        return means, means.sum(dim=-1)
    return implementation("block_means", chosen)(states, block, center=center)
