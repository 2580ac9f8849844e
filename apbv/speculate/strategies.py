"""The ways to draft, by name: what each of them makes of a prefilled prompt."""

import copy
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..config import SpeculativeConfig
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kernels.backends import choose
from ..layout import ContextLayout
from ..model.attention import KeptAttention, PrefillObserver
from ..model.parts import ModelParts
from ..prefilling.encode import encode_visual
from . import preserve
from .draft import Draft, Prompt, Successor
from .draft_kv import collect_kv, prefill_draft, run_prompt, select_kv
from .drafters import Drafter, NgramDrafter
from .ensemble import EnsembleDrafter, make_weights, read_contexts
from .scores import standardised
from .tree import Tree


@dataclass(frozen=True)
class Strategy:
    """One way to draft.

    Attributes:
        build: collective.
        observer: makes what has to watch the target's prefill; None if nothing has to.
        needs_draft_model: a second model drafts.
        runs_target: the target drafts itself, which only whole hosts can do: member by member nobody would see to
            it that all members draft the same tokens.
        needs_passing: the prefill has to pass blocks on between hosts.
        needs_verdicts: the draft learns from every verification before it goes on: it takes turns with the target.
        keep: which visual tokens the draft sees unless the configuration says otherwise; None where it has no say.
        prunes_kv: the target drafts on a share of its visual KV.
        drafts_trees: its drafter is :meth:`Prompt.drafter`'s, which can fill a tree, too.
        num_tree_nodes: of the tree that is drafted where the config does not say; None: a chain.
        reads_text_only: its draft model sees the prompt's text and no more: any with the target's tokens will do.
    """

    build: Callable[[Prompt], Draft]
    observer: Callable[[SpeculativeConfig, ModelParts], Callable | None] = lambda config, parts: None
    needs_draft_model: bool = False
    runs_target: bool = False
    needs_passing: bool = False
    needs_verdicts: bool = False
    keep: str | None = None
    prunes_kv: bool = False
    drafts_trees: bool = True
    num_tree_nodes: int | None = None
    reads_text_only: bool = False

    @property
    def shows_kept(self) -> bool:
        """Whether the draft sees the same visual tokens in all layers and heads, which can be shown."""
        return self.needs_draft_model or self.build is _streaming


def keep_policy(config: SpeculativeConfig) -> str | None:
    """How the visual tokens that the draft sees are chosen."""
    return config.keep or STRATEGIES[config.strategy].keep


def prunes(config: SpeculativeConfig) -> bool:
    """Whether the draft sees only as much of what is visual as ``keep_ratio`` or ``keep_tokens`` says."""
    return STRATEGIES[config.strategy].prunes_kv or keep_policy(config) not in (None, "full")


def kept_visual_tokens(prompt: Prompt, rows: Tensor | None) -> Tensor:
    """The visual tokens that the policy preserves, ascending; the same on every host. Collective.

    Args:
        rows: the draft's embeddings of the frames that this host encoded.
    """
    keep, count, total = keep_policy(prompt.config), prompt.num_kept, prompt.num_visual
    if not total or keep == "full":
        return torch.arange(total)
    if keep in ("attention", "uv_prune"):
        return preserve.keep_best(prompt.observer.result(), count)
    if keep == "specvlm":
        return preserve.keep_specvlm(prompt.observer.result(), count)
    if keep == "attention_per_frame":
        return preserve.keep_best_per_frame(prompt.observer.result(), prompt.inputs.visual.rows_per_unit, count)
    if keep == "even":
        return preserve.keep_even(total, count)
    if keep == "random":
        return preserve.keep_random(total, count, prompt.sampling.seed)
    if keep == "uniform_frames":
        return preserve.keep_uniform_frames(total, prompt.inputs.visual.rows_per_unit, count)
    return preserve.keep_best(_hippo_scores(prompt, rows, prompt.config.hippo_terms), count)


