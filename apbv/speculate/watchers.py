"""Watchers of the target's prefill: scores of visual tokens, and the KV pairs that are passed on."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import similarity_to
from ..prefilling.reduction.attention import VisualWatcher, scores_of_keys
from ..prefilling.stages import Stage


class HeadAttention(VisualWatcher):
    """STD's scores (Section 3.2), one list per layer and KV head.

    They are the question's attention, summed over the KV head's query heads.
    """

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.layers, self._found = stage.layers, []
        # [query tokens, this host's tokens]: tokens of the question do not see later ones.
        question = torch.arange(stage.query_start, stage.num_tokens)
        self._hidden = stage.owned[stage.hosts.rank] > question[:, None]

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        scores = scores_of_keys(q, keys[:, :, rows], scale)
        group = q.shape[1] // scores.shape[0]
        hidden = self._hidden.to(scores.device).repeat(group, 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = self.over_hosts(scores.logsumexp(dim=-1))
        visual = scores[:, :, self.stage.visual_rows]
        self._found.append((visual - lse[..., None]).exp().mean(dim=1) * group)

    def result(self) -> list[Tensor]:
        """Return scores ``[Hkv, visual tokens]`` of every layer."""
        local = torch.stack(self._found).float() if self._found else None
        shape = self.stage.hosts.broadcast_ints(None if local is None else local.shape[:2], 2)
        return list(self.gathered(local, *shape).unbind())


class PassedOn(VisualWatcher):
    """The visual KV pairs that APB-V's prefill passes on, per layer and KV head.

    Of the anchor, which every host has, nothing is passed on.
    """

    wants_passed = True

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        # Every layer's choice of each block; it stays on the device, so that no layer waits for it.
        self._chosen: dict[int, list[Tensor]] = {}

    def on_passed(self, block: int, chosen: Tensor) -> None:
        self._chosen.setdefault(block, []).append(chosen[0])

    def result(self) -> list[Tensor]:
        """Return bool ``[Hkv, visual tokens]`` of every layer; empty if nothing was passed on."""
        stage = self.stage
        blocks = {block: torch.stack(layers).cpu() for block, layers in self._chosen.items()}
        first, *_ = [*blocks.values(), torch.empty(0, 0)]
        shape = stage.hosts.broadcast_ints(first.shape[:2], 2)
        local = None
        if blocks:
            passed = torch.zeros(*shape, stage.num_tokens)
            for block, rows in blocks.items():  # [layers, Hkv, k_v]
                passed.scatter_(2, stage.layout.blocks[block].start + rows, 1.0)
            local = passed[:, :, stage.owned_visual[stage.hosts.rank]]
        return list(self.gathered(local, *shape).bool().unbind())


class SimilarityChange(VisualWatcher):
    """UV-Prune's scores (ParallelVLM, Eq. 3) in the first layers of the target.

    They are how much closer visual tokens come to the text. The sum over layers of differences telescopes:
    ΔS_i = v̂_i^L · Σ_j x̂_j^L − v̂_i^0 · Σ_j x̂_j^0, with unit vectors of visual tokens v and of all others of the
    prompt x. So no layer after L is needed (Section 4.2, Stage I).

    Args:
        last_layer: L; 20 in the paper.
        num_layers: the model's.
    """

    def __init__(self, last_layer: int, num_layers: int):
        self._last, self._num_layers = last_layer, num_layers
        self.hidden_layers = (0, last_layer)
        self._offer: Callable[[Tensor], bool] | None = None
        self._scores: Tensor | None = None
        self._text: dict[int, Tensor] = {}  # the sum of the text's unit vectors
        self._visual: dict[int, Tensor] = {}  # states that wait for that sum, where the query has its own pass
        self._similar: dict[int, Tensor] = {}

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        tokens = stage.owned[stage.hosts.rank]
        text = ~stage.is_visual[tokens] & (tokens < stage.query_start)
        self._before_question = text.nonzero().flatten().to(stage.hosts.device)

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        self._offer, self.hidden_layers = offer, (0, *range(self._last, self._num_layers))

    def on_nothing(self) -> None:
        if self._offer is not None:
            self._offer(self.result())

    def on_hidden(self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None) -> None:
        if layer in (0, self._last):
            if owned is not None:
                text, stage = _sum_of_units(hidden[owned[self._before_question]]), self.stage
                # A prompt that is not split is all on the host that computes it.
                self._text[layer] = stage.hosts.all_gather(text).wait().sum(0) if stage.layout.is_split else text
                self._visual[layer] = hidden[owned[stage.visual_rows]]
            if question is not None:
                text = self._text.pop(layer) + _sum_of_units(hidden[question])
                self._similar[layer] = similarity_to(self._visual.pop(layer), text)
        # Every host completes its scores in the same layer of the same pass, between the same two exchanges of
        # attention, so that they can be gathered here.
        if self._offer is not None and len(self._similar) == 2 and self._offer(self.result()):
            self._offer = None

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]``; the first call is collective."""
        if self._scores is None:
            local = self._similar[self._last] - self._similar[0] if self._similar else None
            self._scores = self.gathered(local)
        return self._scores


def _sum_of_units(states: Tensor) -> Tensor:
    return functional.normalize(states.float(), dim=-1).sum(dim=0)
