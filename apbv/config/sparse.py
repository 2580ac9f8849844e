"""Settings for block-sparse attention: of all methods of selecting blocks, and of each one."""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import InvalidConfigError
from .checks import Checked, integer, number, one_of
from .names import SPARSE_NAMES


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Checked, name="sparse "):
    """Settings for block-sparse attention: how blocks are selected, per query head and layer.

    Blocks that are not selected are skipped. Every method has a config of its own, with its own
    settings: :class:`XAttentionConfig`, :class:`SpargeAttnConfig`, :class:`FlexPrefillConfig`.
    ``SparseConfig(method=…)`` makes the one of that name, for callers that have the name as data.

    Attributes:
        method: block-sparse attention; with ``"apbv"``, ``"apb"`` and ``"star"`` within context
            blocks. ``"xattention"`` (Xu et al., 2025), ``"spargeattn"`` (Zhang et al., 2025) or
            ``"flexprefill"`` (Lai et al., 2025), as in their authors' code; differences are listed
            in :mod:`apbv.prefilling.methods.block_selection` and
            :mod:`apbv.prefilling.methods.flexprefill`.
        threshold: share of a query block's estimated attention mass that the selected blocks hold.
            τ in the papers. None: the method's ``default_threshold``, which is 0.9, 0.96 or 0.95.
            With 1 all blocks are computed: attention is dense.
        block_size: queries per block. 32, 64, 128 (all papers') or 256. A block has as many keys,
            or half as many for ``"spargeattn"``.
        default_threshold: the threshold of the method's authors.

    Raises:
        InvalidConfigError: the method is unknown, a number is out of range, or a setting is of
            another method.
    """

    default_threshold: ClassVar[float]

    method: str = one_of(SPARSE_NAMES, "xattention")
    threshold: float | None = number("lie in 0 < threshold <= 1", lambda t: 0 < t <= 1, None)
    block_size: int = one_of((32, 64, 128, 256), 128)

    def __new__(cls, **settings: Any) -> "SparseConfig":
        """Make a config of the class that the method's name stands for."""
        if cls is not SparseConfig:
            return super().__new__(cls)
        method = settings.get("method", "xattention")
        if method not in SPARSE_NAMES:
            raise InvalidConfigError(
                f"sparse method must be one of {', '.join(SPARSE_NAMES)}, not {method!r:.200}"
            )
        kind = SPARSE_CONFIGS[method]
        _require_settings_of(kind, method, settings)
        return super().__new__(kind)

    @property
    def share(self) -> float:
        """The threshold in force."""
        return self.default_threshold if self.threshold is None else self.threshold

    @property
    def computes_all(self) -> bool:
        """Whether no blocks are skipped, so that attention is dense."""
        return self.share == 1

    @property
    def key_block(self) -> int:
        """Keys per block."""
        return self.block_size


def _require_settings_of(kind: type[SparseConfig], method: str, settings: dict[str, Any]) -> None:
    """Raise InvalidConfigError if a setting is of another method."""
    own = {field.name for field in fields(kind)}
    for other_name, other in SPARSE_CONFIGS.items():
        for field in fields(other):
            if field.name in settings and field.name not in own:
                raise InvalidConfigError(
                    f"sparse {field.name} is a setting of {other_name}: {method} does not have it"
                )


@dataclass(frozen=True, kw_only=True)
class XAttentionConfig(SparseConfig, name="sparse "):
    """Settings of XAttention (Xu et al., 2025), which scores the antidiagonals of blocks.

    Its threshold of 0.9 is its authors' for video.

    Attributes:
        stride: adjacent tokens that share one score. It must divide the block size.

    Raises:
        InvalidConfigError: a number is out of range, or the stride does not divide a block.
    """

    default_threshold: ClassVar[float] = 0.9

    method: str = one_of(("xattention",), "xattention")
    stride: int = integer(1, 256, 16)

    def __post_init__(self):
        super().__post_init__()
        if self.block_size % self.stride:
            raise InvalidConfigError(
                f"the stride {self.stride!r} does not divide blocks of {self.block_size} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class SpargeAttnConfig(SparseConfig, name="sparse "):
    """Settings of SpargeAttn (Zhang et al., 2025), which scores the means of blocks.

    Its threshold of 0.96 is the APB-V paper's (Section 5.1).

    Attributes:
        skip_below: leave out values of selected blocks whose scores are this far below the highest,
            a number below 0. It is λ of the second stage (Section 3.4), which its authors find for
            every layer and head; see :func:`apbv.kernels.block_sparse_attention`. None: none are
            left out, as in the APB-V paper's rows here.
        similarity: always compute blocks whose rows have at most this mean cosine similarity. θ,
            -1 .. 1; 0.3 in the APB-V paper.

    Raises:
        InvalidConfigError: a number is out of range.
    """

    default_threshold: ClassVar[float] = 0.96

    method: str = one_of(("spargeattn",), "spargeattn")
    similarity: float = number("lie in -1 .. 1", lambda cosine: -1 <= cosine <= 1, 0.3)
    skip_below: float | None = number(
        "lie below 0", lambda distance: -math.inf < distance < 0, None
    )

    @property
    def key_block(self) -> int:
        """Keys per block: half as many as queries."""
        return self.block_size // 2


@dataclass(frozen=True, kw_only=True)
class FlexPrefillConfig(SparseConfig, name="sparse "):
    """Settings of FlexPrefill (Lai et al., 2025), whose heads are query-aware or vertical-slash.

    Its threshold of 0.95 is its authors' γ.

    Attributes:
        divergence: heads are query-aware where the square root of the Jensen-Shannon divergence of
            their estimate is below this. The estimate is from block means, of the last queries'
            attention; τ, 0 .. 1, is 0.1 in the authors' program. With 0 all heads are
            vertical-slash, as MInference (Jiang et al., 2024) has most of them.
        min_blocks: minimum number of vertical and slash lines of blocks computed in every head. 8
            blocks of 128 tokens are its authors' minimum of 1024 tokens.

    Raises:
        InvalidConfigError: a number is out of range.
    """

    default_threshold: ClassVar[float] = 0.95

    method: str = one_of(("flexprefill",), "flexprefill")
    divergence: float = number("lie in 0 .. 1", lambda root: 0 <= root <= 1, 0.1)
    min_blocks: int = integer(1, 2**31 - 1, 8)


SPARSE_CONFIGS: dict[str, type[SparseConfig]] = {
    "xattention": XAttentionConfig,
    "spargeattn": SpargeAttnConfig,
    "flexprefill": FlexPrefillConfig,
}
