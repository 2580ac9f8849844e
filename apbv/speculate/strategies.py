"""The ways to draft, by name: what each of them makes of a prefilled prompt."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..attention import PrefillObserver
from ..config import SamplingConfig, SpeculativeConfig
from ..encode import encode_visual
from ..hosts import HostGroup
from ..inputs import ModelInputs
from ..layout import ContextLayout
from ..models import ModelParts
from ..prefill import PrefillResult
from . import preserve
from .draft_prompt import prefill_draft, select_kv
from .drafters import Drafter, ModelDrafter, NgramDrafter
from .scores import standardised
from .tree import Tree, TreeDrafter


@dataclass(frozen=True)
class Prompt:
    """A prefilled prompt, and what a draft may be made of.

    Attributes:
        target, draft: the models; draft is None for strategies without one.
        inputs: the prompt with its pixels.
        state: what the target's prefill left; None on a draft host.
        observer: what watched the prefill, if the strategy asked for it.
        hosts: who computes: the target's hosts, or a draft host by itself.
        vocab_size: of the target; with a smaller draft of that, where it drafts on a host of its own.
        leave_last: the drafter is to run the prompt's last token itself, whose logits it then has.
    """

    target: ModelParts
    draft: ModelParts | None
    inputs: ModelInputs
    state: PrefillResult | None
    observer: PrefillObserver | None
    hosts: HostGroup
    config: SpeculativeConfig
    sampling: SamplingConfig
    vocab_size: int
    leave_last: bool = False

    @property
    def is_visual(self) -> Tensor:
        return self.target.is_visual(self.inputs.input_ids[0])

    @property
    def num_visual(self) -> int:
        return int(self.is_visual.sum())

    @property
    def num_kept(self) -> int:
        """How many visual tokens the draft may see."""
        return min(self.num_visual, max(1, round(self.config.keep_ratio * self.num_visual)))

    def drafter(self, parts: ModelParts, cache) -> Drafter | TreeDrafter | None:
        """A model that continues from a cache; None where there is no cache."""
        if cache is None:
            return None
        left = int(self.leave_last)
        if left:
            cache.crop(-left)
        position, length = self.inputs.next_position - left, self.inputs.num_tokens - left
        if draft_tree(self.config) is not None:
            return TreeDrafter(parts, cache, position, self.vocab_size)
        return ModelDrafter(parts, cache, position, length, self.sampling, self.vocab_size)


@dataclass(frozen=True)
class Draft:
    """Who drafts, and from what.

    Attributes:
        drafter: on host 0; None on the others.
        num_visual: how many visual tokens it sees.
        kept: which, by their number among the visual tokens, where all layers and heads see the same.
    """

    drafter: Drafter | TreeDrafter | None
    num_visual: int
    kept: Tensor | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to draft.

    Attributes:
        build: collective.
        observer: makes what has to watch the target's prefill; None if nothing has to.
        needs_draft_model: a second model drafts.
        needs_gathered_kv: the draft is made of the target's KV on host 0.
        drafts_trees: its drafter is :meth:`Prompt.drafter`'s, which can fill a tree, too.
        num_tree_nodes: of the tree that is drafted where the config does not say; None: a chain.
    """

    build: Callable[[Prompt], Draft]
    observer: Callable[[SpeculativeConfig, ModelParts], Callable | None] = lambda config, parts: None
    needs_draft_model: bool = False
    needs_gathered_kv: bool = False
    drafts_trees: bool = True
    num_tree_nodes: int | None = None


def kept_visual_tokens(prompt: Prompt, rows: Tensor | None) -> Tensor:
    """The visual tokens that ``config.keep`` preserves, ascending; the same on every host. Collective.

    Args:
        rows: the draft's embeddings of the frames that this host encoded.
    """
    config, count, total = prompt.config, prompt.num_kept, prompt.num_visual
    if not total or config.keep == "full":
        return torch.arange(total)
    if config.keep in ("attention", "uv_prune"):
        return preserve.keep_best(prompt.observer.result(), count)
    if config.keep == "random":
        return preserve.keep_random(total, count, prompt.sampling.seed)
    if prompt.inputs.visual.kind != "video":
        raise ValueError(f"keep={config.keep!r} chooses among frames, and the prompt has no video")
    if config.keep == "uniform_frames":
        return preserve.keep_uniform_frames(total, prompt.inputs.visual.rows_per_unit, count)
    return preserve.keep_best(_hippo_scores(prompt, rows), count)


def _hippo_scores(prompt: Prompt, rows: Tensor) -> Tensor:
    """HIPPO's Eq. 7: attention, change over time and variety in space, each standardised within its frame."""
    per_frame = prompt.inputs.visual.rows_per_unit
    attention = prompt.observer.result()
    semantics = preserve.local_semantics(prompt.draft, prompt.inputs, rows, prompt.hosts)
    in_frames = len(attention) // per_frame * per_frame
    relevance = standardised(attention[:in_frames].view(-1, per_frame)).flatten()
    # Rows behind the last frame have no neighbours in time or space.
    return torch.cat([relevance, attention.new_zeros(len(attention) - in_frames)]) + semantics


