"""This module defines FastV, which drops visual tokens once, by the question's attention in an early layer."""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ...model.sizes import DecoderSizes
from ..stages import Stage
from .choosing import keep_best
from .late import Choice, LateReducer, OwnedRows

_LAYER = 2  # K of the paper


class FastV(LateReducer):
    """FastV keeps, behind its first K layers, the visual tokens that got the most attention in the K-th.

    Chen et al. (2024), "An Image is Worth 1/2 Tokens After Layer 2", average the attention that a token gets over
    heads and over all tokens, for which every token's attention has to be computed; their program takes the last
    token's. Here it is the mean over the question's tokens, a window at the prompt's end as in SnapKV, with which
    the APB-V paper runs FastV (Appendix C.2).
    """

    name = "fastv"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or min(_LAYER, num_layers - 1),)

    @staticmethod
    def num_asking(num_question: int, sizes: DecoderSizes) -> int:
        return num_question * sizes.heads // sizes.kv_heads

    def raters(self, stage: Stage) -> Tensor:
        return torch.full((1, len(stage.question)), 1 / len(stage.question))

    def choose(self, stage: Stage, rows: OwnedRows, attention: Tensor) -> Choice:
        return Choice(keep_best(attention[0], self.count(self.settings.ratio)))
