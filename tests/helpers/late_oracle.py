"""Dropping visual tokens inside a model by its definition, in one process: layer by layer, over dense attention.

The layers are transformers' own; which tokens are dropped is worked out in plain loops, from the papers' formulas.
Nothing here is shared with the implementation.
"""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from early_oracle import best, hippo_scores, video_tokens, whole_videos, z_scores
from torch import Tensor
from transformers import DynamicCache

from oracle import as_double, decoder_inputs, with_attention
from prompts import build, reset_rope

# Makes [1, S, H, D] of the last S tokens' queries [1, H, S, D], keys and values [1, Hkv, n, D], and the scale.
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class Layers(SimpleNamespace):
    """What the layers up to a drop have made, for a rule that chooses what stays.

    Attributes:
        embeds, hidden: what went into the first layer of all, and what came out of the last one, ``[n, d]`` each.
        q, k: of the last layer, ``[H, n, D]`` and ``[Hkv, n, D]``.
        scale: of their products.
        ahead: q and k of the layer behind, if no token were dropped.
        before: q and k of the layers since the last drop, this one included.
        visual, question: which of the n tokens are visual, and which belong to the question.
        num_before: the visual tokens of the prompt.
        videos: the tokens of every video's frames, in the whole prompt, and their height and width.
    """

    def attention(self, row: int, head: int) -> Tensor:
        """One token's attention to all tokens up to itself, ``[row + 1]``, in one head."""
        group = len(self.q) // len(self.k)
        products = torch.stack([self.k[head // group, t] @ self.q[head, row] for t in range(row + 1)])
        return (products * self.scale).softmax(dim=0)

    def mean_attention(self, row: int) -> list[float]:
        """One token's attention to every visual token, mean over heads."""
        each = [self.attention(row, head) for head in range(len(self.q))]
        return [float(sum(probabilities[t] for probabilities in each)) / len(each) for t in self.visual]

    def top(self, scores: list[float], count: int) -> list[int]:
        """The visual tokens with the highest scores, ascending."""
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        return sorted(self.visual[place] for place in order[:count])


# Rules return the visual tokens that stay, ascending, and new hidden states of some of them.


def fastv(layers: Layers, ratio: float, step: int, num_steps: int, asking=slice(-1, None)):
    """By default only the question's last token is asked."""
    rows = [layers.mean_attention(row) for row in layers.question[asking]]
    scores = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return layers.top(scores, max(1, round(ratio * layers.num_before))), {}


def pdrop(layers: Layers, ratio: float, step: int, num_steps: int, asking=slice(-1, None)):
    share = ratio ** ((step + 1) / num_steps)
    return fastv(Layers(**vars(layers) | layers.ahead), share, step, num_steps, asking)


def hippo_attention(layers: Layers, ratio: float, step: int, num_steps: int):
    """Its one drop comes first, while all tokens of the prompt are there."""
    relevance = dict.fromkeys(layers.visual, 0.0)
    for q, k in layers.before:
        group, weight = len(q) // len(k), len(layers.before) * len(q) * len(layers.question)
        for head in range(len(q)):
            for row in layers.question:
                products = torch.stack([k[head // group, t] @ q[head, row] for t in layers.visual])
                shares = (products * layers.scale).softmax(dim=0)
                for token, share in zip(layers.visual, shares.tolist(), strict=True):
                    relevance[token] += share / weight
    scores = {}
    for tokens, height, width in layers.videos:
        size = height * width
        semantics = hippo_scores(layers.embeds[tokens].view(-1, size, layers.embeds.shape[1]), height, width)
        for frame in range(len(tokens) // size):
            of_frame = tokens[frame * size : (frame + 1) * size]
            attended = [relevance[token] for token in of_frame]
            attended = z_scores(attended, 1e-6 * sum(attended) / size)
            for place, token in enumerate(of_frame):
                scores[token] = attended[place] + semantics[frame, place]
    kept = best(scores, max(1, round(ratio * len(scores))))
    return [token for token in layers.visual if token in kept or token not in scores], {}


class SparseVlm:
    """The rule of SparseVLM, which finds its raters before the first layer, in the whole prompt's embeddings."""

    raters = None  # places in the question

    def __call__(self, layers: Layers, ratio: float, step: int, num_steps: int):
        if self.raters is None:
            fits = [0.0] * len(layers.question)
            for token in layers.visual:
                products = [layers.embeds[token] @ layers.embeds[word] for word in layers.question]
                for place, share in enumerate(torch.stack(products).softmax(dim=0).tolist()):
                    fits[place] += share / len(layers.visual)
            self.raters = [place for place, fit in enumerate(fits) if fit >= sum(fits) / len(fits)]
        matrix = [layers.mean_attention(layers.question[place]) for place in self.raters]
        num_visual = len(layers.visual)
        rank = int(torch.linalg.matrix_rank(torch.tensor(matrix, dtype=torch.float32)))
        num_dropped = round((1 - ratio ** (1 / num_steps)) * (num_visual - rank))
        scores = [sum(column) / len(matrix) for column in zip(*matrix, strict=True)]
        stay = layers.top(scores, num_visual - num_dropped)
        if num_dropped == 0:
            return stay, {}
        score_of = dict(zip(layers.visual, scores, strict=True))
        dropped = sorted((t for t in layers.visual if t not in stay), key=lambda t: (-score_of[t], t))
        recycled = sorted(dropped[: int(0.3 * len(dropped)) + 1])
        merged = {recycled[centre]: mean for centre, mean in clusters(layers.hidden[recycled]).items()}
        return sorted([*stay, *merged]), merged


def clusters(points: Tensor) -> dict[int, Tensor]:
    """The centres of clusters, one for ten points and one more, by density peaks, and their members' means."""
    count, m = len(points) // 10 + 1, len(points)
    away = [[float((a - b).norm()) / math.sqrt(points.shape[1]) for b in points] for a in points]
    density = [math.exp(-sum(d * d for d in sorted(row)[:count]) / count) for row in away]
    peak = []
    for i in range(m):
        denser = [j for j in range(m) if (-density[j], j) < (-density[i], i)]
        farthest = max(max(row) for row in away)
        peak.append(density[i] * min((away[i][j] for j in denser), default=farthest))
    centres = sorted(sorted(range(m), key=lambda i: (-peak[i], i))[:count])
    members: dict[int, list[int]] = {centre: [] for centre in centres}
    for i in range(m):
        members[i if i in centres else min(centres, key=lambda c: (away[i][c], c))].append(i)
    return {centre: points[places].mean(dim=0) for centre, places in members.items()}


RULES = {rule.__name__: rule for rule in (fastv, pdrop, hippo_attention)}
RULES |= {f"{rule.__name__}, question": partial(rule, asking=slice(None)) for rule in (fastv, pdrop)}


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention; the last query sees the last key."""
    group, ahead = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = (states.repeat_interleave(group, dim=1) for states in (k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(ahead)
    weights = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(1, 2)


class ReducedModel(SimpleNamespace):
    """A model some of whose layers are run over fewer tokens.

    Attributes:
        logits: ``[1, V]`` behind the prompt.
        cache: the keys and values of every layer, ``[1, Hkv, n_l, D]``.
        seen: queries, keys, values and scale of the latest layer.
    """

    @torch.no_grad()
    def continuation(self, count: int) -> list[int]:
        """The greedy answer's tokens."""
        decoder, tokens = self.model.get_decoder(), []
        logits = self.logits
        with _attention(self.model, self.seen, full_attention):
            for index in range(count):
                tokens.append(int(logits.argmax()))
                hidden = decoder.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
                position = torch.tensor([[self.next_position + index]])
                for layer in decoder.layers:
                    hidden = _layer(decoder, layer, hidden, position, self.cache)
                logits = self.model.get_output_embeddings()(decoder.norm(hidden))[:, 0]
        return tokens


@torch.no_grad()
def run_reduced(
    family, batch: dict, name, ratio, drops, attend_before=lambda start: full_attention, separate_query=False
) -> ReducedModel:
    """Run a family's model in fp64 over a prompt, and drop tokens behind these numbers of layers.

    Args:
        attend_before: the attention of layers in which the question begins at this token.
        separate_query: in every layer the question is run once more, behind the keys and values of the context.
    """
    model = build(family, torch.float64)
    reset_rope(model)
    decoder = model.get_decoder()
    given = decoder_inputs(model, as_double(batch))
    hidden, ids = given["inputs_embeds"], batch["input_ids"][0].tolist()
    places = {model.config.image_token_id, getattr(model.config, "video_token_id", None)}
    visual = [t for t, token in enumerate(ids) if token in places]
    question = list(range(visual[-1] + 1, len(ids)))
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(len(ids))[None]
    if positions.dim() == 3 and len(positions) == 4:
        positions = positions[1:]
    next_position = int(positions[..., -1].max()) + 1
    reduced = ReducedModel(model=model, cache=DynamicCache(), next_position=next_position, seen={})
    embeds, num_visual, step, rule = hidden[0], len(visual), 0, RULES.get(name) or SparseVlm()
    features = given.get("deepstack_visual_embeds") or []
    shown = list(range(len(visual)))  # the visual features that are left, where some are added behind layers
    asking = hidden[:, question[0] :] if separate_query else None
    shapes, before = whole_videos(family, batch), []
    of_videos = video_tokens(model.config, batch["input_ids"][0], shapes)
    videos = [(tokens.tolist(), h, w) for tokens, (_, h, w) in zip(of_videos, shapes, strict=True)]
    for number, layer in enumerate(decoder.layers):
        start, scratch = question[0], DynamicCache()
        with _attention(model, reduced.seen, attend_before(start)):
            hidden = _layer(decoder, layer, hidden, positions, scratch if separate_query else reduced.cache)
        q, k, v, scale = reduced.seen["states"]
        if separate_query:
            reduced.cache.update(k[:, :, :start], v[:, :, :start], number)
            with _attention(model, reduced.seen, full_attention):
                asking = _layer(decoder, layer, asking, positions[..., start:], reduced.cache)
            mine, k, v, scale = reduced.seen["states"]
            q = torch.cat([q[:, :, :start], mine], dim=2)
        before.append((q[0], k[0]))
        if number < len(features):
            hidden = hidden.clone()
            hidden[0, visual] += features[number][shown]
        if number + 1 not in drops:
            continue
        states = hidden if asking is None else torch.cat([hidden[:, :start], asking], dim=1)
        made = Layers(embeds=embeds, hidden=states[0], q=q[0], k=k[0], scale=scale, before=before, visual=visual)
        with _attention(model, reduced.seen, full_attention):
            _layer(decoder, decoder.layers[number + 1], states, positions, DynamicCache())
        ahead = dict(zip("qk", (each[0] for each in reduced.seen["states"][:2]), strict=True))
        vars(made).update(question=question, num_before=num_visual, videos=videos, ahead=ahead)
        stay, changed = rule(made, ratio, step, len(drops))
        before = []
        for token, state in changed.items():
            hidden[0, token] = state
        left = [t for t in range(hidden.shape[1]) if t not in visual or t in stay]
        shown = [shown[visual.index(t)] for t in stay]
        hidden, positions, embeds = hidden[:, left], positions[..., left], embeds[left]
        visual, question = [left.index(t) for t in stay], [left.index(t) for t in question]
        step += 1
    hidden = hidden if asking is None else asking
    reduced.logits = model.get_output_embeddings()(decoder.norm(hidden[:, -1:]))[:, 0]
    return reduced


def _layer(decoder, layer, hidden: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """What a layer makes of ``[1, S, d]``; it appends keys and values to the cache."""
    if "mrope_section" in (decoder.config.rope_parameters or {}) and positions.dim() == 2:
        positions = positions[None].expand(3, -1, -1)
    rotary = decoder.rotary_emb(hidden, positions)
    return layer(hidden, attention_mask=None, position_embeddings=rotary, past_key_values=cache)


def _attention(model, seen: dict, attend: Attend):
    """Let a model's language model use a dense attention, which leaves its queries and keys in ``seen``."""

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen["states"] = query, key, value, scaling
        return attend(query, key, value, scaling).contiguous(), None

    return with_attention(model, SimpleNamespace(attend=attention))
