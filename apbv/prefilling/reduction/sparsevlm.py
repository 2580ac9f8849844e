"""SparseVLM, which ranks visual tokens by relevant words, and merges some of the pruned tokens."""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ..moving import move_rows
from ..stages import HiddenRows, Stage
from .attention import QuestionAttention
from .choosing import MOST_DISTANCES, density_peaks, keep_best, means_of_groups
from .late import LateReducer, Selection

# Layers of 32 after which tokens are pruned: the paper's 2, 6 and 15 are numbers of layers, from 0.
_STEPS, _DEPTH = (3, 7, 16), 32
_RECYCLED = 0.3  # of the dropped tokens, the best are merged (τ)
_TOKENS_PER_CLUSTER = 10  # merged into one (1 / θ)


class SparseVLM(LateReducer):
    """SparseVLM: prunes visual tokens in three steps, by the attention of the words that fit them best.

    Zhang et al. (2024), "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference":

    - *Raters* are the question's tokens whose embeddings fit those of the visual tokens no less than on average:
      softmax over the question's tokens of the products, mean over the visual tokens (Section 3.2).
    - Of V visual tokens a step drops λ (V − rank P), those with the least attention, where P is the raters'
      attention to them, mean over heads (Eq. 7).
    - The best 30 % of the dropped tokens are clustered by density peaks, and each cluster becomes one token, the
      mean of its members, in the place of its centre (Section 3.3).

    ``ratio`` is the share that λ alone would leave after the last step: a step's λ is one minus its third root.
    The rank and the merged tokens leave somewhat more; the released program leaves fixed numbers of LLaVA's 576
    tokens instead. What differs: merged tokens stay at their centres' places instead of after all others, and
    where a model adds visual features after its first layers (Qwen3-VL), a merged token gets its centre's. The
    program also numbers the tokens that are kept anew, from 0. Here they stay at their positions, as in
    :class:`~apbv.prefilling.reduction.by_attention.PyramidDrop`.

    ``layer`` is where the first step is; the others lie as far after it as in the paper, for the model's depth.
    """

    name = "sparsevlm"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        first = settings.layer or max(1, round(_STEPS[0] * num_layers / _DEPTH))
        depth = (num_layers - first) / (_DEPTH - _STEPS[0])
        steps = {first + round((step - _STEPS[0]) * depth) for step in _STEPS}
        return tuple(sorted(layer for layer in steps if layer < num_layers))

    def enter(self, stage: Stage, rows: HiddenRows) -> None:
        """Find the raters' places among the question's tokens, in the embeddings; the same on every host."""
        if stage.layers.start == 0:
            hosts, states = stage.hosts, stage.question_rows(rows, self.parts)
            fits = (self._visual_states(stage, rows).float() @ states.float().T).softmax(dim=1).sum(dim=0)
            fits = hosts.mean_over_members(hosts.all_gather(fits).wait().sum(dim=0).cpu())
            self._raters = (~(fits < fits.mean())).nonzero().flatten()  # all where numbers have overflown

    def watcher(self, stage: Stage) -> QuestionAttention:
        return QuestionAttention(torch.eye(len(stage.question))[self._raters])

    def choose(self, stage: Stage, rows: HiddenRows, attention: Tensor) -> Selection:
        num_visual = attention.shape[1]
        # Of a matrix in fp32, as in the paper's program: singular values within its rounding count as 0. Of what
        # is not finite there would be an error, which would break the group of hosts.
        mine = [int(torch.linalg.matrix_rank(attention.nan_to_num()))] if stage.hosts.is_leader else None
        (rank,) = stage.hosts.broadcast_ints(mine, 1)
        strength = 1 - self.settings.ratio ** (1 / len(self.layers))  # λ
        num_dropped = min(round(strength * (num_visual - rank)), num_visual - 1)
        scores = attention.mean(dim=0)
        kept = keep_best(scores, num_visual - num_dropped)
        dropped = torch.ones(num_visual, dtype=torch.bool)
        dropped[kept] = False
        dropped = dropped.nonzero().flatten()
        if not len(dropped):
            return Selection(kept)
        recycled = dropped[keep_best(scores[dropped], int(_RECYCLED * len(dropped)) + 1)]
        centres, values = _merge(stage, self._visual_states(stage, rows), recycled)
        return Selection(torch.cat([kept, centres]).sort().values, centres, values)

    def _visual_states(self, stage: Stage, rows: HiddenRows) -> Tensor:
        return stage.states_of(stage.owned_visual[stage.hosts.rank], rows, self.parts)


def _merge(stage: Stage, states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Merge some visual tokens to fewer; return the tokens that stand for them, ascending, and their states.

    Collective. Host 0 clusters, so that all hosts have the same clusters.

    Args:
        states: of the visual tokens that this host keeps.
        chosen: numbers among the stage's visual tokens, ascending.
    """
    hosts, tokens = stage.hosts, stage.is_visual.nonzero().flatten()[chosen]
    wanted = [tokens] + [tokens[:0]] * (hosts.size - 1)
    states = move_rows(states, stage.owned_visual, wanted, hosts)
    count = len(chosen) // _TOKENS_PER_CLUSTER + 1
    found = None
    if hosts.is_leader:
        centres, cluster = cluster_by_density(states, count)
        found = [*centres.tolist(), *cluster.tolist()]
    centres, cluster = torch.tensor(hosts.broadcast_ints(found, count + len(chosen))).split([count, len(chosen)])
    if hosts.rank == 0:
        values = means_of_groups(states, cluster, count)
    else:
        values = states.new_empty(count, states.shape[1])
    return chosen[centres], hosts.broadcast(values)


def cluster_by_density(states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cluster rows by density peaks with k nearest neighbours, as SparseVLM's program does.

    Densities are of the k = ``count`` nearest rows. Of rows that are equal the earlier one is the better centre.
    Every other row joins its nearest centre.

    Args:
        states: ``[m, d]``.
        count: how many clusters, at most m.

    Returns:
        The centres, ``[count]`` ascending, and the number of each row's cluster, ``[m]``, as their place there.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    centres = keep_best(density_peaks(states, count), count)
    chunks = states.split(max(1, MOST_DISTANCES // count))
    cluster = torch.cat([torch.cdist(rows, states[centres]).argmin(dim=1) for rows in chunks])
    cluster[centres] = torch.arange(count, device=states.device)
    return centres, cluster