def _hippo_scores(prompt: Prompt, rows: Tensor, terms: Collection[str]) -> Tensor:
    """HIPPO's Eq. 7: attention, change over time and variety in space, each standardised within its frame."""
    scores = preserve.local_semantics(prompt.draft, prompt.inputs, rows, prompt.hosts, terms)
    if "attention" not in terms:
        return scores
    per_frame = prompt.inputs.visual.rows_per_unit
    attention = prompt.observer.result()
    in_frames = len(attention) // per_frame * per_frame
    relevance = standardised(attention[:in_frames].view(-1, per_frame)).flatten()
    # Rows behind the last frame have no neighbours in time or space.
    return torch.cat([relevance, attention.new_zeros(len(attention) - in_frames)]) + scores


def _by_model(prompt: Prompt) -> Draft:
    rows = encode_visual(prompt.draft, prompt.inputs.visual)
    if not prompt.num_visual or keep_policy(prompt.config) == "full":
        return _on_tokens(prompt, rows, torch.arange(prompt.num_visual))
    # On a draft host, what the target's prefill says comes late.
    scores_are_due = prompt.leave_last and prompt.observer is not None
    if prompt.config.prune == "kv":
        first = _on_tokens(prompt, rows, torch.arange(prompt.num_visual))
        rest = partial(_pruned, prompt, rows, first)
    elif scores_are_due and prompt.config.vision_first:
        terms = set(prompt.config.hippo_terms) - {"attention"}
        first = _on_tokens(prompt, rows, preserve.keep_best(_hippo_scores(prompt, rows, terms), prompt.num_kept))
        rest = partial(_on_kept_tokens, prompt, rows)
    else:
        return _on_kept_tokens(prompt, rows)
    if not scores_are_due:
        return rest()
    return replace(first, successor=Successor(prompt.observer.have_come, prompt.observer.wait, rest))


def _on_kept_tokens(prompt: Prompt, rows: Tensor) -> Draft:
    return _on_tokens(prompt, rows, kept_visual_tokens(prompt, rows))


def _on_tokens(prompt: Prompt, rows: Tensor, kept: Tensor) -> Draft:
    """The draft model on all text and these visual tokens."""
    cache = prefill_draft(prompt.draft, prompt.inputs, kept, prompt.hosts, rows)
    return Draft(prompt.drafter(prompt.draft, cache), len(kept), kept)


def _pruned(prompt: Prompt, rows: Tensor, draft: Draft) -> Draft:
    """A draft that has read everything, without the KV of what is not kept."""
    kept = kept_visual_tokens(prompt, rows)
    if draft.drafter is not None:
        visual, text = prompt.is_visual.nonzero().flatten()[kept], (~prompt.is_visual).nonzero().flatten()
        text = text[: len(text) - prompt.leave_last]
        draft.drafter.forget_prompt(torch.cat([text, visual]).sort().values)
    return Draft(draft.drafter, len(kept), kept)


def _text_only(prompt: Prompt) -> Draft:
    nothing = torch.empty(0, dtype=torch.long)
    if prompt.draft.is_video_model or not prompt.target.is_video_model:
        cache = prefill_draft(prompt.draft, prompt.inputs, nothing, prompt.hosts, None)
        return Draft(prompt.drafter(prompt.draft, cache), 0, nothing)
    # A text-only model knows neither placeholders nor the target's positions: to it the text is all there is.
    text = prompt.inputs.input_ids[:, ~prompt.is_visual]
    text = text.where(text < prompt.draft.vocab_size, 0)  # as ModelDrafter reads what it has no token for
    count, cache = text.shape[1], None
    if prompt.hosts.is_leader:
        cache = run_prompt(prompt.draft, text, torch.arange(count)[None], None)
    return Draft(prompt.drafter(prompt.draft, cache, next_position=count), 0, nothing)


