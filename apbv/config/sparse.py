"""This module defines which blocks of a prompt's attention are computed."""

from dataclasses import dataclass

from .checks import is_int, is_number, require_known
from .names import SPARSE_NAMES

_THRESHOLDS = {"xattention": 0.9, "spargeattn": 0.96}
_BLOCK_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """A SparseConfig says how blocks of attention are chosen, for each query head and layer; others are left out.

    Attributes:
        method: ``"xattention"`` (Xu et al., 2025) or ``"spargeattn"`` (Zhang et al., 2025); what differs from
            their authors' code is said in :mod:`apbv.prefilling.methods.block_selection`.
        threshold: the share of a block of queries' estimated attention that the chosen blocks hold, τ. None: 0.9
            for ``"xattention"``, as its authors have it, and 0.96 for ``"spargeattn"``, as the APB-V paper has it
            (Section 5.1). 1: all blocks are computed, and the result is that of dense attention.
        block_size: queries of a block, 32, 64, 128 (both papers') or 256. A block has as many keys for
            ``"xattention"``, and half as many for ``"spargeattn"``.
        stride: of ``"xattention"``: tokens of a group, which has one score; it divides the block size.
        similarity: of ``"spargeattn"``: blocks whose rows have a mean cosine similarity of at most this, θ, are
            computed in any case; -1 .. 1. 0.3 in the APB-V paper.

    Raises:
        ValueError: the method is unknown, or a number out of range.
    """

    method: str = "xattention"
    threshold: float | None = None
    block_size: int = 128
    stride: int = 16
    similarity: float = 0.3

    def __post_init__(self):
        require_known("sparse", self.method, SPARSE_NAMES)
        share = self.threshold
        if share is not None and not (is_number(share) and 0 < share <= 1):
            raise ValueError(f"the threshold of sparse attention must lie in 0 < threshold <= 1, not {share!r}")
        if not is_int(self.block_size) or self.block_size not in _BLOCK_SIZES:
            sizes = ", ".join(map(str, _BLOCK_SIZES))
            raise ValueError(f"the block size of sparse attention must be one of {sizes}, not {self.block_size!r}")
        if not is_int(self.stride) or self.stride < 1 or self.block_size % self.stride:
            raise ValueError(f"the stride {self.stride!r} does not divide blocks of {self.block_size} tokens")
        if not is_number(self.similarity) or not -1 <= self.similarity <= 1:
            raise ValueError(f"the similarity of a block must lie in -1 .. 1, not {self.similarity!r}")

    @property
    def share(self) -> float:
        """The threshold in force."""
        return _THRESHOLDS[self.method] if self.threshold is None else self.threshold

    @property
    def computes_all(self) -> bool:
        """Whether no block is left out, so that attention is dense."""
        return self.share == 1

    @property
    def key_block(self) -> int:
        """Keys of a block."""
        return self.block_size if self.method == "xattention" else self.block_size // 2
