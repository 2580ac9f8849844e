"""This module drops visual tokens by ParallelVLM's scores, which there only choose what a draft sees."""

from torch import Tensor
from torch.nn import functional

from ...config import ReduceConfig
from ...kernels import similarity_to
from ..stages import Stage
from .choosing import gather_scores, keep_best
from .late import Choice, LateReducer, OwnedRows

_LAYER = 20  # L of the paper


class UvPrune(LateReducer):
    """UvPrune keeps, behind layer L, the visual tokens that came closest to the question since the embeddings.

    The scores are ParallelVLM's Eq. 3, ΔS_i = v̂_i^L · Σ_j x̂_j^L − v̂_i^0 · Σ_j x̂_j^0, with unit vectors of visual
    tokens v and of the question's tokens x. In the paper they choose the visual tokens of a draft, and nothing is
    lost.
    """

    name = "uv_prune"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or min(_LAYER, num_layers - 1),)

    def enter(self, stage: Stage, rows: OwnedRows) -> None:
        self._before = _similarity(stage, rows)

    def choose(self, stage: Stage, rows: OwnedRows, attention: None) -> Choice:
        change = _similarity(stage, rows) - self._before
        scores = gather_scores(change, rows.visual_numbers, stage.hosts)
        return Choice(keep_best(stage.hosts.mean_over_members(scores), self.count(self.settings.ratio)))


def _similarity(stage: Stage, rows: OwnedRows) -> Tensor:
    """Return the summed similarity of this host's visual tokens to the question's; collective."""
    mine = functional.normalize(rows.question().float(), dim=-1).sum(dim=0)
    question = stage.hosts.all_gather(mine).wait().sum(dim=0)
    return similarity_to(rows.visual(), question)
