"""Lossless speculative decoding: several tokens per forward pass of the target, and not one of them changed."""

from .pair import Pair, draft_request
from .pipeline import PipelineStats, generate_beside_draft
from .preserve import kept_by_frame
from .serial import SpeculationStats, generate_speculatively
from .strategies import STRATEGIES, Draft, Prompt, draft_tree, keep_policy, make_observer
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
    "generate_beside_draft",
    "generate_by_tree",
    "generate_speculatively",
    "keep_policy",
    "kept_by_frame",
    "make_observer",
]
