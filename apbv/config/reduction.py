"""This module defines how many visual tokens of a prompt are left, and who chooses them."""

from dataclasses import dataclass

from .checks import is_int, is_number, require_known
from .names import LATE_REDUCER_NAMES, REDUCER_NAMES, VIDEO_REDUCER_NAMES


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """A ReduceConfig says which of a prompt's visual tokens the language model reads; the others are lost.

    Tokens that are left stay at their rotary positions.

    Attributes:
        method: a name in :data:`apbv.config.REDUCER_NAMES`. Before the language model, from the frames alone:
            ``"slowfast"``, ``"fastvid"``, ``"dycoke"``, ``"hippo"``. Between its layers, by what they have
            computed: ``"fastv"``, ``"pdrop"``, ``"sparsevlm"``, ``"uv_prune"``, ``"hippo_attention"`` (see
            :mod:`apbv.prefilling.reduction`).
        ratio: the share of a video's visual tokens that is left, rounded, and at least one token. 1: all, and the
            prompt is prefilled as without a reduction.
        layer: for a method inside the language model, after how many of its decoder layers tokens are left out;
            None: as in the method's paper, where it says that.

    Raises:
        ValueError: the method is unknown, a number out of range, or a layer is given to a method without one.
    """

    method: str
    ratio: float = 0.5
    layer: int | None = None

    def __post_init__(self):
        require_known("reduce", self.method, REDUCER_NAMES)
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ValueError(f"the ratio of a reduction must lie in 0 < ratio <= 1, not {self.ratio!r}")
        if self.layer is None:
            return
        if self.method not in LATE_REDUCER_NAMES:
            raise ValueError(f"{self.method} leaves tokens out before the language model: it has no layer")
        if not is_int(self.layer) or self.layer < 1:
            raise ValueError(f"the layer of a reduction must be an integer of at least 1, not {self.layer!r}")

    @property
    def leaves_all(self) -> bool:
        """Whether nothing is left out, so that the prompt is prefilled as without a reduction."""
        return self.ratio == 1

    @property
    def is_late(self) -> bool:
        """Whether tokens are left out between layers of the language model, and not before it."""
        return self.method in LATE_REDUCER_NAMES

    @property
    def needs_video(self) -> bool:
        """Whether only tokens of videos' frames are left out, so that a prompt without a video is refused."""
        return self.method in VIDEO_REDUCER_NAMES
