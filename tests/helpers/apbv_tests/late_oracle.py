"""Dropping visual tokens between a model's layers by its definition, in plain loops.

The layers are transformers' own, with a dense attention in fp64; which tokens are dropped is worked
out from the papers' formulas. Nothing here is shared with the implementation.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from apbv_tests.oracle import as_double, decoder_inputs
from apbv_tests.prompts import build, reset_rope


@dataclass
class Layers:
    """What the layers up to a drop have made.

    Attributes:
        embeds, hidden: the input of the first layer, and the output of the last one, ``[n, d]``.
        q, k: of the last layer, ``[H, n, D]`` and ``[Hkv, n, D]``.
        next_q, next_k: of the layer behind, if no token were dropped.
        scale: of their products.
        visual, question: which of the n tokens are visual, and which belong to the question.
        num_before: the visual tokens of the prompt.
    """

    embeds: Tensor
    hidden: Tensor
    q: Tensor
    k: Tensor
    next_q: Tensor
    next_k: Tensor
    scale: float
    visual: list[int]
    question: list[int]
    num_before: int

    def top(self, scores: list[float], count: int) -> list[int]:
        """The visual tokens with the highest scores, ascending; of equal ones the earlier."""
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        return sorted(self.visual[place] for place in order[:count])


def mean_attention(layers: Layers, q: Tensor, k: Tensor, row: int) -> list[float]:
    """One token's attention to every visual token, mean over heads."""
    group = len(q) // len(k)
    sums = [0.0] * len(layers.visual)
    for head in range(len(q)):
        products = []
        for token in range(row + 1):
            products.append(k[head // group, token] @ q[head, row])
        attention = (torch.stack(products) * layers.scale).softmax(dim=0)
        for place, token in enumerate(layers.visual):
            sums[place] += float(attention[token])
    return [total / len(q) for total in sums]


def mean_of_rows(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


class FastVRule:
    """Those stay that got most attention in the layer before."""

    def __init__(self, ratio: float, num_steps: int, asked_by: str | None):
        self.ratio = ratio
        self.num_steps = num_steps
        self.asked_by = asked_by

    def asking(self, layers: Layers) -> list[int]:
        return layers.question if self.asked_by == "question" else layers.question[-1:]

    def __call__(self, layers: Layers, step: int) -> tuple[list[int], dict[int, Tensor]]:
        """Return the visual tokens that stay, ascending, and new hidden states of some of them."""
        rows = [mean_attention(layers, layers.q, layers.k, row) for row in self.asking(layers)]
        count = max(1, round(self.ratio * layers.num_before))
        return layers.top(mean_of_rows(rows), count), {}


class PyramidDropRule(FastVRule):
    """Those stay that get most attention in the layer behind."""

    def __call__(self, layers: Layers, step: int):
        rows = []
        for row in self.asking(layers):
            rows.append(mean_attention(layers, layers.next_q, layers.next_k, row))
        share = self.ratio ** ((step + 1) / self.num_steps)
        return layers.top(mean_of_rows(rows), max(1, round(share * layers.num_before))), {}


class SparseVLMRule(FastVRule):
    """Raters rank; some of the dropped tokens are merged."""

    raters: list[int] | None = None  # places in the question

    def __call__(self, layers: Layers, step: int):
        if self.raters is None:
            self.raters = self._find_raters(layers)
        rows = []
        for place in self.raters:
            rows.append(mean_attention(layers, layers.q, layers.k, layers.question[place]))
        num_visual = len(layers.visual)
        rank = int(torch.linalg.matrix_rank(torch.tensor(rows, dtype=torch.float32)))
        num_dropped = round((1 - self.ratio ** (1 / self.num_steps)) * (num_visual - rank))
        scores = mean_of_rows(rows)
        stay = layers.top(scores, num_visual - num_dropped)
        if num_dropped == 0:
            return stay, {}
        score_of = dict(zip(layers.visual, scores, strict=True))
        dropped = [token for token in layers.visual if token not in stay]
        dropped.sort(key=lambda token: (-score_of[token], token))
        recycled = sorted(dropped[: int(0.3 * len(dropped)) + 1])
        merged = {}
        for centre, mean in clusters(layers.hidden[recycled]).items():
            merged[recycled[centre]] = mean
        return sorted([*stay, *merged]), merged

    def _find_raters(self, layers: Layers) -> list[int]:
        fits = [0.0] * len(layers.question)
        for token in layers.visual:
            products = [layers.embeds[token] @ layers.embeds[word] for word in layers.question]
            for place, share in enumerate(torch.stack(products).softmax(dim=0).tolist()):
                fits[place] += share / len(layers.visual)
        mean = sum(fits) / len(fits)
        return [place for place, fit in enumerate(fits) if fit >= mean]


def clusters(points: Tensor) -> dict[int, Tensor]:
    """The centres of clusters by density peaks, one for ten points and one more, and their members'
    means."""
    count = len(points) // 10 + 1
    away = []
    for a in points:
        away.append([float((a - b).norm()) / math.sqrt(points.shape[1]) for b in points])
    density = []
    for row in away:
        nearest = sorted(row)[:count]
        density.append(math.exp(-sum(distance**2 for distance in nearest) / len(nearest)))
    farthest = max(max(row) for row in away)
    peaks = []
    for i in range(len(points)):
        to_denser = farthest
        for j in range(len(points)):
            if (-density[j], j) < (-density[i], i):
                to_denser = min(to_denser, away[i][j])
        peaks.append(density[i] * to_denser)
    centres = sorted(sorted(range(len(points)), key=lambda i: (-peaks[i], i))[:count])
    members: dict[int, list[int]] = {centre: [] for centre in centres}
    for i in range(len(points)):
        own = i if i in centres else min(centres, key=lambda c: (away[i][c], c))
        members[own].append(i)
    return {centre: points[places].mean(dim=0) for centre, places in members.items()}


RULES = {"fastv": FastVRule, "pdrop": PyramidDropRule, "sparsevlm": SparseVLMRule}


@dataclass
class ReducedModel:
    """A model whose layers were run over different tokens.

    Attributes:
        logits: ``[1, V]`` behind the prompt.
        cache: the keys and values of every layer, ``[1, Hkv, n_l, D]``.
        kept: which visual tokens, by number, the last layers have.
        left_out: rows that no query sees.
    """

    model: object
    next_position: int
    logits: Tensor = field(init=False)
    cache: DynamicCache = field(default_factory=DynamicCache)
    kept: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    states: tuple = ()  # of the latest layer: queries, keys and scale

    @contextmanager
    def _attention(self):
        """Causal attention in which the last query sees the last key; it leaves its states."""

        def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
            self.states = (query[0], key[0], scaling)
            group = query.shape[1] // key.shape[1]
            keys = key.repeat_interleave(group, dim=1)
            values = value.repeat_interleave(group, dim=1)
            num_before = key.shape[2] - query.shape[2]
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(num_before)
            visible[:, self.left_out] = False
            scores = query @ keys.transpose(-1, -2) * scaling
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            return (weights @ values).transpose(1, 2).contiguous(), None

        AttentionInterface.register("late_oracle", attend)
        config = self.model.get_decoder().config
        before = config._attn_implementation
        config._attn_implementation = "late_oracle"
        try:
            yield
        finally:
            config._attn_implementation = before

    def run_layer(self, layer, hidden: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """What a layer makes of ``[1, S, d]``; it appends keys and values to the cache."""
        decoder = self.model.get_decoder()
        if "mrope_section" in (decoder.config.rope_parameters or {}) and positions.dim() == 2:
            positions = positions[None].expand(3, -1, -1)
        rotary = decoder.rotary_emb(hidden, positions)
        with self._attention():
            return layer(
                hidden, attention_mask=None, position_embeddings=rotary, past_key_values=cache
            )

    @torch.no_grad()
    def continuation(self, count: int) -> list[int]:
        """The greedy answer's tokens."""
        decoder = self.model.get_decoder()
        logits = self.logits
        tokens = []
        for index in range(count):
            tokens.append(int(logits.argmax()))
            hidden = decoder.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
            position = torch.tensor([[self.next_position + index]])
            for layer in decoder.layers:
                hidden = self.run_layer(layer, hidden, position, self.cache)
            logits = self.model.get_output_embeddings()(decoder.norm(hidden))[:, 0]
        return tokens


@torch.no_grad()
def run_reduced(
    family: str,
    batch: dict,
    name: str,
    ratio: float,
    drops: list[int],
    asked_by: str | None = None,
) -> ReducedModel:
    """Run a family's model in fp64 over a prompt, and drop tokens behind some layers."""
    model = build(family, torch.float64)
    reset_rope(model)
    decoder = model.get_decoder()
    given = decoder_inputs(model, as_double(batch))
    hidden = given["inputs_embeds"]
    ids = batch["input_ids"][0].tolist()
    placeholders = {model.config.image_token_id, getattr(model.config, "video_token_id", None)}
    visual = [token for token, token_id in enumerate(ids) if token_id in placeholders]
    question = list(range(visual[-1] + 1, len(ids)))
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(len(ids))[None]
    if positions.dim() == 3 and len(positions) == 4:
        positions = positions[1:]
    reduced = ReducedModel(model, int(positions[..., -1].max()) + 1)
    reduced.kept = list(range(len(visual)))
    embeds = hidden[0]
    num_before = len(visual)
    features = given.get("deepstack_visual_embeds") or []
    rule = RULES[name](ratio, len(drops), asked_by)
    step = 0
    for number, layer in enumerate(decoder.layers):
        hidden = reduced.run_layer(layer, hidden, positions, reduced.cache)
        q, k, scale = reduced.states
        if number < len(features):
            hidden = hidden.clone()
            hidden[0, visual] += features[number][reduced.kept]
        if number + 1 not in drops:
            continue
        reduced.run_layer(decoder.layers[number + 1], hidden, positions, DynamicCache())
        next_q, next_k, _ = reduced.states
        layers = Layers(
            embeds=embeds,
            hidden=hidden[0],
            q=q,
            k=k,
            next_q=next_q,
            next_k=next_k,
            scale=scale,
            visual=visual,
            question=question,
            num_before=num_before,
        )
        stay, changed = rule(layers, step)
        for token, state in changed.items():
            hidden[0, token] = state
        left = [t for t in range(hidden.shape[1]) if t not in visual or t in stay]
        reduced.kept = [reduced.kept[visual.index(token)] for token in stay]
        hidden = hidden[:, left]
        embeds = embeds[left]
        positions = positions[..., left]
        visual = [left.index(token) for token in stay]
        question = [left.index(token) for token in question]
        step += 1
    reduced.logits = model.get_output_embeddings()(decoder.norm(hidden[:, -1:]))[:, 0]
    return reduced
