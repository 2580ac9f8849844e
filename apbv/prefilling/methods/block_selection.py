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
    """Choose blocks as XAttention does (Xu et al., 2025), by their antidiagonals' scores.

    The first block and that of the queries themselves are chosen always, and count first; the
    others follow by their scores until the chosen ones hold ``config.share`` of all. Thresholds of
    heads and layers, which the authors also find by dynamic programming, are all the same here.
    """
    shares = antidiagonal_scores(q, k, scale, config.stride, config.block_size, backend=backend)
    always = torch.eye(shares.shape[2], dtype=torch.bool, device=q.device)
    always[:, 0] = True
    threshold = config.share * shares.sum(dim=-1, keepdim=True)
    # The blocks that are always chosen come last.
    others = shares.masked_fill(always, -1.0)
    share, order = others.sort(dim=-1, descending=True, stable=True)
    share_of_always = (shares * always).sum(dim=-1, keepdim=True)
    # A block is chosen where these and the blocks before it do not reach the threshold.
    share_before = share.cumsum(dim=-1) - share + share_of_always
    chosen = (share_before < threshold) & (share > 0)
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
    queries, query_similarity = block_means(q, config.block_size, backend=backend)
    center = k.mean(dim=2, dtype=torch.promote_types(k.dtype, torch.float32))
    keys, key_similarity = block_means(k, config.key_block, center=center, backend=backend)
    num_tokens = q.shape[2]
    if num_tokens % config.block_size:
        query_similarity[..., -1] = float("nan")
    if num_tokens % config.key_block:
        key_similarity[..., -1] = float("nan")
    group = q.shape[1] // k.shape[1]
    scores = queries.unflatten(1, (k.shape[1], group)) @ keys.transpose(-1, -2)[:, :, None] * scale
    scores = scores.flatten(1, 2)
    query_blocks = torch.arange(scores.shape[2], device=q.device)
    key_blocks = torch.arange(scores.shape[3], device=q.device)
    is_visible = key_blocks < (query_blocks[:, None] + 1) * (config.block_size // config.key_block)
    # NaN is not above the bound.
    is_vague_query = ~(query_similarity > config.similarity)[..., None]
    is_vague_key = ~(key_similarity > config.similarity)
    is_vague_key = is_vague_key.repeat_interleave(group, dim=1)[:, :, None]
    scores = scores.masked_fill(is_vague_key | ~is_visible, float("-inf"))
    shares = scores.softmax(dim=-1).nan_to_num(0.0)
    share, order = shares.sort(dim=-1, descending=True, stable=True)
    chosen = (share.cumsum(dim=-1) <= config.share) & (share > 0)
    chosen[..., 0] = True
    chosen = torch.zeros_like(chosen).scatter_(3, order, chosen)
    return chosen | is_vague_key | is_vague_query


BLOCK_SELECTION: dict[str, Callable[..., Tensor]] = {
    "xattention": xattention_blocks,
    "spargeattn": sparge_blocks,
    "flexprefill": flexprefill_blocks,
}
