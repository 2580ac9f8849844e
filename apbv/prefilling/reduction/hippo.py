"""Scores visual tokens as HIPPO does: by change over time, variety in space, and attention.

Source: *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel Speculative
Decoding*, Section 5.1.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from ...config import ReduceConfig
from ...hosts import HostGroup
from ...input.model_inputs import ModelInputs
from ...kernels import spatial_variety, temporal_change
from ...model.parts import ModelParts
from ..moving import move_rows
from ..stages import HiddenRows, Stage
from .attention import Relevance
from .choosing import count_of, keep_best, standardised
from .frames import num_in_frames, shared_video, videos_of
from .late import LateReducer, Selection


def local_semantics(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, terms: Collection[str]
) -> Tensor:
    """Add HIPPO's s_temp (Eq. 4) and s_spa (Eq. 6) of all visual tokens, each z-scored within a frame; collective.

    Every host scores the frames that it has, for which it needs one frame of either neighbouring host. A row that
    belongs to no frame (a separator at a video's end) has an infinite score: it is never pruned.

    Args:
        rows: ``[rows of this host's share, d]``, the vision tower's output.
        terms: ``"time"`` for s_temp, ``"space"`` for s_spa.

    Returns:
        ``[visual tokens]`` on every host, in CPU memory.
    """
    result = torch.full((inputs.num_visual_tokens,), float("inf"))
    for place in videos_of(parts, inputs):
        video = shared_video(parts, inputs, place, rows, hosts)
        frames, num_frames, mine = video.embeddings, video.num_frames, video.mine
        neighbours = [
            [frame for frame in (share.start - 1, share.stop) if share and 0 <= frame < num_frames]
            for share in video.shares
        ]
        beside = dict(zip(neighbours[hosts.rank], video.fetch(neighbours, frames), strict=True))
        scores = torch.zeros(frames.shape[:2], device=frames.device)
        if "time" in terms:
            before, after = beside.get(mine.start - 1), beside.get(mine.stop)
            scores = scores + standardised(temporal_change(frames, before, after), unit=1.0)
        if "space" in terms:
            scores = scores + standardised(spatial_variety(frames, video.height, video.width), unit=1.0)
        result[place.in_frames.start : place.in_frames.stop] = video.gather(scores).flatten()
    return result


def with_relevance(parts: ModelParts, inputs: ModelInputs, semantics: Tensor, attention: Tensor) -> Tensor:
    """Add HIPPO's s_attn, z-scored within a frame, to the terms of time and space (Eq. 7).

    Args:
        semantics: ``[visual tokens]``, as :func:`local_semantics` returns them.
        attention: ``[visual tokens]``, s_attn.
    """
    scores = semantics.clone()
    for video in videos_of(parts, inputs):
        place = slice(video.in_frames.start, video.in_frames.stop)
        scores[place] += standardised(attention[place].view(-1, video.height * video.width)).flatten()
    return scores


class HippoAttention(LateReducer):
    """HIPPO's scores as a reducer: keeps, after the first K layers, a video's highest-scoring tokens (Eq. 7).

    *HIPPO: Accelerating Video Large Language Models Inference via Holistic-aware Parallel Speculative Decoding*
    (Section 5.1) adds three terms, each z-scored within a frame:

    - s_attn, the question's attention: softmax over the visual tokens only, mean over layers, heads and the
      question's tokens (Eq. 2);
    - s_temp, how much a token's embedding differs from those at the same place in the adjacent frames (Eq. 4);
    - s_spa, the variance of its similarities to the tokens around it (Eq. 6).

    What differs: there the score chooses what a draft sees, and nothing is lost. s_attn is there the mean over all
    layers of the target, after which nothing could be saved; here it is that over the K layers which have run, by
    default half of all. Tokens are chosen over all videos at once. Images, and a separator after a video, have no
    adjacent frames and are never pruned; ``ratio`` is the share of the others.
    """

    name = "hippo_attention"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or max(1, num_layers // 2),)

    def enter(self, stage: Stage, rows: HiddenRows) -> None:
        """Score time and space, from the embeddings, which every host gets of the frames that it encoded."""
        visual, hosts = stage.is_visual.nonzero().flatten(), stage.hosts
        wanted = [visual[piece.start : piece.stop] for piece in self.inputs.visual.pieces]
        mine = stage.states_of(stage.owned_visual[hosts.rank], rows, self.parts)
        frames = move_rows(mine, stage.owned_visual, wanted, hosts)
        self._semantics = hosts.mean_over_members(
            local_semantics(self.parts, self.inputs, frames, hosts, ("time", "space"))
        )

    def watcher(self, stage: Stage) -> Relevance:
        return Relevance()

    def choose(self, stage: Stage, rows: HiddenRows, attention: Tensor) -> Selection:
        num_in_videos = num_in_frames(self.parts, self.inputs)
        count = self.num_visual - num_in_videos + count_of(self.settings.ratio, num_in_videos)
        scores = with_relevance(self.parts, self.inputs, self._semantics, attention)
        return Selection(keep_best(scores, count))
