"""This module says how many tokens of a prompt are what, and how many a reduction is to leave; integers only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config import ReduceConfig
from ...input.model_inputs import ModelInputs
from ...model.parts import ModelParts
from .frames import videos_of


@dataclass(frozen=True)
class PromptShape:
    """A PromptShape says how many tokens of a prompt are what.

    Attributes:
        num_tokens: n.
        context_start, query_start: as of :class:`~apbv.input.model_inputs.ModelInputs`; all visual tokens lie
            between.
        num_visual: the visual tokens.
        videos: of every video its frames T, and their rows h and columns w of visual tokens; empty where nothing
            is left out.
    """

    num_tokens: int
    context_start: int
    query_start: int
    num_visual: int = 0
    videos: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, parts: ModelParts, inputs: ModelInputs, settings: ReduceConfig | None) -> "PromptShape":
        """Return the shape of a prompt, of which a reduction leaves tokens out as the settings say."""
        places = [] if settings is None or settings.leaves_all else videos_of(parts, inputs)
        videos = tuple((len(video.patches), video.height, video.width) for video in places)
        start, stop = inputs.context_start, inputs.query_start
        return cls(inputs.num_tokens, start, stop, inputs.num_visual_tokens, videos)

    @property
    def num_question(self) -> int:
        """n_q, the question's tokens."""
        return self.num_tokens - self.query_start

    @property
    def num_in_frames(self) -> int:
        """The visual tokens that belong to frames of videos."""
        return sum(frames * height * width for frames, height, width in self.videos)

    @property
    def visual(self) -> range:
        """From the first visual token to the last; nothing where there is none."""
        return range(self.context_start, self.query_start) if self.num_visual else range(0)

    def with_visual(self, count: int) -> "PromptShape":
        """Return the shape of a prompt of which so many visual tokens are left."""
        gone = self.num_visual - count
        stop = self.query_start - gone
        return replace(self, num_tokens=self.num_tokens - gone, query_start=stop, num_visual=count)


def count_of(share: float, num_tokens: int) -> int:
    """Return how many tokens a share of some is: rounded, and at least one."""
    return max(1, round(share * num_tokens))


def shares_of_videos(count: int, lengths: Sequence[int]) -> list[int]:
    """Share ``count`` tokens out over videos, in proportion to their lengths as far as that comes out even."""
    shares, before, total = [], 0, sum(lengths)
    for length in lengths:
        shares.append((before + length) * count // total - before * count // total)
        before += length
    return shares
