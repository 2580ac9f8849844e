"""apbv: sequence-parallel prefill for long-video vision-language models on unmodified transformers models."""

from .torchvision_guard import ensure_torchvision_imports

ensure_torchvision_imports()

from .config import PrefillConfig, SamplingConfig, SpeculativeConfig  # noqa: E402  (transformers must find torchvision usable)
from .engine import Engine, GenerateResult, RequestCancelled  # noqa: E402
from .hosts import HostError, HostGroup  # noqa: E402
from .inputs import ModelInputs  # noqa: E402
from .prefill import PrefillResult, prefill  # noqa: E402

__all__ = [
    "Engine",
    "GenerateResult",
    "HostError",
    "HostGroup",
    "ModelInputs",
    "PrefillConfig",
    "PrefillResult",
    "RequestCancelled",
    "SamplingConfig",
    "SpeculativeConfig",
    "prefill",
]
__version__ = "0.1.0"
