"""This module defines which blocks of a prompt's attention are computed."""

from dataclasses import dataclass

from .checks import is_int, is_number, require_known
from .names import SPARSE_NAMES

_THRESHOLDS = {"xattention": 0.9, "spargeattn": 0.96, "flexprefill": 0.95}
_BLOCK_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """A SparseConfig says how blocks of attention are chosen, for each query head and layer; others are left out.

    Attributes:
        method: ``"xattention"`` (Xu et al., 2025), ``"spargeattn"`` (Zhang et al., 2025) or ``"flexprefill"``
            (Lai et al., 2025); what differs from their authors' code is said in
            :mod:`apbv.prefilling.methods.block_selection` and :mod:`apbv.prefilling.methods.flexprefill`.
        threshold: the share of a block of queries' estimated attention that the chosen blocks hold, τ. None: 0.9
            for ``"xattention"`` and 0.95 for ``"flexprefill"``, as their authors have it (the latter calls it γ),
            and 0.96 for ``"spargeattn"``, as the APB-V paper has it (Section 5.1). 1: all blocks are computed,
            and the result is that of dense attention where no values are skipped.
        block_size: queries of a block, 32, 64, 128 (all papers') or 256. A block has as many keys, but for
            ``"spargeattn"`` half as many.
        stride: of ``"xattention"``: tokens of a group, which has one score; it divides the block size.
        similarity: of ``"spargeattn"``: blocks whose rows have a mean cosine similarity of at most this, θ, are
            computed in any case; -1 .. 1. 0.3 in the APB-V paper.
        skip_margin: of ``"spargeattn"``: λ, above 0. Of a chosen block the values are skipped where no query has a
            score within λ of its highest so far; see :func:`apbv.kernels.block_sparse_attention`. Scores are
            natural logarithms of weights; in the authors' code, where λ is ``pvthreshd``, they are to base 2,
            which makes 1.44 times as much of it. None: no values are skipped.
        divergence: of ``"flexprefill"``: a head is query-aware where the square root of the divergence between its
            last queries' attention and what means of blocks say of it is below this, τ; 0 .. 1. 0.1 is its
            authors'. 0: all heads are vertical-slash, as MInference (Jiang et al., 2024) has most of them.
        min_blocks: of ``"flexprefill"``: at least so many columns and diagonals of blocks are computed in every
            head. 8 blocks of 128 tokens are its authors' minimum of 1024 tokens.

    Raises:
        ValueError: the method is unknown, a number is out of range, or the method has no skip margin.
    """

    method: str = "xattention"
    threshold: float | None = None
    block_size: int = 128
    stride: int = 16
    similarity: float = 0.3
    skip_margin: float | None = None
    divergence: float = 0.1
    min_blocks: int = 8

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
        margin = self.skip_margin
        if margin is not None and not (is_number(margin) and margin > 0):
            raise ValueError(f"the skip margin of sparse attention must be above 0, not {margin!r}")
        if margin is not None and self.method != "spargeattn":
            raise ValueError(f"values are skipped by spargeattn: {self.method} has no skip margin")
        if not is_number(self.divergence) or not 0 <= self.divergence <= 1:
            raise ValueError(f"the divergence of a query-aware head must lie in 0 .. 1, not {self.divergence!r}")
        if not is_int(self.min_blocks) or not 1 <= self.min_blocks < 2**31:
            raise ValueError(f"min_blocks must be an integer in 1 .. 2^31-1, not {self.min_blocks!r}")

    @property
    def share(self) -> float:
        """The threshold in force."""
        return _THRESHOLDS[self.method] if self.threshold is None else self.threshold

    @property
    def computes_all(self) -> bool:
        """Whether neither blocks nor values are left out, so that attention is dense."""
        return self.share == 1 and self.skip_margin is None

    @property
    def key_block(self) -> int:
        """Keys of a block."""
        return self.block_size // 2 if self.method == "spargeattn" else self.block_size
