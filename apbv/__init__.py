"""apbv: sequence-parallel prefill for long-video vision-language models.

The models are unmodified transformers models.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compat.torchvision_guard import ensure_torchvision_imports
from .config import (
    DecodeConfig,
    PrefillConfig,
    ReduceConfig,
    ReuseConfig,
    SamplingParams,
    SparseConfig,
    SpeculativeConfig,
    VideoConfig,
)
from .errors import (
    ApbvError,
    BackendUnavailableError,
    HostError,
    InvalidConfigError,
    InvalidRequestError,
    ModelOutputError,
    NotEnoughMemoryError,
    PromptError,
    RequestCancelled,
    StorageError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .hosts import HostGroup
    from .input.media.audio import AudioError
    from .input.media.video import VideoError
    from .input.prompts.model_inputs import ModelInputs
    from .planning import Plan, plan
    from .prefilling.forward import prefill
    from .prefilling.load import load
    from .prefilling.result import PrefillResult
    from .request.result import GenerateResult

__version__ = "0.2.0"

# The submodules of what needs torch and transformers, which take seconds to import: on first use
# (PEP 562).
_SUBMODULES = {
    "Engine": "engine",
    "GenerateResult": "request.result",
    "HostGroup": "hosts",
    "AudioError": "input.media.audio",
    "ModelInputs": "input.prompts.model_inputs",
    "VideoError": "input.media.video",
    "prefill": "prefilling.forward",
    "PrefillResult": "prefilling.result",
    "load": "prefilling.load",
    "plan": "planning",
    "Plan": "planning",
}

__all__ = [
    "ApbvError",
    "BackendUnavailableError",
    "DecodeConfig",
    "HostError",
    "InvalidConfigError",
    "InvalidRequestError",
    "ModelOutputError",
    "NotEnoughMemoryError",
    "PrefillConfig",
    "PromptError",
    "ReduceConfig",
    "RequestCancelled",
    "ReuseConfig",
    "SamplingParams",
    "SparseConfig",
    "SpeculativeConfig",
    "StorageError",
    "UnsupportedModelError",
    "VideoConfig",
    *_SUBMODULES,
]


def __getattr__(name: str) -> Any:
    """Return a public name, or a submodule, which is imported now."""
    if name in _SUBMODULES:
        value = getattr(import_module(f".{_SUBMODULES[name]}", __name__), name)
        setattr(sys.modules[__name__], name, value)
        return value
    submodule = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "demo", "kernels"})


ensure_torchvision_imports()