def _tabed(prompt: Prompt) -> Draft:
    """One draft on several views of the prompt; on a text prompt, of which there is only one, as ``vanilla``."""
    if not prompt.num_visual:
        return _by_model(prompt)
    ensemble = prompt.config.ensemble
    rows, kept = None, torch.empty(0, dtype=torch.long)
    if set(ensemble) & set("MP"):  # the others are text
        rows = encode_visual(prompt.draft, prompt.inputs.visual)
        kept = kept_visual_tokens(prompt, rows)
    contexts = read_contexts(
        ensemble.rstrip("*"),
        prompt.draft,
        prompt.inputs,
        kept,
        rows,
        prompt.hosts,
        prompt.tokenize,
        prompt.caption,
    )
    drafter = contexts and EnsembleDrafter(
        prompt.draft,
        contexts,
        make_weights(ensemble),
        prompt.inputs.num_tokens,
        prompt.sampling,
        prompt.vocab_size,
    )
    return Draft(drafter, len(kept), kept)


def _std(prompt: Prompt) -> Draft:
    """The target on its own KV: of each layer and head, all text and the most attended visual tokens."""
    scores = prompt.observer.result() if prompt.num_visual else []
    return _on_best_kv(prompt, scores, prompt.num_kept)


def _std_apbv(prompt: Prompt) -> Draft:
    """The same with what the prefill chose to pass on between hosts anyway.

    Where a head chose fewer visual tokens than another (text can be chosen, too), it sees the latest besides.
    """
    passed = prompt.observer.result() if prompt.num_visual else []
    count = max((int(layer.sum(dim=1).max()) for layer in passed), default=0)
    recency = torch.linspace(0, 0.5, prompt.num_visual)
    return _on_best_kv(prompt, [layer + recency for layer in passed], count)


def _on_best_kv(prompt: Prompt, scores: list[Tensor], count: int) -> Draft:
    """The target on all text and the visual tokens of the highest scores, ``[Hkv, visual tokens]`` per layer."""
    nothing = torch.empty(prompt.target.num_kv_heads, 0, dtype=torch.long)
    best = [layer.topk(count, dim=1).indices for layer in scores] or [nothing] * prompt.target.num_layers
    return Draft(_on_own_kv(prompt, best), count, follows_target=True)


def _streaming(prompt: Prompt) -> Draft:
    """The target on its own KV of all text and the latest visual tokens."""
    count = prompt.num_kept
    latest = torch.arange(prompt.num_visual - count, prompt.num_visual)
    heads = prompt.target.num_kv_heads
    drafter = _on_own_kv(prompt, [latest.expand(heads, -1)] * prompt.target.num_layers)
    return Draft(drafter, count, latest, follows_target=True)


def _on_own_kv(prompt: Prompt, visual: list[Tensor]) -> Drafter | None:
    """The target on all text and, per layer and head, some visual tokens."""
    visual_tokens, text = prompt.is_visual.nonzero().flatten(), (~prompt.is_visual).nonzero().flatten()
    text = text.expand(prompt.target.num_kv_heads, -1)
    kept = [torch.cat([text, visual_tokens[chosen]], dim=1).sort(dim=1).values for chosen in visual]
    attention = _in_place(prompt, kept)
    if attention is None:
        return prompt.drafter(prompt.target, _own_kv(prompt, kept))
    return prompt.drafter(prompt.target, DynamicCache(), attention)


def _in_place(prompt: Prompt, kept: list[Tensor]) -> KeptAttention | None:
    """Attention to these tokens' KV where it lies, on host 0; None where a copy is needed, or costs less."""
    cache = None if prompt.state.shards is not None else prompt.state.to_dynamic_cache()
    if cache is None or prompt.drafts_tree:
        return None
    # Only the Triton kernel reads rows here and there. Torch would gather them anew for every token, which costs
    # more than to do it once.
    if choose(prompt.target.backend, cache.layers[0].keys) != "triton":
        return None
    layers = [
        (layer.keys, layer.values, rows.to(layer.keys.device, torch.int32)[None])
        for layer, rows in zip(cache.layers, kept, strict=True)
    ]
    return KeptAttention(layers, prompt.target.backend)


def _own_kv(prompt: Prompt, kept: list[Tensor]) -> DynamicCache | None:
    """A copy of these tokens' KV of the first layers, on host 0; collective."""
    if prompt.state.shards is not None:
        return collect_kv(prompt.state.shards, kept, prompt.hosts)
    cache = prompt.state.to_dynamic_cache()
    return None if cache is None else select_kv(cache, kept)


