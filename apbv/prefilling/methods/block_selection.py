"""Selects the key blocks of each query block, for sparse attention within one triangle.

A function takes q ``[B, Hq, S, D]`` and k ``[B, Hkv, S, D]`` of the same tokens, the scale, the
settings, and the backend that scores blocks; it returns bool ``[B, Hq, nq, nk]``. Every query head
has a choice of its own. Ties go to the earlier block. A query block always sees its own keys (see
:class:`apbv.kernels.ListedBlocks`), so entries for these are ignored.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...config import SparseConfig
from ...kernels import antidiagonal_scores, block_means
from .flexprefill import flexprefill_blocks


def xattention_blocks(
    q: Tensor, k: Tensor, scale: float, config: SparseConfig, backend: str
) -> Tensor:
    """Choose blocks as XAttention does (Xu et al., 2025): the fewest whose antidiagonals hold the
    threshold.

    The first block and that of the queries themselves are chosen always, and count first; the
    others follow by their scores until the chosen ones hold ``config.share`` of all. Thresholds of
    heads and layers, which the authors also find by dynamic programming, are all the same here.
    """
    shares = antidiagonal_scores(q, k, scale, config.stride, config.block_size, backend=backend)
    always = torch.eye(shares.shape[2], dtype=torch.bool, device=q.device)
    always[:, 0] = True
    wanted = config.share * shares.sum(dim=-1, keepdim=True)
    held, order = shares.masked_fill(always, -1.0).sort(dim=-1, descending=True, stable=True)
    certain = (shares * always).sum(dim=-1, keepdim=True)
    # A block is wanted where the certain ones and those before it do not hold enough. The certain
    # ones come last.
    before = held.cumsum(dim=-1) - held + certain
    chosen = (before < wanted) & (held > 0)
    return torch.zeros_like(chosen).scatter_(3, order, chosen) | always


def sparge_blocks(q: Tensor, k: Tensor, scale: float, config: SparseConfig, backend: str) -> Tensor:
    """Choose blocks as SpargeAttn does (Zhang et al., 2025): by the scores of representative block
    means.

    A block of queries or keys whose rows' mean cosine similarity is not above ``config.similarity``
    takes part in full: its mean says little of it. For the others, a softmax over the means' scores
    of self-similar blocks of keys is taken, and the highest are chosen as long as together they
    hold no more than ``config.share``, at least one. As in the released code, the mean key is
    subtracted before the similarity of keys is taken, the first block is not chosen in any case,
    and a last block that is not full is never self-similar (its missing rows make the similarity
    NaN there): the queries at the end of a prompt, mostly the question's, see all keys.

    That code may leave out all keys that a query sees, which the queries' own keys exclude here.
    The method's second stage, which skips values of selected blocks (Section 3.4), is left out.
    """
    queries, of_queries = block_means(q, config.block_size, backend=backend)
    center = k.mean(dim=2, dtype=torch.promote_types(k.dtype, torch.float32))
    keys, of_keys = block_means(k, config.key_block, center=center, backend=backend)
    for similarities, block in ((of_queries, config.block_size), (of_keys, config.key_block)):
        if q.shape[2] % block:
            similarities[..., -1] = float("nan")
    group = q.shape[1] // k.shape[1]
    scores = queries.unflatten(1, (k.shape[1], group)) @ keys.transpose(-1, -2)[:, :, None] * scale
    scores = scores.flatten(1, 2)
    rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[2:])
    seen = columns < (rows[:, None] + 1) * (config.block_size // config.key_block)
    is_vague = ~(of_keys > config.similarity).repeat_interleave(group, dim=1)[:, :, None]
    shares = scores.masked_fill(is_vague | ~seen, float("-inf")).softmax(dim=-1).nan_to_num(0.0)
    held, order = shares.sort(dim=-1, descending=True, stable=True)
    chosen = (held.cumsum(dim=-1) <= config.share) & (held > 0)
    chosen[..., 0] = True
    chosen = torch.zeros_like(chosen).scatter_(3, order, chosen)
    return chosen | is_vague | ~(of_queries > config.similarity)[..., None]


BLOCK_SELECTION: dict[str, Callable[..., Tensor]] = {
    "xattention": xattention_blocks,
    "spargeattn": sparge_blocks,
    "flexprefill": flexprefill_blocks,
}
