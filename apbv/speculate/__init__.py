"""This package decodes speculatively and losslessly: several tokens per forward pass of the target."""

from .drafting import Drafting
from .settings import require_effective, strategy_of
from .strategies import STRATEGIES, prunes
from .turns import Captioner
from .way import Autoregressive

__all__ = ["STRATEGIES", "Autoregressive", "Captioner", "Drafting", "prunes", "require_effective", "strategy_of"]
