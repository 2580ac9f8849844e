"""This module observes the target's prefill, and scores how much visual tokens matter to the question.

Every host scores the tokens that it owns. Only scores are sent.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kernels import similarity_to
from ..layout import ContextLayout
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from ..prefilling.reduction.choosing import gather_scores, lse_over_hosts
from ..prefilling.reduction.kept import Reduction
from ..prefilling.reduction.question_attention import scores_of_keys, visual_relevance


class VisualObserver:
    """A VisualObserver scores the visual tokens of one prompt, of which every host owns some.

    Args:
        parts: the model that prefills.
    """

    hidden_layers: tuple[int, ...] = ()
    wants_passed = False

    def __init__(self, parts: ModelParts):
        self._parts = parts

    def begin(self, inputs: ModelInputs, layout: ContextLayout, hosts: HostGroup) -> None:
        """Find out which visual tokens every host owns."""
        self._layout, self._hosts = layout, hosts
        is_visual = self._parts.is_visual(inputs.input_ids[0])
        # For every host, its visual tokens by their number among all visual tokens, in cache order.
        numbers = is_visual.long().cumsum(0) - 1
        self._owned = []
        for host in range(hosts.size):
            tokens = self._tokens(host)
            self._owned.append(numbers[tokens[is_visual[tokens]]])
        self._visual_rows = is_visual[self._tokens(hosts.rank)].nonzero().flatten()

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        """Ignore attention."""

    def observe_hidden(self, layer: int, query: Tensor | None, owned: Sequence[Tensor] | None) -> None:
        """Ignore hidden states."""

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        """Ignore which KV pairs are passed on."""

    def observe_nothing(self) -> None:
        """Exchange nothing: scores are exchanged after the prefill."""

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        """Ask for the scores as soon as they are known, if that is before the prefill ends; here it is not.

        Called on every host before the prefill, or on none.

        Args:
            offer: takes the scores; returns false to be called again in the next layer.
        """

    def _tokens(self, host: int) -> Tensor:
        """Return the tokens whose KV a host owns, in cache order."""
        spans = [torch.arange(span.start, span.stop) for span in self._layout.cache_spans(host)]
        return torch.cat([*spans, torch.empty(0, dtype=torch.long)])

    def _attention_to_visual(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> Tensor:
        """Return one layer's attention to this host's visual tokens, ``[T]``; collective."""
        visual = torch.cat(list(keys), dim=2)[:, :, self._visual_rows.to(q_query.device)]
        return visual_relevance(q_query, visual, scale, self._over_hosts)

    def _over_hosts(self, lse: Tensor) -> Tensor:
        """Merge a log-sum-exp over each host's keys into that over all of them."""
        return lse_over_hosts(lse, self._layout, self._hosts)


class AttentionScores(VisualObserver):
    """An AttentionScores computes HIPPO's s_attn (Eq. 2), as SpecVLM does.

    It is a softmax over all visual keys, averaged over layers, heads and the question's tokens.
    """

    def __init__(self, parts: ModelParts):
        super().__init__(parts)
        self._total: Tensor | float = 0.0
        self._num_layers = 0

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        self._total = self._total + self._attention_to_visual(q_query, keys, scale)
        self._num_layers += 1

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]`` on every host; collective, after the prefill."""
        local = (self._total / self._num_layers).float() if self._num_layers else None
        return self._hosts.mean_over_members(gather_scores(local, self._owned, self._hosts))


class AttentionChange(VisualObserver):
    """An AttentionChange computes how much more of the question's attention visual tokens get in a later layer.

    It is ParallelVLM's Eq. 3 with attention in place of cosines, one of its ablations (Figures 7, 9): the sum of
    differences telescopes to ΔA_i = A_i^L − A_i^0, where A^l is layer l's part of what :class:`AttentionScores`
    averages. What draws attention by its place alone does so in both layers.

    Args:
        last_layer: L, the decoder layer whose attention counts, from 0; 20 in the paper.
    """

    def __init__(self, parts: ModelParts, last_layer: int):
        super().__init__(parts)
        self._ends, self._layer = (0, last_layer), 0
        self._in_layer: dict[int, Tensor] = {}

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        if self._layer in self._ends:
            self._in_layer[self._layer] = self._attention_to_visual(q_query, keys, scale)
        self._layer += 1

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]`` on every host; collective, after the prefill."""
        local = None
        if self._in_layer:
            first, last = (self._in_layer[layer] for layer in self._ends)
            local = (last - first).float()
        return self._hosts.mean_over_members(gather_scores(local, self._owned, self._hosts))


