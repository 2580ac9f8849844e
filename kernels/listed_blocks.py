"""The key blocks that each query block of block-sparse attention computes."""

from dataclasses import dataclass

import torch
from torch import Tensor

_FEWEST_ROWS = 16  # of a tile, for tensor cores
# The rows that leave out a block's values together: those of a warp.
SKIPPING_ROWS = 16


@dataclass(frozen=True, eq=False)
class ListedBlocks:
    """The keys that each query of one causal sequence attends to, block by block, for every head.

    The queries are cut into blocks of ``query_block`` rows, and the keys into blocks of
    ``key_block``, from the first token on; the last block may be shorter. A query sees its own
    block of rows up to itself, whatever is listed, and of the keys before that the blocks that are
    listed.

    Attributes:
        counts: int32 ``[B, Hq, nq]``, how many blocks are listed for each block of queries.
        indices: int32 ``[B, Hq, nq, nk]``, ascending; those after the counted ones mean nothing.
        query_block: rows of a block of queries, a multiple of ``key_block``.
        key_block: rows of a block of keys.
    """

    counts: Tensor
    indices: Tensor
    query_block: int
    key_block: int

    @classmethod
    def of(cls, kept: Tensor, query_block: int, key_block: int) -> "ListedBlocks":
        """List the blocks of a mask, without waiting for the device.

        Args:
            kept: bool ``[B, Hq, nq, nk]``. Entries of blocks that are not wholly before the queries
                are ignored.
            query_block: rows of a block of queries.
            key_block: rows of a block of keys.

        Raises:
            ValueError: the blocks' rows are not powers of two of at least 16, or blocks of keys are
                longer than blocks of queries.
        """
        # A kernel's tiles are powers of two: then a block is one tile, or several whole ones.
        if not _fits_tiles(query_block) or not _fits_tiles(key_block) or key_block > query_block:
            raise ValueError(
                f"invalid blocks of {query_block} queries and {key_block} keys: not 16, 32, 64, …, "
                "or more keys"
            )
        num_query_blocks, num_key_blocks = kept.shape[2:]
        rows = torch.arange(num_query_blocks, device=kept.device)
        columns = torch.arange(num_key_blocks, device=kept.device)
        is_before = columns < rows[:, None] * (query_block // key_block)
        kept = kept & is_before
        # [B, Hq, nq, nk]: how many blocks are kept up to each one
        ordinals = kept.cumsum(dim=-1, dtype=torch.int32)
        # Blocks that are not kept are written to one more place, which is then cut off.
        targets = torch.where(kept, ordinals - 1, num_key_blocks).long()
        indices = ordinals.new_zeros(*kept.shape[:3], num_key_blocks + 1)
        indices.scatter_(3, targets, columns.int().expand_as(targets))
        return cls(
            counts=kept.sum(dim=-1, dtype=torch.int32),
            indices=indices[..., :-1].contiguous(),
            query_block=query_block,
            key_block=key_block,
        )

    @property
    def kept(self) -> Tensor:
        """The mask of the listed blocks, bool ``[B, Hq, nq, nk]``, all before the diagonal."""
        places = torch.arange(self.indices.shape[3], device=self.indices.device)
        is_listed = places < self.counts[..., None]
        # Entries that are not listed may repeat a listed index: they add 0 to it.
        num_listings = torch.zeros_like(is_listed).int()
        num_listings.scatter_add_(3, self.indices.long(), is_listed.int())
        return num_listings.bool()

    def num_scores(self, num_tokens: int) -> Tensor:
        """Count the scores that are computed for a number of tokens, in fp64 on the device."""
        num_query_blocks = self.counts.shape[2]
        blocks = torch.arange(num_query_blocks, device=self.counts.device)
        rows_of_last = num_tokens - self.query_block * (num_query_blocks - 1)
        is_last = blocks == num_query_blocks - 1
        rows = torch.where(is_last, rows_of_last, self.query_block).double()
        listed = self.counts * self.key_block * rows
        diagonal = rows * (rows + 1) / 2
        return (listed + diagonal).sum()


def _fits_tiles(rows: int) -> bool:
    """Return whether a block of this many rows is a power of two that tiles can fill."""
    is_power_of_2 = rows & (rows - 1) == 0
    return rows >= _FEWEST_ROWS and is_power_of_2
