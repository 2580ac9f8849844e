"""Lossless speculative decoding: several tokens per forward pass of the target, and not one of them changed."""

from .draft import Draft, Prompt
from .pair import Pair, draft_request
from .pipeline import PipelineStats, generate_beside_draft
from .preserve import kept_by_frame
from .serial import SpeculationStats, generate_speculatively
from .settings import (
    drafts_elsewhere,
    reads,
    require_consistent,
    require_effective,
    require_fitting_draft,
    require_readable,
    require_same_tokens,
    strategy_of,
)
from .strategies import STRATEGIES, draft_tree, make_observer, prunes
from .threads import DraftThread
from .tree import generate_by_tree

__all__ = [
    "STRATEGIES",
    "Draft",
    "DraftThread",
    "Pair",
    "PipelineStats",
    "Prompt",
    "SpeculationStats",
    "draft_request",
    "draft_tree",
    "drafts_elsewhere",
    "generate_beside_draft",
    "generate_by_tree",
    "generate_speculatively",
    "kept_by_frame",
    "make_observer",
    "prunes",
    "reads",
    "require_consistent",
    "require_effective",
    "require_fitting_draft",
    "require_readable",
    "require_same_tokens",
    "strategy_of",
]
