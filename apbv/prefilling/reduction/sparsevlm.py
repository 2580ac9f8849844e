"""SparseVLM, which ranks visual tokens by relevant words, and merges some of those that it drops.

Source: Zhang et al., *SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model
Inference* (ICML 2025).

- *Raters* are the question's tokens whose embeddings fit the visual tokens no less than on average:
  softmax over the question's tokens of the products, mean over the visual tokens (Section 3.2). The
  authors' program takes those above the average only, and so no rater where all fit alike.
- Of V visual tokens a step drops λ (V − rank P), those with the least attention, where P is the
  raters' attention to them, mean over heads, in the layer before (Eq. 7).
- The best 30 % of the dropped tokens are clustered by density peaks, one cluster for ten tokens,
  and each cluster becomes one token: the mean of its members, in the place of its centre
  (Section 3.3).

``ratio`` is the share that λ alone would leave after the last step: a step's λ is one minus its
third root. The rank and the merged tokens leave somewhat more.

What is different here: the authors' program leaves fixed numbers of LLaVA's 576 tokens. It puts
merged tokens behind all others; here they stay at their centres' places. Where a model adds visual
features after its first layers (Qwen3-VL), a merged token gets its centre's. The program numbers
the tokens that stay anew, from 0; here they stay at their positions, as in :mod:`.pyramiddrop`.
``layer`` is where the first step is; the others lie as far after it as in the paper, for the
model's depth.
"""

import torch
from torch import Tensor

from ...config import ReduceConfig
from ...model.forward import LayerRows
from .choosing import keep_best, means_of_groups
from .layer_reducer import LayerReducer, Selection

# Layers of 32 after which tokens are pruned: the paper's 2, 6 and 15 are numbers of layers, from 0.
_STEPS = (3, 7, 16)
_DEPTH = 32
_RECYCLED = 0.3  # of the dropped tokens, the best are merged (τ)
_TOKENS_PER_CLUSTER = 10  # merged into one (1 / θ)


class SparseVLM(LayerReducer):
    """Prunes in steps, by the attention of raters in the layer before."""

    name = "sparsevlm"
    _raters: Tensor | None = None  # their numbers in the question
    _attention: Tensor | None = None  # of the raters, in the layer before a step

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        first = settings.layer or max(1, round(_STEPS[0] * num_layers / _DEPTH))
        depth = (num_layers - first) / (_DEPTH - _STEPS[0])
        steps = {first + round((step - _STEPS[0]) * depth) for step in _STEPS}
        return tuple(sorted(layer for layer in steps if layer < num_layers))

    def before(self, layer: int, rows: LayerRows) -> None:
        if layer == 0:
            products = self.visual_states(rows).float() @ self.question_states(rows).float().T
            fits = products.softmax(dim=1).mean(dim=0).cpu()
            # All are raters where numbers have overflown.
            self._raters = (~(fits < fits.mean())).nonzero().flatten()

    def on_attention(self, q: Tensor, k: Tensor, scale: float, layer: int) -> None:
        if layer + 1 in self.layers:
            assert self._raters is not None, "they were found before the first layer"
            self._attention = self.attention_of(self._raters, q, k, scale)

    def choose(self, rows: LayerRows) -> Selection:
        attention = self._attention
        assert attention is not None, "the layer before has attention"
        # Of a matrix in fp32, as in the authors' program: singular values within its rounding count
        # as 0. What is not finite has no rank.
        rank = int(torch.linalg.matrix_rank(attention.float().nan_to_num()))
        strength = 1 - self.settings.ratio ** (1 / len(self.layers))  # λ
        num_dropped = min(round(strength * (self.num_left - rank)), self.num_left - 1)
        scores = attention.mean(dim=0)
        kept = keep_best(scores, self.num_left - num_dropped)
        is_dropped = torch.ones(self.num_left, dtype=torch.bool)
        is_dropped[kept] = False
        dropped = is_dropped.nonzero().flatten()
        if not len(dropped):
            return Selection(kept)

        # Merge the best of the dropped tokens.
        recycled = dropped[keep_best(scores[dropped], int(_RECYCLED * len(dropped)) + 1)]
        states = self.visual_states(rows)[recycled.to(rows.hidden.device)]
        count = len(recycled) // _TOKENS_PER_CLUSTER + 1
        centres, cluster_of_token = cluster_by_density(states, count)
        merged = recycled[centres]
        values = means_of_groups(states, cluster_of_token, count)
        return Selection(torch.cat([kept, merged]).sort().values, merged, values)


def cluster_by_density(states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cluster rows by density peaks, with the ``count`` nearest rows as neighbours.

    A row's density is exp(−mean of the squared distances to its nearest rows, itself among them).
    Centres have the highest products of density and distance to the nearest denser row; of equally
    dense rows the earlier is denser, and the densest has the largest distance of all. Every other
    row joins its nearest centre. Distances are divided by √d.

    Args:
        states: ``[m, d]``.
        count: how many clusters, at most m.

    Returns:
        The centres, ``[count]`` ascending, and of each row the number of its cluster, ``[m]``; in
        CPU memory.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    distances = torch.cdist(states, states) / states.shape[1] ** 0.5
    nearest = distances.topk(min(count, len(states)), largest=False).values
    density = nearest.square().mean(dim=1).neg().exp()
    rank = torch.empty(len(states), dtype=torch.long, device=states.device)
    order = density.argsort(descending=True, stable=True)
    rank[order] = torch.arange(len(states), device=states.device)
    not_denser = rank[None] >= rank[:, None]
    to_denser = distances.masked_fill(not_denser, float("inf")).min(dim=1).values
    peaks = to_denser.clamp(max=distances.max()) * density
    centres = keep_best(peaks.cpu(), count)
    cluster_of_row = distances[:, centres.to(states.device)].argmin(dim=1).cpu()
    cluster_of_row[centres] = torch.arange(count)
    return centres, cluster_of_row
