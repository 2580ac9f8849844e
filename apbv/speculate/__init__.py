"""Lossless speculative decoding: several tokens per forward pass of the target."""

from .drafting import Drafting
from .loops.decode_loops import Autoregressive, Captioner
from .strategies.table import STRATEGIES, prunes, require_effective

__all__ = ["STRATEGIES", "Autoregressive", "Captioner", "Drafting", "prunes", "require_effective"]
