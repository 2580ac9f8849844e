"""Drafting strategies by name, with what they need of the target's prefill."""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ...config import (
    KEEP_FACTS,
    STRATEGY_FACTS,
    HippoConfig,
    PrefillConfig,
    SpeculativeConfig,
    StrategyFacts,
    TabedConfig,
    UVPruneConfig,
)
from ...config.refusals import refuse
from ...errors import InvalidConfigError
from ...hosts import HostGroup
from ...model.families import hybrid_family
from ...model.parts import ModelParts
from ...prefilling.prefill_observer import PrefillObserver
from ..drafters.draft import Draft, DraftTask
from ..drafters.tree import Tree
from . import builders
from .next_token import PromptOutputs, draft_by_next_token
from .score_observers import HeadAttention, Relevance, SimilarityChange


def _no_observer(config: SpeculativeConfig, parts: ModelParts) -> None:
    return None


@dataclass(frozen=True)
class Strategy:
    """How a strategy drafts.

    Attributes:
        facts: what the config knows of it, by its name.
        build: builds the draft from a prefilled prompt; collective.
        observer: makes the strategy's observer of the target's prefill; returns None if it needs
            none.
    """

    facts: StrategyFacts
    build: Callable[[DraftTask], Draft]
    observer: Callable[[SpeculativeConfig, ModelParts], PrefillObserver | None] = _no_observer


def prunes(config: SpeculativeConfig) -> bool:
    """Return whether ``keep_ratio`` or ``keep_tokens`` limits the draft's visual tokens."""
    return STRATEGY_FACTS[config.strategy].prunes_kv or _selects(config.keep_policy)


def _selects(keep: str | None) -> bool:
    """Return whether a draft's prompt is without some visual tokens."""
    return keep is not None and KEEP_FACTS[keep].prunes


def ranks_by_prefill(config: SpeculativeConfig) -> bool:
    """Return whether the draft's visual tokens are chosen by scores of the target's prefill."""
    keep = config.keep_policy
    if keep is None:
        return False
    facts = KEEP_FACTS[keep]
    terms = config.settings_of(HippoConfig).terms
    has_term_of_prefill = facts.ranks_by_terms and "attention" in terms
    return facts.ranks_by_prefill or has_term_of_prefill


