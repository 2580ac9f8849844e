"""Lossless speculative decoding: several tokens per forward pass of the target, and not one of them changed."""

from .preserve import kept_by_frame
from .serial import SpeculationStats, generate_speculatively
from .strategies import STRATEGIES, Prompt, make_observer

__all__ = ["STRATEGIES", "Prompt", "SpeculationStats", "generate_speculatively", "kept_by_frame", "make_observer"]
