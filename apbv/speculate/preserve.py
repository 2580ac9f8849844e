"""Which visual tokens a draft sees: scored on the hosts that prefill, from what the prefill holds.

Only scores travel. Kept tokens keep their positions.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kernels import similarity_to, spatial_variety, temporal_change
from ..layout import ContextLayout
from ..model.parts import ModelParts
from .scores import mean_probability, scores_of_keys, standardised


class _VisualObserver:
    """Looks at what visual tokens, of which every host holds some, are to the question.

    Args:
        is_visual: ``[n]``, bool.
        query_start: first token of the question.
    """

    hidden_layers: tuple[int, ...] = ()
    wants_passed = False

    def __init__(self, is_visual: Tensor, query_start: int, layout: ContextLayout, hosts: HostGroup):
        self._layout, self._hosts = layout, hosts
        # For every host, its visual tokens by their number among all visual tokens, in cache order.
        numbers = is_visual.long().cumsum(0) - 1
        self._owned = []
        for host in range(hosts.size):
            tokens = self._tokens(host)
            self._owned.append(numbers[tokens[is_visual[tokens]]])
        self._visual_rows = is_visual[self._tokens(hosts.rank)].nonzero().flatten()

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        """Not interested in attention."""

    def observe_hidden(self, layer: int, query: Tensor | None, kept: Sequence[Tensor] | None) -> None:
        """Not interested in hidden states."""

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        """Not interested in what is passed on."""

    def observe_nothing(self) -> None:
        """Exchanges nothing before the prefill has ended."""

    def tell_early(self, offer: Callable[[Tensor], bool], num_layers: int) -> None:
        """Give the scores away as soon as they are known, where that is before the prefill ends; here it is not.

        Called on every host before the prefill, or on none.

        Args:
            offer: takes the scores; false where it is to be asked again in the next layer.
            num_layers: of the model that prefills.
        """

    def _tokens(self, host: int) -> Tensor:
        spans = [torch.arange(span.start, span.stop) for span in self._layout.cache_spans(host)]
        return torch.cat([*spans, torch.empty(0, dtype=torch.long)])

    def _over_hosts(self, lse: Tensor) -> Tensor:
        """Merge a log-sum-exp over each host's keys into that over all of them."""
        return self._hosts.all_gather(lse).wait().logsumexp(dim=0) if self._layout.is_split else lse


class AttentionScores(_VisualObserver):
    """HIPPO's s_attn (Eq. 2), after SpecVLM: softmax over all visual keys, mean over layers, heads and queries."""

    def __init__(self, *args):
        super().__init__(*args)
        self._total: Tensor | float = 0.0
        self._num_layers = 0

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        visual = torch.cat(list(keys), dim=2)[:, :, self._visual_rows.to(q_query.device)]
        scores = scores_of_keys(q_query, visual, scale)
        self._total = self._total + mean_probability(scores, self._over_hosts(scores.logsumexp(dim=-1)))
        self._num_layers += 1

    def result(self) -> Tensor:
        """``[visual tokens]``, on every host; collective, after the prefill."""
        mine = (self._total / self._num_layers).float() if self._num_layers else None
        return self._hosts.mean_over_members(gather_scores(mine, self._owned, self._hosts))


