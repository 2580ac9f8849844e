"""Lossless speculative decoding: several tokens per forward pass of the target."""

from .decode_loops import Autoregressive, Captioner
from .drafting import Drafting
from .strategies import STRATEGIES, prunes, require_effective

__all__ = ["STRATEGIES", "Autoregressive", "Captioner", "Drafting", "prunes", "require_effective"]
