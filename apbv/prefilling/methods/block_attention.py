"""Block-sparse attention within a run of tokens, with blocks selected anew in every layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config import SparseConfig
from ...hosts import HostGroup
from ...kernels import ListedBlocks, block_sparse_attention
from .block_selection import BLOCK_SELECTION

# Pairs of blocks that are scored and sorted at a time, over all heads. A pair takes some 40 bytes.
_MOST_PAIRS = 2**22


class BlockAttention:
    """Selects blocks, computes them, and counts the scores computed.

    Args:
        config: how blocks are chosen; not all of them.
        backend: what scores blocks and computes attention; see :mod:`apbv.kernels.backends`.
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
        return block_sparse_attention(q, k, v, blocks, scale, backend=self._backend)

    def list_blocks(self, q: Tensor, k: Tensor, scale: float) -> ListedBlocks:
        """Choose and list blocks, for as many heads at a time as memory is meant for.

        Args:
            q: ``[B, Hq, S, D]``.
            k: ``[B, Hkv, S, D]``, of the same tokens.
            scale: the factor of q·k.
        """
        sizes = self._config.block_size, self._config.key_block
        numbers = [-(-q.shape[2] // rows) for rows in sizes]
        most = max(1, _MOST_PAIRS // max(1, q.shape[0] * numbers[0] * numbers[1]))
        counts = torch.empty(*q.shape[:2], numbers[0], dtype=torch.int32, device=q.device)
        indices = torch.empty(*q.shape[:2], *numbers, dtype=torch.int32, device=q.device)
        for heads, kv_heads in _split_heads(q.shape[1], k.shape[1], most):
            listed = ListedBlocks.of(
                self._kept(q[:, heads], k[:, kv_heads], scale, numbers), *sizes
            )
            counts[:, heads] = listed.counts
            indices[:, heads] = listed.indices
        return ListedBlocks(counts, indices, *sizes)

    def _kept(self, q: Tensor, k: Tensor, scale: float, numbers: list[int]) -> Tensor:
        """Choose blocks, ``[1, Hq, nq, nk]``; all of them where only values are to be skipped."""
        if self._config.share == 1:
            return torch.ones(*q.shape[:2], *numbers, dtype=torch.bool, device=q.device)
        return self._choose(q, k, scale, self._config, self._backend)

    def density(self, hosts: HostGroup) -> float | None:
        """Return the share of the causal scores that was computed on all hosts; collective, waits
        for the device.

        None if no host had any to choose from.
        """
        mine = [float(self._num_computed), float(self._num_visible)]
        computed, visible = (sum(column) for column in zip(*hosts.gather_floats(mine), strict=True))
        return computed / visible if visible else None


def _split_heads(heads: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield groups of at most ``most`` query heads, and their key/value heads.

    They are all heads of several groups, or some of one: operators take no other choice of both.
    """
    group = heads // kv_heads
    step = max(1, most // group)
    for kv_head in range(0, kv_heads, step):
        last = min(kv_head + step, kv_heads) * group
        for first in range(kv_head * group, last, most):
            yield slice(first, min(first + most, last)), slice(kv_head, kv_head + step)
