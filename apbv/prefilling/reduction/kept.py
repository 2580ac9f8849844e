"""This module defines what a reduction before the language model leaves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .frames import SharedVideo


@dataclass(frozen=True)
class KeptRows:
    """A KeptRows holds the rows of a video that a host has after a reduction.

    Attributes:
        frames: the numbers of the frames to which they belong; in the hosts' order these are all frames.
        places: ``[K]``, ascending, where the rows belong: tokens of the video, numbered frame by frame.
        values: ``[K, (1 + L) * d]``. A row that was made of several has the place of one of them.
    """

    frames: range
    places: Tensor
    values: Tensor

    @classmethod
    def chosen(cls, video: SharedVideo, places: Tensor) -> "KeptRows":
        """Keep rows as they are.

        Args:
            places: ``[K]``, ascending, which ones; those of other hosts' frames are ignored.
        """
        first, size = video.mine.start * video.frame_size, len(video.mine) * video.frame_size
        places = places[(places >= first) & (places < first + size)]
        values = video.rows.flatten(0, 1)[(places - first).to(video.rows.device)]
        return cls(video.mine, places, values)


# Keeps ``count`` tokens of a video, or fewer where that does not come out even, and at least one; collective.
EarlyReducer = Callable[[SharedVideo, int], KeptRows]


@dataclass(frozen=True)
class Reduction:
    """A Reduction says what was left of a prompt's visual tokens.

    Attributes:
        method, ratio: as in :class:`apbv.ReduceConfig`.
        num_before, num_after: the visual tokens of the prompt, and of them those that are left, in the language
            model's last layers where tokens are left out between layers.
        kept: ``[num_after]``, ascending, which ones.
        by_layer: how many there are in every layer, where tokens are left out between layers; else empty.
    """

    method: str
    ratio: float
    num_before: int
    num_after: int
    kept: Tensor = field(repr=False)
    by_layer: tuple[int, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """What the figures of a request say of it."""
        return {
            "method": self.method,
            "ratio": self.ratio,
            "num_video_tokens_before": self.num_before,
            "num_video_tokens_after": self.num_after,
            "num_video_tokens_by_layer": list(self.by_layer) or None,
        }

    def spread(self, scores: Tensor, missing: float = 0.0) -> Tensor:
        """Return scores of the tokens that are left, ``[num_after]``, as scores of all, ``[num_before]``.

        Args:
            missing: the score of the others.
        """
        spread = torch.full((self.num_before,), missing, dtype=scores.dtype)
        spread[self.kept] = scores
        return spread
