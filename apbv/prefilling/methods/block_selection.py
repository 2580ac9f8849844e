"""Selects the key blocks of each query block, for sparse attention within one triangle.

A function takes q ``[B, Hq, S, D]`` and k ``[B, Hkv, S, D]`` of the same tokens, the scale, the
settings, and the backend that scores blocks; it returns bool ``[B, Hq, nq, nk]``. It chooses for
every query head separately. Ties go to the earlier block. A query block always sees its own keys
(:class:`apbv.kernels.ListedBlocks`), so entries for these are ignored.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...config import SpargeAttnConfig, XAttentionConfig
from ...kernels import antidiagonal_scores, block_means
from .flexprefill import flexprefill_blocks


def xattention_blocks(
    q: Tensor, k: Tensor, scale: float, config: XAttentionConfig, backend: str
) -> Tensor:
    """Choose blocks as XAttention does (Xu et al., 2025), by their antidiagonals' scores.

    The first block and the queries' own are always chosen, and count first; the others follow by
    their scores until the chosen ones hold ``config.share`` of the sum of all. The threshold is the
    same for all heads and layers; the authors also find them by dynamic programming.
    """
    shares = antidiagonal_scores(q, k, scale, config.stride, config.block_size, backend=backend)
    is_fixed = torch.eye(shares.shape[2], dtype=torch.bool, device=q.device)
    is_fixed[:, 0] = True
    threshold = config.share * shares.sum(dim=-1, keepdim=True)
    # Sort the others; the blocks that are always chosen come last.
    others = shares.masked_fill(is_fixed, -1.0)
    sorted_shares, order = others.sort(dim=-1, descending=True, stable=True)
    fixed_share = (shares * is_fixed).sum(dim=-1, keepdim=True)
    # A block is chosen if those that are always chosen, and the blocks with higher scores, do not
    # reach the threshold without it.
    share_before = sorted_shares.cumsum(dim=-1) - sorted_shares + fixed_share
    is_chosen = (share_before < threshold) & (sorted_shares > 0)
    return torch.zeros_like(is_chosen).scatter_(3, order, is_chosen) | is_fixed


def sparge_blocks(
    q: Tensor, k: Tensor, scale: float, config: SpargeAttnConfig, backend: str
) -> Tensor:
    """Choose blocks as SpargeAttn does (Zhang et al., 2025), by the scores of their means.

    A block of queries or keys is vague if its rows' mean cosine similarity is not above
    ``config.similarity``: its mean says little about it. A vague block of queries sees all blocks
    of keys, and a vague block of keys is seen by all blocks of queries. For other queries, a
    softmax is taken over the scores of the means of keys that are not vague; the highest are
    chosen as long as together they hold no more than ``config.share``, at least one.

    As in the released code, the mean key is subtracted before the similarity of keys is computed,
    the first block is not always chosen, and a last block that is not full is always vague (its
    missing rows make the similarity NaN there): the queries at the end of a prompt, mostly the
    question's, see all keys. That code may skip all keys that a query sees; here a query always
    sees its own block. The method's second stage, which leaves out values of selected blocks
    (Section 3.4), is ``config.skip_below``, for 16 rows at a time as in its kernel for Hopper GPUs,
    and never for the queries' own block.
    """
    # Compute the means and similarities; a last block that is not full has none.
    query_means, query_similarity = block_means(q, config.block_size, backend=backend)
    center = k.mean(dim=2, dtype=torch.promote_types(k.dtype, torch.float32))
    key_means, key_similarity = block_means(k, config.key_block, center=center, backend=backend)
    num_tokens = q.shape[2]
    if num_tokens % config.block_size:
        query_similarity[..., -1] = float("nan")
    if num_tokens % config.key_block:
        key_similarity[..., -1] = float("nan")

    # Find the vague blocks: NaN is not above the bound either.
    group = q.shape[1] // k.shape[1]
    is_vague_query = ~(query_similarity > config.similarity)[..., None]
    is_vague_key = ~(key_similarity > config.similarity)
    is_vague_key = is_vague_key.repeat_interleave(group, dim=1)[:, :, None]

    # Score the others.
    queries_by_group = query_means.unflatten(1, (k.shape[1], group))
    keys_by_group = key_means.transpose(-1, -2)[:, :, None]
    scores = (queries_by_group @ keys_by_group * scale).flatten(1, 2)
    query_blocks = torch.arange(scores.shape[2], device=q.device)
    key_blocks = torch.arange(scores.shape[3], device=q.device)
    num_visible = (query_blocks + 1) * (config.block_size // config.key_block)
    is_visible = key_blocks < num_visible[:, None]
    scores = scores.masked_fill(is_vague_key | ~is_visible, float("-inf"))
    shares = scores.softmax(dim=-1).nan_to_num(0.0)

    # Choose the highest.
    sorted_shares, order = shares.sort(dim=-1, descending=True, stable=True)
    is_chosen = (sorted_shares.cumsum(dim=-1) <= config.share) & (sorted_shares > 0)
    is_chosen[..., 0] = True
    is_chosen = torch.zeros_like(is_chosen).scatter_(3, order, is_chosen)
    return is_chosen | is_vague_key | is_vague_query


BLOCK_SELECTION: dict[str, Callable[..., Tensor]] = {
    "xattention": xattention_blocks,
    "spargeattn": sparge_blocks,
    "flexprefill": flexprefill_blocks,
}