class HeadAttention(_VisualObserver):
    """STD's scores (Section 3.2): per layer and KV head, the question's attention, summed over its query heads."""

    def __init__(self, is_visual: Tensor, query_start: int, layout: ContextLayout, hosts: HostGroup):
        super().__init__(is_visual, query_start, layout, hosts)
        # [query tokens, this host's]: a question's token sees none that come after it.
        self._hidden = self._tokens(hosts.rank) > torch.arange(query_start, len(is_visual))[:, None]
        self._layers: list[Tensor] = []

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        scores = scores_of_keys(q_query, torch.cat(list(keys), dim=2), scale)
        group = q_query.shape[1] // scores.shape[0]
        hidden = self._hidden.to(scores.device).repeat(group, 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = self._over_hosts(scores.logsumexp(dim=-1))
        visual = scores[:, :, self._visual_rows.to(scores.device)]
        self._layers.append((visual - lse[..., None]).exp().mean(dim=1) * group)

    def result(self) -> list[Tensor]:
        """``[Hkv, visual tokens]`` of every layer, on every host; collective, after the prefill."""
        mine = torch.stack(self._layers).float() if self._layers else None
        shape = self._hosts.broadcast_ints(None if mine is None else mine.shape[:2], 2)
        return list(gather_scores(mine, self._owned, self._hosts, shape).unbind())


class PassedOn(_VisualObserver):
    """What APB-V's prefill chose to pass on anyway, per layer and KV head. Of the anchor it chooses nothing."""

    wants_passed = True

    def __init__(self, is_visual: Tensor, query_start: int, layout: ContextLayout, hosts: HostGroup):
        super().__init__(is_visual, query_start, layout, hosts)
        self._num_tokens = len(is_visual)
        self._mine = self._tokens(hosts.rank)[self._visual_rows]
        # What every layer chose of each block; kept as it is, so that no layer waits for the device.
        self._chosen: dict[int, list[Tensor]] = {}

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        self._chosen.setdefault(block, []).append(chosen[0])

    def result(self) -> list[Tensor]:
        """bool ``[Hkv, visual tokens]`` of every layer, on every host; collective. Empty if nothing was chosen."""
        blocks = {block: torch.stack(layers).cpu() for block, layers in self._chosen.items()}
        first, *_ = [*blocks.values(), torch.empty(0, 0)]
        shape = self._hosts.broadcast_ints(first.shape[:2], 2)
        mine = None
        if blocks:
            passed = torch.zeros(*shape, self._num_tokens)
            for block, rows in blocks.items():  # [layers, Hkv, k_v]
                passed.scatter_(2, self._layout.blocks[block].start + rows, 1.0)
            mine = passed[:, :, self._mine]
        return list(gather_scores(mine, self._owned, self._hosts, shape).bool().unbind())


class SimilarityChange(_VisualObserver):
    """UV-Prune (ParallelVLM, Eq. 3): how much closer visual tokens come to the question's in the first layers.

    The sum over layers of differences telescopes: ΔS_i = v̂_i^L · Σ_j x̂_j^L − v̂_i^0 · Σ_j x̂_j^0, with unit vectors
    of visual tokens v and of the question's tokens x.

    So nothing of the layers behind L is needed (Section 4.2, Stage I).

    Args:
        last_layer: L; 20 in the paper.
    """

    def __init__(self, *args, last_layer: int):
        super().__init__(*args)
        self._ends = self.hidden_layers = (0, last_layer)
        self._offer: Callable[[Tensor], bool] | None = None
        self._scores: Tensor | None = None
        self._text: dict[int, Tensor] = {}  # the sum of the question's unit vectors
        self._visual: dict[int, Tensor] = {}  # rows that wait for it, in a prefill whose query has its own pass
        self._similar: dict[int, Tensor] = {}

    def tell_early(self, offer: Callable[[Tensor], bool], num_layers: int) -> None:
        self._offer, self.hidden_layers = offer, (0, *range(self._ends[1], num_layers))

    def observe_nothing(self) -> None:
        if self._offer is not None:
            self._offer(self.result())

    def observe_hidden(self, layer: int, query: Tensor | None, kept: Sequence[Tensor] | None) -> None:
        if layer in self._ends:
            self._compare(layer, query, kept)
        # Every host comes to know the last of it in the same layer of the same pass, between two exchanges of the
        # attention's own: so the scores can be gathered here.
        if (
            self._offer is not None
            and all(end in self._similar for end in self._ends)
            and self._offer(self.result())
        ):
            self._offer = None

    def _compare(self, layer: int, query: Tensor | None, kept: Sequence[Tensor] | None) -> None:
        if query is not None:
            self._text[layer] = functional.normalize(query.float(), dim=-1).sum(dim=0)
        if kept is not None:
            self._visual[layer] = torch.cat(list(kept))[self._visual_rows.to(kept[0].device)]
        if layer in self._text and layer in self._visual:
            self._similar[layer] = similarity_to(self._visual.pop(layer), self._text[layer])

    def result(self) -> Tensor:
        """``[visual tokens]``, on every host; collective when first asked for."""
        if self._scores is None:
            mine = None
            if self._similar:
                first, last = (self._similar[layer] for layer in self._ends)
                mine = last - first
            self._scores = gather_scores(mine, self._owned, self._hosts)
        return self._scores


def gather_scores(
    mine: Tensor | None, owned: Sequence[Tensor], hosts: HostGroup, lead: Sequence[int] = ()
) -> Tensor:
    """Put together what every host has of lists of scores; collective.

    Args:
        mine: this host's, ``[*lead, T]`` in fp32; None where it has none.
        owned: for every host, which places its scores belong to.
        lead: how many lists there are.

    Returns:
        All of them, ``[*lead, all places]``, on the CPU of every host.
    """
    padded = torch.zeros(*lead, max(map(len, owned)), device=hosts.device)
    if mine is not None:
        padded[..., : mine.shape[-1]] = mine
    gathered = hosts.all_gather(padded).wait().cpu()
    scores = torch.empty(*lead, sum(map(len, owned)))
    for places, values in zip(owned, gathered, strict=True):
        scores[..., places] = values[..., : len(places)]
    return scores


def frame_shape(parts: ModelParts, inputs: ModelInputs) -> tuple[int, int]:
    """(rows, columns) of visual tokens in one frame of the prompt's video."""
    count = inputs.visual.rows_per_unit
    if not parts.uses_mrope:
        side = round(count**0.5)
        return side, count // side
    first = inputs.position_ids[:, 0, parts.is_visual(inputs.input_ids[0])][:, :count]
    height = len(first[1].unique())
    return height, count // height


def kept_by_frame(parts: ModelParts, inputs: ModelInputs, kept: Tensor | None) -> Tensor | None:
    """Kept visual tokens as bool ``[frames, h, w]``; None where they are not known, or not of a video."""
    if kept is None or inputs.visual is None or inputs.visual.kind != "video":
        return None
    height, width = frame_shape(parts, inputs)
    mask = torch.zeros(inputs.num_visual_tokens, dtype=torch.bool)
    mask[kept] = True
    return mask[: len(mask) // (height * width) * height * width].view(-1, height, width)


def local_semantics(
    parts: ModelParts, inputs: ModelInputs, rows: Tensor, hosts: HostGroup, terms: Collection[str]
) -> Tensor:
    """HIPPO's s_temp and s_spa, standardised within each frame and added: ``[visual tokens]`` on every host.

    Every host scores the frames that it encoded; of its neighbours it needs one frame each. Collective.

    Args:
        rows: ``[rows of this host's piece, d]``, what the vision tower made of it.
        terms: ``"time"`` for s_temp, ``"space"`` for s_spa.
    """
    height, width = frame_shape(parts, inputs)
    visual, size = inputs.visual, inputs.visual.rows_per_unit
    hidden = parts.language_model.config.hidden_size
    frames = rows[: len(rows) // size * size, :hidden].reshape(-1, size, hidden)
    ends = frames[[0, -1]] if len(frames) else frames.new_zeros(2, size, hidden)
    everybodys = hosts.all_gather(ends).wait()
    before = after = None
    if not visual.replicated and len(frames):
        with_frames = [host for host in range(hosts.size) if len(visual.pieces[host]) >= size]
        place = with_frames.index(hosts.rank)
        before = everybodys[with_frames[place - 1], 1] if place else None
        after = everybodys[with_frames[place + 1], 0] if place + 1 < len(with_frames) else None
    scores = torch.zeros(frames.shape[:2], device=frames.device)
    if "time" in terms:
        scores = scores + standardised(temporal_change(frames, before, after), unit=1.0)
    if "space" in terms:
        scores = scores + standardised(spatial_variety(frames, height, width), unit=1.0)
    # A row that belongs to no frame (a separator at the video's end) is never pruned.
    scores = torch.cat([scores.flatten(), scores.new_full((len(rows) - scores.numel(),), float("inf"))])
    pieces = [
        piece if host == 0 or not visual.replicated else range(0) for host, piece in enumerate(visual.pieces)
    ]
    owned = [torch.arange(piece.start, piece.stop) for piece in pieces]
    return gather_scores(scores[: len(pieces[hosts.rank])], owned, hosts)


def keep_best(scores: Tensor, count: int) -> Tensor:
    """The places of the highest scores, ascending; of equal ones the earlier."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def keep_best_per_frame(scores: Tensor, per_frame: int, count: int) -> Tensor:
    """Of every frame the places of its highest scores, as many of each frame as of another, give or take one.

    With fewer places than frames some frames, evenly spaced, keep one. Rows behind the last frame are kept first.
    """
    num_frames = len(scores) // per_frame
    in_frames = num_frames * per_frame
    behind = torch.arange(in_frames, len(scores))[:count]
    ends = torch.arange(num_frames + 1) * (count - len(behind)) // num_frames
    order = scores[:in_frames].view(num_frames, per_frame).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(per_frame) < ends.diff()[:, None]
    places = order + torch.arange(num_frames)[:, None] * per_frame
    return torch.cat([places[chosen].sort().values, behind])


def keep_specvlm(attention: Tensor, count: int, share: float = 0.4) -> Tensor:
    """SpecVLM's choice: what holds most of the attention, and of the rest a token every so often.

    Its first stage keeps the fewest tokens that together hold ``share`` of the attention (of these at most
    ``count``, the best), its second fills up to ``count`` with tokens evenly spaced among the others. Attention
    alone gathers in a few frames; the spaced ones let the draft see something of all of them.

    Args:
        attention: ``[visual tokens]``, at least 0.
        share: 0.4 in the authors' code (github.com/zju-jiyicheng/SpecVLM).
    """
    order = attention.argsort(descending=True, stable=True)
    held = attention[order].double().cumsum(dim=0)
    num_attended = min(count, int((held < share * held[-1]).sum()) + 1)
    attended, others = order[:num_attended], order[num_attended:].sort().values
    spaced = others[keep_even(len(others), count - num_attended)]
    return torch.cat([attended, spaced]).sort().values


def keep_even(num_tokens: int, count: int) -> Tensor:
    """Evenly spaced places, the first and the last among them."""
    return torch.arange(count) * (num_tokens - 1) // max(1, count - 1)


def keep_uniform_frames(num_tokens: int, per_frame: int, count: int) -> Tensor:
    """Whole frames, evenly spaced, as many as fit (one at least, in part)."""
    num_frames = -(-num_tokens // per_frame)
    chosen = max(1, count // per_frame)
    frames = torch.linspace(0, num_frames - 1, chosen).round().long()
    places = (frames[:, None] * per_frame + torch.arange(per_frame)).flatten()
    return places[places < num_tokens].unique()[: max(count, 1)]


def keep_random(num_tokens: int, count: int, seed: int) -> Tensor:
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values
