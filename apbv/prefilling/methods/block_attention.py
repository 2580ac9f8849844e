"""Block-sparse attention within a run of tokens, with blocks selected anew in every layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config import SpargeAttnConfig, SparseConfig
from ...hosts import HostGroup
from ...kernels import ListedBlocks, block_sparse_attention
from .block_selection import BLOCK_SELECTION

# Maximum number of pairs of blocks that are scored and sorted at a time, over all heads. A pair
# takes some 40 bytes.
MOST_PAIRS = 2**22


class BlockAttention:
    """Selects blocks, computes their attention, and counts the scores computed.

    Args:
        config: how blocks are chosen; it must not choose all of them.
        backend: the backend of scores and attention (:mod:`apbv.kernels.backends`).
    """

    def __init__(self, config: SparseConfig, backend: str):
        self._config = config
        self._backend = backend
        self._choose = BLOCK_SELECTION[config.method]
        self._num_computed: Tensor | float = 0.0
        self._num_visible = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend causally from every token to the chosen blocks before it.

        Args:
            q: ``[1, Hq, S, D]``.
            k, v: ``[1, Hkv, S, D]``, of the same tokens.
            scale: the factor of q·k.

        Returns:
            out ``[1, Hq, S, D]`` and lse ``[1, Hq, S]``.
        """
        blocks = self.list_blocks(q, k, scale)
        tokens = q.shape[2]
        rows = q.shape[0] * q.shape[1]
        self._num_visible += rows * tokens * (tokens + 1) // 2
        self._num_computed = self._num_computed + blocks.num_scores(tokens)
        skip_below = None
        if isinstance(self._config, SpargeAttnConfig):
            skip_below = self._config.skip_below
        return block_sparse_attention(
            q, k, v, blocks, scale, skip_below=skip_below, backend=self._backend
        )

    def list_blocks(self, q: Tensor, k: Tensor, scale: float) -> ListedBlocks:
        """Choose and list blocks, for some heads at a time, to bound the memory.

        Args:
            q: ``[B, Hq, S, D]``.
            k: ``[B, Hkv, S, D]``, of the same tokens.
            scale: the factor of q·k.
        """
        block_size = self._config.block_size
        key_block = self._config.key_block
        num_blocks = -(-q.shape[2] // block_size)
        num_key_blocks = -(-q.shape[2] // key_block)
        pairs_of_head = q.shape[0] * num_blocks * num_key_blocks
        most_heads = max(1, MOST_PAIRS // max(1, pairs_of_head))
        shape = (*q.shape[:2], num_blocks, num_key_blocks)
        counts = torch.empty(shape[:3], dtype=torch.int32, device=q.device)
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
        for heads, kv_heads in _split_heads(q.shape[1], k.shape[1], most_heads):
            chosen = self._choose_blocks(
                q[:, heads], k[:, kv_heads], scale, num_blocks, num_key_blocks
            )
            listed = ListedBlocks.of(chosen, block_size, key_block)
            counts[:, heads] = listed.counts
            indices[:, heads] = listed.indices
        return ListedBlocks(counts, indices, block_size, key_block)

    def _choose_blocks(
        self, q: Tensor, k: Tensor, scale: float, num_blocks: int, num_key_blocks: int
    ) -> Tensor:
        """Choose blocks, bool ``[B, Hq, nq, nk]``; all if ``config.share`` is 1."""
        if self._config.share == 1:
            shape = (*q.shape[:2], num_blocks, num_key_blocks)
            return torch.ones(shape, dtype=torch.bool, device=q.device)
        return self._choose(q, k, scale, self._config, self._backend)

    def density(self, hosts: HostGroup) -> float | None:
        """Return the share of the causal scores that was computed on all hosts; collective.

        Waits for the device. None if no host had any scores to choose from.
        """
        counts_here = [float(self._num_computed), float(self._num_visible)]
        num_computed = 0.0
        num_visible = 0.0
        for computed_on_host, visible_on_host in hosts.gather_floats(counts_here):
            num_computed += computed_on_host
            num_visible += visible_on_host
        return num_computed / num_visible if num_visible else None


def _split_heads(heads: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield runs of at most ``most`` query heads, and their KV heads.

    A run is of whole groups (the query heads of a KV head), or part of one group: operators take no
    other combination.
    """
    group = heads // kv_heads
    kv_heads_at_once = max(1, most // group)
    for kv_start in range(0, kv_heads, kv_heads_at_once):
        kv_stop = min(kv_start + kv_heads_at_once, kv_heads)
        stop = kv_stop * group
        for start in range(kv_start * group, stop, most):
            yield slice(start, min(start + most, stop)), slice(kv_start, kv_stop)
