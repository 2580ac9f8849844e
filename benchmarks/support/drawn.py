"""Lets a reducer keep other tokens than its ranking would: drawn at random, or those of needles before others.

What a ranking is worth shows beside them: they keep as many tokens. A ranking below the random choice throws away
what is asked about; one that knows the needles shows what so few tokens allow.
"""

from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor

from apbv import ReduceConfig
from apbv.prefilling.reduction import REDUCERS
from apbv.prefilling.reduction.choosing import keep_best


def ranked_by(scores: Tensor, reduce: ReduceConfig) -> AbstractContextManager:
    """Let a reducer keep, of a prompt of one video on one host, the tokens with the highest of these scores.

    Args:
        scores: ``[visual tokens]`` of the prompt.
    """
    ranking = REDUCERS[reduce.method]

    def keep(video, count):
        return video.kept(keep_best(scores, len(ranking(video, count).places)))

    return patch.dict(REDUCERS, {reduce.method: keep})