def _head_observer(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver:
    return HeadAttention()


def _keep_observer(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver | None:
    """Return the observer whose scores the keep policy ranks by; None if it needs none."""
    keep = config.keep_policy
    if keep is not None and KEEP_FACTS[keep].ranks_by_change:
        layer = config.settings_of(UVPruneConfig).layer
        return SimilarityChange(min(layer, parts.num_layers - 1), parts.num_layers)
    return Relevance() if ranks_by_prefill(config) else None


def _output_observer(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver:
    return PromptOutputs()


STRATEGIES: dict[str, Strategy] = {
    "vanilla": Strategy(STRATEGY_FACTS["vanilla"], builders.draft_by_model, _keep_observer),
    "sd_tree": Strategy(STRATEGY_FACTS["sd_tree"], builders.draft_by_model, _keep_observer),
    "specvlm": Strategy(STRATEGY_FACTS["specvlm"], builders.draft_by_model, _keep_observer),
    "hippo": Strategy(STRATEGY_FACTS["hippo"], builders.draft_by_model, _keep_observer),
    "parallelvlm": Strategy(STRATEGY_FACTS["parallelvlm"], builders.draft_by_model, _keep_observer),
    "text_only": Strategy(STRATEGY_FACTS["text_only"], builders.draft_text_only),
    "tabed": Strategy(STRATEGY_FACTS["tabed"], builders.draft_by_ensemble, _keep_observer),
    "std": Strategy(STRATEGY_FACTS["std"], builders.draft_on_attended_kv, _head_observer),
    "streaming": Strategy(STRATEGY_FACTS["streaming"], builders.draft_on_latest_kv),
    "layerskip": Strategy(STRATEGY_FACTS["layerskip"], builders.draft_by_first_layers),
    "mtp": Strategy(STRATEGY_FACTS["mtp"], draft_by_next_token, _output_observer),
    "ngram": Strategy(STRATEGY_FACTS["ngram"], builders.draft_by_ngrams),
}


def draft_tree(config: SpeculativeConfig, vocab_size: int = sys.maxsize) -> Tree | None:
    """Return the draft tree for a vocabulary of ``vocab_size`` tokens; None for a chain."""
    num_nodes = config.num_tree_nodes or STRATEGY_FACTS[config.strategy].num_tree_nodes
    if num_nodes is None:
        return None
    return Tree.of(num_nodes, config.most_draft_tokens, vocab_size)


def draft_batching_obstacle(config: SpeculativeConfig) -> str | None:
    """Return why answers with these drafts cannot be decoded in one batch, or None if they can."""
    if config.draft_host:
        return "a draft host drafts for one answer"
    if draft_tree(config) is not None:
        return "a draft tree is verified alone"
    if STRATEGY_FACTS[config.strategy].needs_verdicts:
        return f"{config.strategy} learns from every verification"
    return None


def make_observer(config: SpeculativeConfig, parts: ModelParts) -> PrefillObserver | None:
    """Make the strategy's observer of one prompt's prefill; None if it needs none."""
    return STRATEGIES[config.strategy].observer(config, parts)


def require_consistent(
    config: SpeculativeConfig, prefill: PrefillConfig, hosts: HostGroup, has_captioner: bool
) -> None:
    """Reject settings that contradict one another, the prefill or the hosts.

    Raises:
        InvalidConfigError: settings do so; the message says which and why.
    """
    name = config.strategy
    strategy = STRATEGY_FACTS[config.strategy]
    keep = config.keep_policy
    drops_nothing = not _selects(keep) or strategy.needs_verdicts
    ranking = f"keep={keep!r}" if ranks_by_prefill(config) else None
    refuse(
        **prefill.features,
        draft_host=config.draft_host,
        one_host=hosts.size == 1,
        one_model=name if not strategy.needs_draft_model else None,
        self_drafting=name if strategy.runs_target else None,
        tensor_parallel=hosts.tensor_parallel_size > 1,
        learning_draft=name if strategy.needs_verdicts else None,
        tree=draft_tree(config) is not None,
        chain_only=name if not strategy.drafts_trees else None,
        keep=config.keep,
        no_choice=name if strategy.keep is None else None,
        keep_tokens=config.keep_tokens is not None,
        fixed_share=name if not prunes(config) else None,
        prune_kv=config.prune == "kv",
        drops_nothing=name if drops_nothing else None,
        ranking_on_draft_host=ranking if config.draft_host else None,
        caption=config.settings_of(TabedConfig).ensemble if config.needs_caption else None,
        no_captioner=not has_captioner,
    )


def require_drafts_of(config: SpeculativeConfig, model: PreTrainedConfig) -> None:
    """Reject a strategy that a hybrid model cannot draft by, or verify.

    Args:
        model: the config of the target, or of the draft.

    Raises:
        InvalidConfigError: it cannot.
    """
    learns = STRATEGY_FACTS[config.strategy].needs_verdicts
    refuse(
        hybrid=hybrid_family(model),
        tree=draft_tree(config) is not None,
        learning_draft=config.strategy if learns else None,
    )


def require_effective(config: SpeculativeConfig, given_settings: Collection[str]) -> None:
    """Reject explicitly given settings that would have no effect.

    Args:
        given_settings: the names of the given settings, also of those with the default value;
            ``"captioner"`` can be among them.

    Raises:
        InvalidConfigError: the strategy, or its choice of visual tokens, ignores one of them.
    """
    name = config.strategy
    strategy = STRATEGY_FACTS[config.strategy]
    keep = config.keep_policy
    prunes_prompt = _selects(keep) and not strategy.needs_verdicts
    for setting, applies, reason in (
        ("draft_model", strategy.needs_draft_model, "uses no draft model"),
        ("keep_ratio", prunes(config), "does not prune visual tokens by ratio"),
        ("prune", prunes_prompt, "prunes nothing from its draft's prompt or KV"),
        ("captioner", config.needs_caption, "uses no caption"),
    ):
        if setting in given_settings and not applies:
            raise InvalidConfigError(f"{name} {reason}: {setting} does not apply")


def require_same_tokens(target: Any, draft: Any) -> None:
    """Reject a draft whose token ids differ from the target's.

    Args:
        target, draft: their processors or tokenizers.

    Raises:
        InvalidConfigError: an id of both maps to different tokens.
    """
    target_vocab = getattr(target, "tokenizer", target).get_vocab()
    draft_vocab = getattr(draft, "tokenizer", draft).get_vocab()
    draft_tokens = {number: token for token, number in draft_vocab.items()}
    for token, number in sorted(target_vocab.items(), key=lambda item: item[1]):
        if number in draft_tokens and draft_tokens[number] != token:
            raise InvalidConfigError(
                f"the draft's vocabulary differs from the target's: {number} is "
                f"{draft_tokens[number]!r}, not {token!r}"
            )


def reads(parts: ModelParts) -> str:
    """Describe the prompts that a model reads."""
    placeholders = f"{parts.video_token_id} (video) and {parts.image_token_id} (image)"
    if parts.hears:
        placeholders += f" and {parts.audio_token_id} (audio)"
    return f"{parts.family} prompts with placeholders {placeholders}"