def _layerskip(prompt: Prompt) -> Draft:
    """The target's first layers and its head, on the KV that they already have."""
    num_layers = max(1, round(prompt.config.layer_ratio * prompt.target.num_layers))
    shallow = replace(prompt.target, language_model=first_layers(prompt.target.language_model, num_layers))
    if prompt.state.shards is not None:
        everything = torch.arange(prompt.inputs.num_tokens).expand(prompt.target.num_kv_heads, -1)
        cache = _own_kv(prompt, [everything] * num_layers)
    elif (cache := prompt.state.to_dynamic_cache()) is not None:
        cache.layers = cache.layers[:num_layers]
    return Draft(prompt.drafter(shallow, cache), prompt.num_visual)


def first_layers(language_model: nn.Module, count: int) -> nn.Module:
    """A decoder of the first layers of another, whose weights and norm it shares."""
    shallow = copy.copy(language_model)
    shallow._modules = dict(language_model._modules)
    shallow.layers = nn.ModuleList(list(language_model.layers)[:count])
    return shallow


def _ngram(prompt: Prompt) -> Draft:
    text = prompt.inputs.input_ids[0, ~prompt.is_visual].tolist()
    return Draft(NgramDrafter(text) if prompt.hosts.is_leader else None, 0)


def _for_keeping(config: SpeculativeConfig, parts: ModelParts) -> Callable | None:
    keep = keep_policy(config)
    if keep == "uv_prune":
        last = min(config.uv_layer, parts.num_layers - 1)
        return partial(preserve.SimilarityChange, last_layer=last)
    by_attention = ("specvlm", "attention", "attention_per_frame")
    needs_attention = keep in by_attention or (keep == "hippo" and "attention" in config.hippo_terms)
    return preserve.AttentionScores if needs_attention else None


STRATEGIES: dict[str, Strategy] = {
    "vanilla": Strategy(_by_model, _for_keeping, needs_draft_model=True, keep="full"),
    "sd_tree": Strategy(_by_model, _for_keeping, needs_draft_model=True, keep="full", num_tree_nodes=25),
    "specvlm": Strategy(_by_model, _for_keeping, needs_draft_model=True, keep="specvlm"),
    "hippo": Strategy(_by_model, _for_keeping, needs_draft_model=True, keep="hippo"),
    "parallelvlm": Strategy(_by_model, _for_keeping, needs_draft_model=True, keep="uv_prune"),
    "text_only": Strategy(_text_only, needs_draft_model=True, reads_text_only=True),
    "tabed": Strategy(
        _tabed, _for_keeping, needs_draft_model=True, needs_verdicts=True, keep="full", drafts_trees=False
    ),
    "std": Strategy(_std, lambda config, parts: preserve.HeadAttention, runs_target=True, prunes_kv=True),
    "std_apbv": Strategy(_std_apbv, lambda config, parts: preserve.PassedOn, runs_target=True, needs_passing=True),
    "streaming": Strategy(_streaming, runs_target=True, prunes_kv=True),
    "layerskip": Strategy(_layerskip, runs_target=True),
    "ngram": Strategy(_ngram, drafts_trees=False),
}


def draft_tree(config: SpeculativeConfig, vocab_size: int = sys.maxsize) -> Tree | None:
    """The shape of what is drafted per round, out of so many tokens; None for a chain."""
    num_nodes = config.num_tree_nodes or STRATEGIES[config.strategy].num_tree_nodes
    return None if num_nodes is None else Tree.of(num_nodes, config.most_draft_tokens, vocab_size)


def make_observer(
    config: SpeculativeConfig, parts: ModelParts
) -> Callable[[ModelInputs, ContextLayout, HostGroup], PrefillObserver] | None:
    """What :func:`apbv.prefill` should let watch, for this strategy; None if nothing."""
    kind = STRATEGIES[config.strategy].observer(config, parts)
    if kind is None:
        return None
    return lambda inputs, layout, hosts: kind(
        parts.is_visual(inputs.input_ids[0]), inputs.query_start, layout, hosts
    )