class HeadAttention(VisualObserver):
    """A HeadAttention computes STD's scores (Section 3.2), one list per layer and KV head.

    They are the question's attention, summed over the KV head's query heads.
    """

    def __init__(self, parts: ModelParts):
        super().__init__(parts)
        self._layers: list[Tensor] = []

    def begin(self, inputs: ModelInputs, layout: ContextLayout, hosts: HostGroup) -> None:
        super().begin(inputs, layout, hosts)
        # [query tokens, this host's tokens]: tokens of the question do not see later ones.
        question = torch.arange(inputs.query_start, inputs.num_tokens)
        self._hidden = self._tokens(hosts.rank) > question[:, None]

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        scores = scores_of_keys(q_query, torch.cat(list(keys), dim=2), scale)
        group = q_query.shape[1] // scores.shape[0]
        hidden = self._hidden.to(scores.device).repeat(group, 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = self._over_hosts(scores.logsumexp(dim=-1))
        visual = scores[:, :, self._visual_rows.to(scores.device)]
        self._layers.append((visual - lse[..., None]).exp().mean(dim=1) * group)

    def result(self) -> list[Tensor]:
        """Return scores ``[Hkv, visual tokens]`` of every layer on every host; collective, after the prefill."""
        local = torch.stack(self._layers).float() if self._layers else None
        shape = self._hosts.broadcast_ints(None if local is None else local.shape[:2], 2)
        return list(gather_scores(local, self._owned, self._hosts, shape).unbind())


class PassedOn(VisualObserver):
    """A PassedOn collects which visual KV pairs APB-V's prefill passes on, per layer and KV head.

    Of the anchor, which every host has, nothing is passed on.
    """

    wants_passed = True

    def __init__(self, parts: ModelParts):
        super().__init__(parts)
        # Every layer's choice of each block; it stays on the device, so that no layer waits for it.
        self._chosen: dict[int, list[Tensor]] = {}

    def begin(self, inputs: ModelInputs, layout: ContextLayout, hosts: HostGroup) -> None:
        super().begin(inputs, layout, hosts)
        self._num_tokens = inputs.num_tokens
        self._visual_tokens = self._tokens(hosts.rank)[self._visual_rows]

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        self._chosen.setdefault(block, []).append(chosen[0])

    def result(self) -> list[Tensor]:
        """Return bool ``[Hkv, visual tokens]`` of every layer on every host; empty if nothing was passed on.

        Collective, after the prefill.
        """
        blocks = {block: torch.stack(layers).cpu() for block, layers in self._chosen.items()}
        first, *_ = [*blocks.values(), torch.empty(0, 0)]
        shape = self._hosts.broadcast_ints(first.shape[:2], 2)
        local = None
        if blocks:
            passed = torch.zeros(*shape, self._num_tokens)
            for block, rows in blocks.items():  # [layers, Hkv, k_v]
                passed.scatter_(2, self._layout.blocks[block].start + rows, 1.0)
            local = passed[:, :, self._visual_tokens]
        return list(gather_scores(local, self._owned, self._hosts, shape).bool().unbind())


class SimilarityChange(VisualObserver):
    """A SimilarityChange computes UV-Prune's scores (ParallelVLM, Eq. 3) in the first layers of the target.

    They are how much closer visual tokens come to the question's tokens. The sum over layers of differences
    telescopes: ΔS_i = v̂_i^L · Σ_j x̂_j^L − v̂_i^0 · Σ_j x̂_j^0, with unit
        vectors
    of visual tokens v and of the question's tokens x.

    So no layer after L is needed (Section 4.2, Stage I). Without a first layer the scores are the similarities in
    layer L themselves, the paper's criterion "similarity" in its Fig. 9.

    Args:
        last_layer: L; 20 in the paper.
        since: the layer since which the change counts; None: the similarities themselves.
    """

    def __init__(self, parts: ModelParts, last_layer: int, since: int | None = 0):
        super().__init__(parts)
        self._ends = self.hidden_layers = (last_layer,) if since is None else (since, last_layer)
        self._offer: Callable[[Tensor], bool] | None = None
        self._scores: Tensor | None = None
        self._text: dict[int, Tensor] = {}  # the sum of the question's unit vectors
        self._visual: dict[
            int, Tensor
        ] = {}  # hidden states that wait for that sum, where the query has its own pass
        self._similar: dict[int, Tensor] = {}

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        """Ask for the scores as soon as they are known, which is before the last layer."""
        *since, last = self._ends
        self._offer, self.hidden_layers = offer, (*since, *range(last, self._parts.num_layers))

    def observe_nothing(self) -> None:
        """Take part in the exchange of the scores, if it happens during the prefill."""
        if self._offer is not None:
            self._offer(self.result())

    def observe_hidden(self, layer: int, query: Tensor | None, owned: Sequence[Tensor] | None) -> None:
        if layer in self._ends:
            self._compare(layer, query, owned)
        # Every host completes its scores in the same layer of the same pass, between the same two exchanges of
        # attention, so that they can be gathered here.
        if (
            self._offer is not None
            and all(end in self._similar for end in self._ends)
            and self._offer(self.result())
        ):
            self._offer = None

    def _compare(self, layer: int, query: Tensor | None, owned: Sequence[Tensor] | None) -> None:
        if query is not None:
            self._text[layer] = functional.normalize(query.float(), dim=-1).sum(dim=0)
        if owned is not None:
            self._visual[layer] = torch.cat(list(owned))[self._visual_rows.to(owned[0].device)]
        if layer in self._text and layer in self._visual:
            self._similar[layer] = similarity_to(self._visual.pop(layer), self._text[layer])

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]`` on every host; the first call is collective."""
        if self._scores is None:
            local = None
            if self._similar:
                *first, last = (self._similar[layer] for layer in self._ends)
                local = last - first[0] if first else last
            self._scores = gather_scores(local, self._owned, self._hosts)
        return self._scores


class _OverWholePrompt:
    """The scores of an observer that saw a prompt without some of its visual tokens, as scores of all of them."""

    def __init__(self, observer: VisualObserver, reduction: Reduction):
        self._observer, self._reduction = observer, reduction

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]`` of the whole prompt on every host; collective."""
        scores = self._observer.result()
        return self._reduction.spread(scores, missing=min(0.0, float(scores.min())))


def over_whole_prompt(observer: PrefillObserver | None, reduction: Reduction | None):
    """Return an observer of the target's prefill whose scores are of the prompt that the draft reads.

    Where the target read fewer visual tokens, none that it has not seen scores higher than one that it has.
    """
    return observer if observer is None or reduction is None else _OverWholePrompt(observer, reduction)
