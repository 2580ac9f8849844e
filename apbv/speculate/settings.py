"""This module checks speculative configurations for settings that do not fit each other, hosts or models."""

from collections.abc import Collection
from typing import Any

from ..config import PrefillConfig, SpeculativeConfig
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..model.parts import ModelParts
from ..prefilling.forward import passes_blocks_on
from .strategies import STRATEGIES, Strategy, draft_tree, keep_policy, prunes, ranks_by_prefill


def strategy_of(config: SpeculativeConfig) -> Strategy:
    """Return the strategy of a configuration."""
    return STRATEGIES[config.strategy]


def drafts_elsewhere(config: SpeculativeConfig | None, hosts: HostGroup) -> bool:
    """Return whether a draft host drafts."""
    return config is not None and config.draft_host and hosts.size > 1


def require_consistent(
    config: SpeculativeConfig, prefill: PrefillConfig, hosts: HostGroup, has_captioner: bool
) -> None:
    """Refuse settings that contradict one another, the prefill or the hosts.

    Raises:
        ValueError: settings do so; the message says which and why.
    """
    name, strategy, tree = config.strategy, strategy_of(config), draft_tree(config)
    if config.draft_host and not strategy.needs_draft_model:
        raise ValueError(f"{name} drafts without a second model: there is nothing for a draft host to do")
    if hosts.tensor_parallel_size > 1 and (config.draft_host or strategy.runs_target):
        asked = "a draft host" if config.draft_host else f"{name}, with which the target drafts itself,"
        raise ValueError(f"{asked} is not supported with tensor parallelism: the first member of host 0 drafts")
    if config.draft_host and strategy.needs_verdicts:
        raise ValueError(f"{name} learns from every verification before it drafts on: not on a draft host")
    if config.draft_host and tree is not None:
        raise ValueError("a draft host drafts a chain of tokens: it cannot draft a tree")
    if tree is not None and not strategy.drafts_trees:
        raise ValueError(f"{name} drafts a chain of tokens: it cannot draft a tree")
    if config.keep is not None and strategy.keep is None:
        raise ValueError(f"{name} does not choose among visual tokens: keep does not apply")
    if config.keep_tokens is not None and not prunes(config):
        raise ValueError(f"a draft by {name} always sees the same share of the prompt: keep_tokens does not apply")
    by_vision = keep_policy(config) == "hippo" and set(config.hippo_terms) > {"attention"}
    if config.vision_first and not (by_vision and config.draft_host and config.prune == "prompt"):
        raise ValueError(
            "vision_first needs keep='hippo' with terms of attention and of vision, prune='prompt', and a draft "
            "host"
        )
    if config.prune == "kv" and (keep_policy(config) in (None, "full") or strategy.needs_verdicts):
        raise ValueError(f"{name} drops no KV of what its draft has read: prune='kv' does not apply")
    if strategy.needs_passing and not passes_blocks_on(prefill, hosts):
        raise ValueError(
            f"{name} drafts on KV that a prefill passes on between hosts; this one passes nothing on: it needs "
            "method apbv or apb, 2 hosts at least, and a passing_len"
        )
    _require_fitting_reduction(config, prefill)
    if config.draft_host and prefill.reduce is not None and ranks_by_prefill(config):
        raise ValueError(
            f"keep={keep_policy(config)!r} goes by what the target's prefill sees, and {prefill.reduce.method} "
            "leaves some of that out: on a draft host choose another, such as keep='even'"
        )
    if config.needs_caption and not has_captioner:
        raise ValueError(f"the ensemble {config.ensemble} drafts from a caption: it needs a captioner")


