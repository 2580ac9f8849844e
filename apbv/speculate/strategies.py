"""This module lists the strategies of drafting by name, with what each of them needs and supports."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..config import SpeculativeConfig
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from . import builders, observers
from .draft import Draft, DraftTask
from .tree import Tree

# The policies by which a draft sees what scores of the target's prefill are highest for.
_BY_PREFILL = ("specvlm", "attention", "attention_per_frame", "attention_variation", "uv_prune", "similarity")


@dataclass(frozen=True)
class Strategy:
    """A Strategy is one way to draft.

    Attributes:
        build: builds the draft from a prefilled prompt; collective.
        observer: makes the observer of the target's prefill that the strategy needs; returns None if it needs
            none.
        needs_draft_model: whether a second model drafts.
        runs_target: whether the target drafts itself. Tensor parallelism excludes that: nothing would make all
            members of a host draft the same tokens.
        needs_passing: whether the prefill has to pass KV pairs on between hosts.
        needs_verdicts: whether the draft learns from every verification before it drafts on, so that it has to
            take turns with the target.
        keep: the default policy that chooses the visual tokens which the draft sees; None where none can be
            chosen.
        prunes_kv: whether the target drafts on a share of its visual KV.
        drafts_trees: whether its drafter, from :meth:`DraftTask.drafter`, can draft trees.
        num_tree_nodes: the default size of the draft tree; None for a chain.
        reads_text_only: whether the draft model sees only the prompt's text, so that any model with the target's
            tokens will do.
    """

    build: Callable[[DraftTask], Draft]
    observer: Callable[[SpeculativeConfig, ModelParts], PrefillObserver | None] = lambda config, parts: None
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
        return self.needs_draft_model or self.build is builders.draft_on_latest_kv


def keep_policy(config: SpeculativeConfig) -> str | None:
    """Return the policy that chooses the visual tokens which the draft sees."""
    return config.keep or STRATEGIES[config.strategy].keep


def prunes(config: SpeculativeConfig) -> bool:
    """Return whether ``keep_ratio`` or ``keep_tokens`` limits the visual tokens that the draft sees."""
    return STRATEGIES[config.strategy].prunes_kv or keep_policy(config) not in (None, "full")


def ranks_by_prefill(config: SpeculativeConfig) -> bool:
    """Return whether the visual tokens that the draft sees are chosen by scores of the target's prefill."""
    keep = keep_policy(config)
    return keep in _BY_PREFILL or (keep == "hippo" and "attention" in config.hippo_terms)


def _for_keeping(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver | None:
    if not ranks_by_prefill(config):
        return None
    keep, layer = keep_policy(config), min(config.uv_layer, parts.num_layers - 1)
    if keep in ("uv_prune", "similarity"):
        return observers.SimilarityChange(parts, layer, since=0 if keep == "uv_prune" else None)
    if keep == "attention_variation":
        return observers.AttentionChange(parts, layer)
    return observers.AttentionScores(parts)


def _for_heads(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver:
    return observers.HeadAttention(parts)


def _for_passed(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver:
    return observers.PassedOn(parts)


STRATEGIES: dict[str, Strategy] = {
    "vanilla": Strategy(builders.draft_by_model, _for_keeping, needs_draft_model=True, keep="full"),
    "sd_tree": Strategy(
        builders.draft_by_model, _for_keeping, needs_draft_model=True, keep="full", num_tree_nodes=25
    ),
    "specvlm": Strategy(builders.draft_by_model, _for_keeping, needs_draft_model=True, keep="specvlm"),
    "hippo": Strategy(builders.draft_by_model, _for_keeping, needs_draft_model=True, keep="hippo"),
    "parallelvlm": Strategy(builders.draft_by_model, _for_keeping, needs_draft_model=True, keep="uv_prune"),
    "text_only": Strategy(builders.draft_text_only, needs_draft_model=True, reads_text_only=True),
    "tabed": Strategy(
        builders.draft_by_ensemble,
        _for_keeping,
        needs_draft_model=True,
        needs_verdicts=True,
        keep="full",
        drafts_trees=False,
    ),
    "std": Strategy(builders.draft_on_attended_kv, _for_heads, runs_target=True, prunes_kv=True),
    "std_apbv": Strategy(builders.draft_on_passed_kv, _for_passed, runs_target=True, needs_passing=True),
    "streaming": Strategy(builders.draft_on_latest_kv, runs_target=True, prunes_kv=True),
    "layerskip": Strategy(builders.draft_by_first_layers, runs_target=True),
    "ngram": Strategy(builders.draft_by_ngrams, drafts_trees=False),
}


def draft_tree(config: SpeculativeConfig, vocab_size: int = sys.maxsize) -> Tree | None:
    """Return the shape of the draft tree, for a vocabulary of ``vocab_size`` tokens; None for a chain."""
    num_nodes = config.num_tree_nodes or STRATEGIES[config.strategy].num_tree_nodes
    return None if num_nodes is None else Tree.of(num_nodes, config.most_draft_tokens, vocab_size)


def make_observer(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver | None:
    """Make the observer of one prompt's prefill that the strategy needs; None if it needs none."""
    return STRATEGIES[config.strategy].observer(config, parts)
