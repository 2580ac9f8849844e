"""Lossless speculative decoding: several tokens per forward pass of the target, and not one of them changed."""

from .pair import Pair, draft_request
from .pipeline import generate_beside_draft
from .preserve import kept_by_frame
from .serial import SpeculationStats, generate_speculatively
from .strategies import STRATEGIES, Prompt, make_observer

__all__ = [
    "STRATEGIES",
    "Pair",
    "Prompt",
    "SpeculationStats",
    "draft_request",
    "generate_beside_draft",
    "generate_speculatively",
    "kept_by_frame",
    "make_observer",
]
