"""This module attends within a run of tokens over blocks of keys that are chosen anew in every layer."""

from torch import Tensor

from ...config import SparseConfig
from ...hosts import HostGroup
from ...kernels import ListedBlocks, block_sparse_attention
from .block_selection import BLOCK_SELECTION


class BlockAttention:
    """A BlockAttention chooses blocks, computes them, and counts how many of the scores that were.

    Args:
        config: how blocks are chosen; not all of them.
        backend: what scores blocks and computes attention; see :mod:`apbv.kernels.backends`.
    """

    def __init__(self, config: SparseConfig, backend: str):
        self._config, self._backend = config, backend
        self._choose = BLOCK_SELECTION[config.method]
        self._num_computed: Tensor | float = 0.0
        self._num_visible = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend causally from every token to the chosen blocks before it.

        Args:
            q: ``[1, Hq, S, D]``.
            k, v: ``[1, Hkv, S, D]``, of the same tokens.
            scale: the factor of q·k.
            out: see :func:`apbv.kernels.block_sparse_attention`.

        Returns:
            out ``[1, Hq, S, D]`` and lse ``[1, Hq, S]``.
        """
        kept = self._choose(q, k, scale, self._config, self._backend)
        blocks = ListedBlocks.of(kept, self._config.block_size, self._config.key_block)
        tokens, rows = q.shape[2], q.shape[0] * q.shape[1]
        self._num_visible += rows * tokens * (tokens + 1) // 2
        self._num_computed = self._num_computed + blocks.num_scores(tokens)
        return block_sparse_attention(q, k, v, blocks, scale, out=out, backend=self._backend)

    def density(self, hosts: HostGroup) -> float | None:
        """Return the share of the causal scores that was computed on all hosts; collective, waits for the device.

        None where no host had any to choose from.
        """
        mine = [float(self._num_computed), float(self._num_visible)]
        computed, visible = (sum(column) for column in zip(*hosts.gather_floats(mine), strict=True))
        return computed / visible if visible else None