def _require_fitting_reduction(config: SpeculativeConfig, prefill: PrefillConfig) -> None:
    """Refuse drafts that need all of the target's layers to have read the same tokens.

    Raises:
        ValueError: the draft does, and tokens are left out between layers.
    """
    reduce = prefill.reduce
    if reduce is None or not reduce.is_late or reduce.leaves_all:
        return
    if strategy_of(config).runs_target:
        raise ValueError(
            f"{config.strategy} drafts on the target's KV, which has other tokens in every layer where "
            f"{reduce.method} leaves some out between layers"
        )
    if ranks_by_prefill(config):
        raise ValueError(
            f"keep={keep_policy(config)!r} goes by what the target's prefill sees in all layers, and "
            f"{reduce.method} leaves tokens out between layers: choose another, such as keep='even'"
        )


def require_effective(config: SpeculativeConfig, given: Collection[str]) -> None:
    """Refuse settings that a user gave and that would have no effect.

    Args:
        given: the names of the given settings, also of those with the default value; ``"captioner"``, and
            ``"save_kept"`` for a picture of the kept tokens, can be among them.

    Raises:
        ValueError: the strategy, or its choice of visual tokens, ignores one of them.
    """
    name, strategy, keep = config.strategy, strategy_of(config), keep_policy(config)
    is_pruned = keep not in (None, "full")
    for setting, applies, reason in (
        ("draft_model", strategy.needs_draft_model, "drafts without a second model"),
        ("keep_ratio", prunes(config), "keeps no share of the visual tokens"),
        ("hippo_terms", keep == "hippo", "does not choose visual tokens by HIPPO's scores"),
        ("prune", is_pruned and not strategy.needs_verdicts, "drops nothing that its draft has read"),
        ("ensemble", name == "tabed", "drafts from one prompt"),
        ("captioner", config.needs_caption, "drafts from no caption"),
        ("save_kept", strategy.shows_kept, "does not choose the same visual tokens in all layers and heads"),
    ):
        if setting in given and not applies:
            raise ValueError(f"{name} {reason}: {setting} does not apply")


def require_fitting_draft(config: SpeculativeConfig, target: ModelParts, draft: ModelParts | None) -> None:
    """Refuse a draft that is missing, or reads other prompts than the target.

    A strategy that drafts from a prompt's text, tokenized for the target, also takes a text-only model, but not on
    a draft host, which has to read the request itself.

    Raises:
        ValueError: the draft is missing, or reads other prompts.
    """
    if draft is None:
        raise ValueError(f"speculative decoding by {config.strategy} needs a draft model")
    takes_text = strategy_of(config).reads_text_only and not draft.is_video_model and not config.draft_host
    if reads(target) != reads(draft) and not takes_text:
        raise ValueError(f"the draft does not read the target's prompts: {reads(draft)}, not {reads(target)}")


def require_same_tokens(target: Any, draft: Any) -> None:
    """Refuse a draft for which a token id means something else than for the target.

    Args:
        target, draft: their processors or tokenizers.

    Raises:
        ValueError: an id that both have stands for different tokens.
    """
    theirs, own = (getattr(reader, "tokenizer", reader) for reader in (target, draft))
    names = {number: name for name, number in own.get_vocab().items()}
    for name, number in sorted(theirs.get_vocab().items(), key=lambda item: item[1]):
        if names.get(number, name) != name:
            raise ValueError(
                f"the draft has other tokens than the target: {number} is {names[number]!r}, not {name!r}"
            )


def require_readable(config: SpeculativeConfig, inputs: ModelInputs) -> None:
    """Refuse a prompt from which the strategy cannot choose.

    Raises:
        ValueError: the strategy compares frames, and the prompt has images only.
    """
    keep, visual = keep_policy(config), inputs.visual
    by_frame = keep in ("hippo", "dycoke", "fastvid", "uniform_frames", "attention_per_frame")
    if by_frame and visual is not None and visual.kind == "image":
        raise ValueError(f"keep={keep!r} chooses among frames, and the prompt has no video")


def reads(parts: ModelParts) -> str:
    """Describe the prompts that a model reads."""
    placeholders = f"{parts.video_token_id} (video) and {parts.image_token_id} (image)"
    if parts.hears:
        placeholders += f" and {parts.audio_token_id} (audio)"
    return f"{parts.family} prompts with placeholders {placeholders}"
