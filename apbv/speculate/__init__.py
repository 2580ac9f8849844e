"""Lossless speculative decoding: several tokens per forward pass of the target."""

from .drafting import Drafting
from .strategies import STRATEGIES, prunes, require_effective
from .ways import Autoregressive, Captioner

__all__ = ["STRATEGIES", "Autoregressive", "Captioner", "Drafting", "prunes", "require_effective"]
