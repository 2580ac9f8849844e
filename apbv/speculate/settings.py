"""What of a speculative configuration goes together, and with which prefill, hosts and models."""

from ..config import PrefillConfig, SpeculativeConfig
from ..hosts import HostGroup
from ..inputs import ModelInputs
from ..models import ModelParts
from ..prefill import passes_blocks_on
from .strategies import STRATEGIES, Strategy, draft_tree, keep_policy


def strategy_of(config: SpeculativeConfig) -> Strategy:
    """How a configuration drafts.

    Raises:
        ValueError: there is no strategy of that name.
    """
    if config.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {config.strategy!r}; known are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[config.strategy]


def drafts_elsewhere(config: SpeculativeConfig | None, hosts: HostGroup) -> bool:
    """Whether a host of its own drafts."""
    return config is not None and config.draft_host and hosts.size > 1


def require_consistent(
    config: SpeculativeConfig, prefill: PrefillConfig, hosts: HostGroup, has_captioner: bool
) -> None:
    """Refuse settings that do not go together.

    Raises:
        ValueError: they do not; the message says which and why.
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
            f"{name} drafts on what the prefill passes on between hosts, and this one passes nothing: it needs "
            "method apbv or apb, 2 hosts at least, and a passing_len"
        )
    if config.needs_caption and not has_captioner:
        raise ValueError(f"the ensemble {config.ensemble} drafts from a caption: it needs a captioner")


def require_fitting_draft(config: SpeculativeConfig, target: ModelParts, draft: ModelParts | None) -> None:
    """Refuse a draft that is missing, or reads other prompts than the target.

    Raises:
        ValueError: so it is.
    """
    if draft is None:
        raise ValueError(f"speculative decoding by {config.strategy} needs a draft model")
    if reads(target) != reads(draft):
        raise ValueError(f"the draft does not read the target's prompts: {reads(draft)}, not {reads(target)}")


def require_readable(config: SpeculativeConfig, inputs: ModelInputs) -> None:
    """Refuse a prompt from which the strategy cannot choose.

    Raises:
        ValueError: it chooses among frames, and there are none.
    """
    keep = keep_policy(config)
    if keep in ("hippo", "uniform_frames") and inputs.visual is not None and inputs.visual.kind != "video":
        raise ValueError(f"keep={keep!r} chooses among frames, and the prompt has no video")


def reads(parts: ModelParts) -> str:
    """What a model's prompts look like."""
    placeholders = f"{parts.video_token_id} (video) and {parts.image_token_id} (image)"
    return f"{parts.family} prompts with placeholders {placeholders}"
