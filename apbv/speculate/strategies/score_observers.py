"""Observers of the target's prefill: scores of visual tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import similarity_to
from ...prefilling.prefill_observer import PrefillObserver, SplitPrompt

# Scores of the question's attention in memory at a time, in fp32.
MOST_SCORES = 2**26


class Relevance(PrefillObserver):
    """HIPPO's s_attn (Eq. 2), and SpecVLM's: the question's attention to visual tokens alone.

    It is a softmax over all visual keys, averaged over layers, heads and the question's tokens.
    """

    wants_attention = True

    def begin(self, prompt: SplitPrompt) -> None:
        super().begin(prompt)
        self._total: Tensor | None = None
        self._num_layers = 0

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        keys = keys[:, :, rows[self.prompt.visual_rows]]
        num_kv_heads, num_keys = keys.shape[1:3]
        queries = q.reshape(num_kv_heads, -1, q.shape[3])  # [Hkv, G * n_q, D]
        queries_per_chunk = max(1, MOST_SCORES // max(1, num_kv_heads * num_keys))
        chunks = queries.split(queries_per_chunk, dim=1)
        # The scores of a chunk are in memory at a time, and computed twice.
        lse_of_chunks = [scores_of_keys(chunk, keys, scale).logsumexp(dim=-1) for chunk in chunks]
        lse = self.over_hosts(torch.cat(lse_of_chunks, dim=1))
        lse_of_chunks = lse.split([chunk.shape[1] for chunk in chunks], dim=1)
        total: Tensor | None = None
        for chunk, chunk_lse in zip(chunks, lse_of_chunks, strict=True):
            attention = (scores_of_keys(chunk, keys, scale) - chunk_lse[..., None]).exp()
            of_chunk = attention.sum(dim=(0, 1))
            total = of_chunk if total is None else total + of_chunk
            del attention  # before the next chunk is computed
        assert total is not None, "there is at least one chunk"
        relevance = total / (num_kv_heads * queries.shape[1])
        self._total = relevance if self._total is None else self._total + relevance
        self._num_layers += 1

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]``."""
        local = None if self._total is None else (self._total / self._num_layers).float()
        return self.prompt.hosts.mean_over_members(self.gathered(local))


class HeadAttention(PrefillObserver):
    """STD's scores (Section 3.2), one list per layer and KV head.

    They are the question's attention, summed over the KV head's query heads.
    """

    wants_attention = True

    def begin(self, prompt: SplitPrompt) -> None:
        super().begin(prompt)
        self._attention: list[Tensor] = []
        # [query tokens, this host's tokens]: tokens of the question do not see later ones.
        self._is_later = prompt.owned[prompt.hosts.rank] > prompt.question[:, None]

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        scores = scores_of_keys(q, keys[:, :, rows], scale)
        group = q.shape[1] // scores.shape[0]
        is_later = self._is_later.to(scores.device).repeat(group, 1)
        scores = scores.masked_fill(is_later, float("-inf"))
        lse = self.over_hosts(scores.logsumexp(dim=-1))
        visual = scores[:, :, self.prompt.visual_rows]
        self._attention.append((visual - lse[..., None]).exp().mean(dim=1) * group)

    def result(self) -> list[Tensor]:
        """Return scores ``[Hkv, visual tokens]`` of every layer."""
        local = torch.stack(self._attention).float() if self._attention else None
        shape = self.prompt.hosts.broadcast_ints(None if local is None else local.shape[:2], 2)
        return list(self.gathered(local, *shape).unbind())


class SimilarityChange(PrefillObserver):
    """UV-Prune's scores (ParallelVLM, Eq. 3) in the first layers of the target.

    They are how much closer visual tokens come to the text. The sum over layers of differences
    telescopes: ΔS_i = v̂_i^L · Σ_j x̂_j^L − v̂_i^0 · Σ_j x̂_j^0, with unit vectors of visual tokens
    v and of all others of the prompt x. So no layer after L is needed (Section 4.2, Stage I).

    Args:
        last_layer: L; 20 in the paper.
        num_layers: the model's.
    """

    def __init__(self, last_layer: int, num_layers: int):
        self._last = last_layer
        self._num_layers = num_layers
        self.hidden_layers = (0, last_layer)
        self._offer: Callable[[Tensor], bool] | None = None
        self._scores: Tensor | None = None
        self._text: dict[int, Tensor] = {}  # the sum of the text's unit vectors
        # States that wait for that sum, where the query has its own pass.
        self._visual: dict[int, Tensor] = {}
        self._similar: dict[int, Tensor] = {}

    def begin(self, prompt: SplitPrompt) -> None:
        super().begin(prompt)
        tokens = prompt.owned[prompt.hosts.rank]
        text = ~prompt.is_visual[tokens] & (tokens < prompt.query_start)
        self._before_question = text.nonzero().flatten().to(prompt.hosts.device)

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        self._offer = offer
        self.hidden_layers = (0, *range(self._last, self._num_layers))

    def on_nothing(self) -> None:
        if self._offer is not None:
            self._offer(self.result())

    def on_hidden(
        self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None
    ) -> None:
        if layer in (0, self._last):
            if owned is not None:
                text = _sum_of_units(hidden[owned[self._before_question]])
                prompt = self.prompt
                if prompt.layout.is_split:  # else it is all on the host that computes it
                    text = prompt.hosts.all_gather(text).wait().sum(0)
                self._text[layer] = text
                self._visual[layer] = hidden[owned[prompt.visual_rows]]
            if question is not None:
                text = self._text.pop(layer) + _sum_of_units(hidden[question])
                self._similar[layer] = similarity_to(self._visual.pop(layer), text)
        # Every host completes its scores in the same layer of the same pass, between the same two
        # exchanges of attention, so that they can be gathered here.
        is_complete = len(self._similar) == 2
        if self._offer is not None and is_complete:
            is_taken = self._offer(self.result())
            if is_taken:
                self._offer = None

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]``; the first call is collective."""
        if self._scores is None:
            local = self._similar[self._last] - self._similar[0] if self._similar else None
            self._scores = self.gathered(local)
        return self._scores


def _sum_of_units(states: Tensor) -> Tensor:
    return functional.normalize(states.float(), dim=-1).sum(dim=0)


def scores_of_keys(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled q·k ``[Hkv, R, T]``, in fp32 or wider.

    Args:
        q: ``[Hkv, R, D]``, the R query rows of each KV head; or ``[1, Hq, n_q, D]``, whose R = G *
            n_q.
        k: ``[1, Hkv, T, D]``.
    """
    scores = (q.reshape(k.shape[1], -1, q.shape[-1]) @ k[0].transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()
