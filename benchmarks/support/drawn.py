"""Lets a reducer keep other tokens than its ranking would: drawn at random, or those of needles before others.

What a ranking is worth shows beside them: they keep as many tokens, after the same layers. A ranking below the
random choice throws away what is asked about; one that knows the needles shows what so few tokens allow.
"""

from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor

from apbv import ReduceConfig
from apbv.prefilling.reduction import EARLY_REDUCERS, LATE_REDUCERS
from apbv.prefilling.reduction.choosing import keep_best
from apbv.prefilling.reduction.late import Selection


def ranked_by(scores: Tensor, reduce: ReduceConfig) -> AbstractContextManager:
    """Let a reducer keep, of a prompt of one video on one host, the tokens with the highest of these scores.

    Args:
        scores: ``[visual tokens]`` of the prompt.
    """
    registry = LATE_REDUCERS if reduce.is_late else EARLY_REDUCERS
    ranking = registry[reduce.method]

    def keep(video, count):
        return video.kept(keep_best(scores, len(ranking(video, count).places)))

    def choose(self, stage, rows, seen):
        count = len(ranking.choose(self, stage, rows, seen).left)
        tokens = slice(None) if stage.tokens is None else stage.tokens
        numbers = self.parts.is_visual(self.inputs.input_ids[0]).cumsum(0)[tokens][stage.is_visual] - 1
        return Selection(keep_best(scores[numbers], count))

    drawn = type("Drawn", (ranking,), {"choose": choose}) if reduce.is_late else keep
    return patch.dict(registry, {reduce.method: drawn})
