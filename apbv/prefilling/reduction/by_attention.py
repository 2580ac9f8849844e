"""FastV and PyramidDrop, which drop visual tokens by the attention of the prompt's end."""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ..stages import HiddenRows, Stage
from .attention import QuestionAttention
from .choosing import count_of, keep_best
from .late import LateReducer, Selection

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

    def watcher(self, stage: Stage) -> QuestionAttention:
        return QuestionAttention(torch.full((1, len(stage.question)), 1 / len(stage.question)))

    def choose(self, stage: Stage, rows: HiddenRows, attention: Tensor) -> Selection:
        return Selection(keep_best(attention[0], count_of(self.settings.ratio, self.num_visual)))


_STEPS = 3


class PyramidDrop(LateReducer):
    """PyramidDrop drops the same share of visual tokens behind a quarter, a half and three quarters of the layers.

    Xing et al. (2024), "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy
    Reduction", rank tokens by the attention of the instruction's last token. What differs: they multiply hidden
    states anew by the next layer's query and key weights, and here the attention is that of the last layer that
    was computed. ``ratio`` is the share that is left behind the last step; each step keeps its third root.

    ``layer`` is where the first step is; the others divide the layers behind it evenly.
    """

    name = "pdrop"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        first = settings.layer or max(1, num_layers // (_STEPS + 1))
        steps = {first + (num_layers - first) * step // _STEPS for step in range(_STEPS)}
        return tuple(sorted(layer for layer in steps if layer < num_layers))

    def watcher(self, stage: Stage) -> QuestionAttention:
        last = torch.zeros(1, len(stage.question))
        last[0, -1] = 1
        return QuestionAttention(last)

    def choose(self, stage: Stage, rows: HiddenRows, attention: Tensor) -> Selection:
        step = self.layers.index(stage.layers.stop) + 1
        share = self.settings.ratio ** (step / len(self.layers))
        return Selection(keep_best(attention[0], count_of(share, self.num_visual)))