def _by_model(prompt: Prompt) -> Draft:
    rows = encode_visual(prompt.draft, prompt.inputs.visual)
    kept = kept_visual_tokens(prompt, rows)
    cache = prefill_draft(prompt.draft, prompt.inputs, kept, prompt.hosts, rows)
    return Draft(prompt.drafter(prompt.draft, cache), len(kept), kept)


def _vanilla(prompt: Prompt) -> Draft:
    return _by_model(replace(prompt, config=replace(prompt.config, keep="full")))


def _text_only(prompt: Prompt) -> Draft:
    nothing = torch.empty(0, dtype=torch.long)
    cache = prefill_draft(prompt.draft, prompt.inputs, nothing, prompt.hosts, None)
    return Draft(prompt.drafter(prompt.draft, cache), 0, nothing)


def _std(prompt: Prompt) -> Draft:
    """The target on its own KV: of each layer and head, all text and the most attended visual tokens."""
    scores = prompt.observer.result() if prompt.num_visual else []
    count = prompt.num_kept
    best = [layer.topk(count, dim=-1).indices for layer in scores]
    return Draft(_on_own_kv(prompt, best), count)


def _streaming(prompt: Prompt) -> Draft:
    """The target on its own KV of all text and the latest visual tokens."""
    count = prompt.num_kept
    latest = torch.arange(prompt.num_visual - count, prompt.num_visual)
    heads = prompt.target.num_kv_heads
    drafter = _on_own_kv(prompt, [latest.expand(heads, -1)] * prompt.target.num_layers)
    return Draft(drafter, count, latest)


def _on_own_kv(prompt: Prompt, visual: list[Tensor]) -> Drafter | None:
    cache = prompt.state.to_dynamic_cache()
    if cache is None:
        return None
    visual_tokens, text = prompt.is_visual.nonzero().flatten(), (~prompt.is_visual).nonzero().flatten()
    heads = prompt.target.num_kv_heads
    visual = visual or [torch.empty(heads, 0, dtype=torch.long)] * prompt.target.num_layers
    kept = [
        torch.cat([text.expand(heads, -1), visual_tokens[chosen]], dim=1).sort(dim=1).values for chosen in visual
    ]
    return prompt.drafter(prompt.target, select_kv(cache, kept))


def _layerskip(prompt: Prompt) -> Draft:
    """The target's first layers and its head, on the KV that they already have."""
    cache = prompt.state.to_dynamic_cache()
    if cache is None:
        return Draft(None, prompt.num_visual)
    num_layers = max(1, round(prompt.config.layer_ratio * prompt.target.num_layers))
    cache.layers = cache.layers[:num_layers]
    shallow = replace(prompt.target, language_model=first_layers(prompt.target.language_model, num_layers))
    return Draft(prompt.drafter(shallow, cache), prompt.num_visual)


def first_layers(language_model: nn.Module, count: int) -> nn.Module:
    """A decoder of the first layers of another, whose weights and norm it shares."""
    shallow = copy.copy(language_model)
    shallow._modules = dict(language_model._modules)
    shallow.layers = nn.ModuleList(list(language_model.layers)[:count])
    return shallow


def _ngram(prompt: Prompt) -> Draft:
    text = prompt.inputs.input_ids[0, ~prompt.is_visual].tolist()
    return Draft(NgramDrafter(text) if prompt.hosts.rank == 0 else None, 0)


def _for_keeping(config: SpeculativeConfig, parts: ModelParts) -> Callable | None:
    if config.keep == "uv_prune":
        last = min(config.uv_layer, parts.num_layers - 1)
        return partial(preserve.SimilarityChange, last_layer=last)
    return preserve.AttentionScores if config.keep in ("attention", "hippo") else None


STRATEGIES: dict[str, Strategy] = {
    "vanilla": Strategy(_vanilla, needs_draft_model=True),
    "specvlm": Strategy(_by_model, _for_keeping, needs_draft_model=True),
    "text_only": Strategy(_text_only, needs_draft_model=True),
    "std": Strategy(_std, lambda config, parts: preserve.HeadAttention, needs_gathered_kv=True),
    "streaming": Strategy(_streaming, needs_gathered_kv=True),
    "layerskip": Strategy(_layerskip, needs_gathered_kv=True),
    "ngram": Strategy(_ngram, drafts_trees=False),
    "sd_tree": Strategy(_vanilla, needs_draft_model=True, num_tree_nodes=25),
}


def draft_tree(config: SpeculativeConfig) -> Tree | None:
    """The shape of what is drafted per round; None for a chain."""
    num_nodes = config.num_tree_nodes or STRATEGIES[config.strategy].num_tree_nodes
    return None if num_nodes is None else Tree.of(num_nodes, config.num_draft_tokens)


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
