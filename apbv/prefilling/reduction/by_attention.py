"""FastV and PyramidDrop, which prune visual tokens by the attention of the prompt's end."""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ..stages import HiddenRows, Stage
from .attention import QuestionAttention, attention_ahead
from .choosing import count_of, keep_best
from .late import LateReducer, Selection

_LAYER = 2  # K of the paper


def _raters(settings: ReduceConfig, stage: Stage) -> Tensor:
    """Return the weights of those who ask, ``[1, n_q]``: the last token, or all of the question alike."""
    each = torch.eye(len(stage.question))
    return each.mean(dim=0, keepdim=True) if settings.asked_by == "question" else each[-1:]


class FastV(LateReducer):
    """FastV: keeps, after the first K layers, the visual tokens that got the most attention in the K-th.

    Chen et al. (2024), "An Image is Worth 1/2 Tokens After Layer 2", average the attention that a token gets over
    heads and over all tokens, for which every token's attention has to be computed; their program takes the last
    token's, and so is it here. ``asked_by="question"`` takes the mean over the question's tokens instead, a window
    at the prompt's end as in SnapKV, with which the APB-V paper runs FastV (Appendix C.2). As in their program,
    tokens stay at their positions.
    """

    name = "fastv"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or min(_LAYER, num_layers - 1),)

    def watcher(self, stage: Stage) -> QuestionAttention:
        return QuestionAttention(_raters(self.settings, stage))

    def choose(self, stage: Stage, rows: HiddenRows, attention: Tensor) -> Selection:
        return Selection(keep_best(attention[0], count_of(self.settings.ratio, self.num_visual)))


_STEPS = 3


class PyramidDrop(LateReducer):
    """PyramidDrop: prunes visual tokens by the same ratio after a quarter, a half and three quarters of the
    layers.

    Xing et al. (2024), "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy
    Reduction", rank tokens by the attention of the instruction's last token in the next layer, whose queries and
    keys are computed for that. ``asked_by="question"`` takes the mean over the question's tokens instead.
    ``ratio`` is the share that is kept after the last step; each step keeps its third root.

    What differs: their program numbers the tokens that are kept anew, from 0. Here they stay at their positions,
    which have a time, height and width in most families, and a token that is decoded has one for all layers.

    ``layer`` is where the first step is; the others divide the layers after it evenly.
    """

    name = "pdrop"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        first = settings.layer or max(1, num_layers // (_STEPS + 1))
        steps = {first + (num_layers - first) * step // _STEPS for step in range(_STEPS)}
        return tuple(sorted(layer for layer in steps if layer < num_layers))

    def choose(self, stage: Stage, rows: HiddenRows, seen: None) -> Selection:
        attention = attention_ahead(stage, rows, self.parts, self.inputs, _raters(self.settings, stage))
        step = self.layers.index(stage.layers.stop) + 1
        share = self.settings.ratio ** (step / len(self.layers))
        return Selection(keep_best(attention[0], count_of(share, self.num_visual)))
