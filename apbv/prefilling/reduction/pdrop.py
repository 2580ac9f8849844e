"""This module defines PyramidDrop, which drops visual tokens in steps, by the last token's attention."""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ...model.sizes import DecoderSizes
from ..stages import Stage
from .choosing import keep_best
from .late import Choice, LateReducer, OwnedRows

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

    @staticmethod
    def num_asking(num_question: int, sizes: DecoderSizes) -> int:
        return sizes.heads // sizes.kv_heads

    def raters(self, stage: Stage) -> Tensor:
        last = torch.zeros(1, len(stage.question))
        last[0, -1] = 1
        return last

    def choose(self, stage: Stage, rows: OwnedRows, attention: Tensor) -> Choice:
        step = self.layers.index(stage.layers.stop) + 1
        return Choice(keep_best(attention[0], self.count(self.settings.ratio ** (step / len(self.layers)))))
