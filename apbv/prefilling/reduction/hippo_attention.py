"""This module drops visual tokens by HIPPO's whole score: attention, change over time, and variety in space."""

from torch import Tensor

from ...config import ReduceConfig
from ...model.sizes import DecoderSizes
from ..moving import move_rows
from ..stages import Stage
from .choosing import keep_best
from .frames import num_in_frames
from .hippo import local_semantics, with_relevance
from .late import Choice, LateReducer, OwnedRows, Remainder
from .question_attention import RelevanceSoFar
from .shape import PromptShape, count_of


class HippoAttention(LateReducer):
    """HippoAttention keeps, behind the first K layers, the tokens of a video with HIPPO's highest scores (Eq. 7).

    *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel Speculative Decoding*
    (Section 5.1) adds three terms, each z-scored within a frame:

    - s_attn, the question's attention: softmax over the visual tokens only, mean over layers, heads and the
      question's tokens (Eq. 2);
    - s_temp, how much a token's embedding differs from those at the same place in the frames beside it (Eq. 4);
    - s_spa, the variance of its similarities to the tokens around it (Eq. 6).

    What differs: there the score chooses what a draft sees, and nothing is lost. s_attn is there the mean over all
    layers of the target, after which nothing could be saved; here it is that over the K layers which have run, by
    default half of all. Tokens are chosen over all videos at once. Images, and a separator behind a video, have no
    frames beside them and are never left out; ``ratio`` is the share of the others.
    """

    name = "hippo_attention"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or max(1, num_layers // 2),)

    @classmethod
    def remainders(cls, settings: ReduceConfig, num_layers: int, shape: PromptShape) -> tuple[Remainder, ...]:
        (layer,) = cls.choose_layers(settings, num_layers)
        count = _num_left(settings, shape.num_visual, shape.num_in_frames)
        return (Remainder(layer, count, count),)

    @staticmethod
    def num_asking(num_question: int, sizes: DecoderSizes) -> int:
        """All heads at a time."""
        return num_question * sizes.heads

    def enter(self, stage: Stage, rows: OwnedRows) -> None:
        """Score time and space, from the embeddings, which every host gets of the frames that it encoded."""
        visual, hosts = rows.is_visual.nonzero().flatten(), stage.hosts
        wanted = [visual[piece.start : piece.stop] for piece in self.inputs.visual.pieces]
        frames = move_rows(rows.visual(), rows.visual_tokens, stage.owner, wanted, hosts)
        self._semantics = hosts.mean_over_members(
            local_semantics(self.parts, self.inputs, frames, hosts, ("time", "space"))
        )

    def wanted_attention(self, stage: Stage, is_visual: Tensor) -> RelevanceSoFar:
        return RelevanceSoFar(stage, is_visual)

    def choose(self, stage: Stage, rows: OwnedRows, attention: Tensor) -> Choice:
        count = _num_left(self.settings, self.num_visual, num_in_frames(self.parts, self.inputs))
        scores = with_relevance(self.parts, self.inputs, self._semantics, attention[0])
        return Choice(keep_best(scores, count))


def _num_left(settings: ReduceConfig, num_visual: int, num_in_videos: int) -> int:
    """Return how many visual tokens are left, of which only those of videos' frames are ever left out."""
    return num_visual - num_in_videos + count_of(settings.ratio, num_in_videos)
