"""Merging with torch, in pieces that stay in a CPU's cache."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Numbers of one piece: a piece of every partial result, widened, fits into a core's second-level
# cache.
_PIECE = 2**17


def merge_states(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results as :func:`apbv.kernels.merge_states` does."""
    outs = list(outs)
    lses = [torch.where(lse == math.inf, -math.inf, lse) for lse in lses]
    for index, lse in enumerate(lses):
        saw_nothing = lse == -math.inf
        # Results of queries that saw nothing may be anything, including NaN: they must not be
        # multiplied in. On a CPU the check needs no synchronization, and saves a copy.
        if not lse.is_cpu or saw_nothing.any():
            outs[index] = outs[index].masked_fill(saw_nothing[..., None], 0.0)
    return merge_finite(outs, lses, out=out)


def merge_finite(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge N partial results that hold neither NaN nor +inf, accumulating in the lse's dtype.

    With L_i the sum of exponentials up to partial result i, the mean of the first i is that of the
    first i - 1 moved towards result i by exp(lse_i) / L_i of the way: one pass over each, and none
    over copies.
    """
    wide = lses[0].dtype
    if out is None:
        longest = max(outs, key=lambda partial: partial.shape[2])
        out = torch.empty_like(longest, dtype=wide)
    queries = out.shape[2]
    padded = _padded(lses, queries)
    highest = padded.amax(dim=0).clamp_min(torch.finfo(wide).min)
    weights = torch.exp(padded - highest)
    sums = weights.cumsum(dim=0)
    lse = highest + sums[-1].log()  # log(0) is the -inf of queries that saw nothing
    steps = (weights / sums.clamp_min_(torch.finfo(wide).tiny))[..., None]

    if out.numel() <= _PIECE and all(partial.shape == out.shape for partial in outs):
        # A few new tokens: cutting them would take longer than merging.
        _merge_piece(out, outs, steps)
        return out, lse
    # Partial result i is of the queries from firsts[i] on.
    firsts = [queries - partial.shape[2] for partial in outs]
    for start, stop in _pieces(firsts, queries, out.numel() // max(1, queries)):
        pieces = []
        piece_steps = []
        for index, (partial, first) in enumerate(zip(outs, firsts, strict=True)):
            if first <= start:
                pieces.append(partial[:, :, start - first : stop - first])
                piece_steps.append(steps[index, :, :, start:stop])
        target = out[:, :, start:stop]
        if pieces:
            _merge_piece(target, pieces, piece_steps)
        else:
            target.zero_()
    return out, lse


def _merge_piece(
    target: Tensor, pieces: Sequence[Tensor], steps: Sequence[Tensor] | Tensor
) -> None:
    """Write the mean of pieces, each a step of the way from the mean of those before, to target."""
    wide = steps[0].dtype
    if len(pieces) == 1:
        target.copy_(pieces[0])
        return
    # The first step makes a tensor for the others to write to, unless target can be that.
    buffer = target if target.dtype == wide else None
    mean = pieces[0].to(wide)
    for piece, step in zip(pieces[1:], steps[1:], strict=True):
        mean = torch.lerp(mean, piece.to(wide), step, out=buffer)
        buffer = mean
    if mean is not target:
        target.copy_(mean)


def _pieces(firsts: list[int], queries: int, width: int) -> list[tuple[int, int]]:
    """Cut the queries into ranges that fit the cache, and in which no partial result begins.

    Args:
        firsts: the first query of each partial result.
        queries: how many there are.
        width: numbers of one query.
    """
    length = max(1, _PIECE // max(1, width))
    borders = sorted({0, *firsts, queries})
    ranges = []
    for first, stop in pairwise(borders):
        for start in range(first, stop, length):
            ranges.append((start, min(start + length, stop)))
    return ranges


def _padded(lses: Sequence[Tensor], queries: int) -> Tensor:
    """Stack lses to ``[N, B, H, S]``; one of fewer queries is of the last ones, and -inf before."""
    if all(lse.shape[2] == queries for lse in lses):
        return torch.stack(list(lses))
    stacked = lses[0].new_full((len(lses), *lses[0].shape[:2], queries), -math.inf)
    for place, lse in zip(stacked, lses, strict=True):
        place[:, :, queries - lse.shape[2] :] = lse
    return stacked
