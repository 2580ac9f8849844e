"""apbv: sequence-parallel prefill for long-video vision-language models.

The models are unmodified transformers models.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from .torchvision_guard import ensure_torchvision_imports

if TYPE_CHECKING:
    from .engine import Engine
    from .generated import GenerateResult
    from .hosts import HostError, HostGroup
    from .input.audio import AudioError
    from .input.model_inputs import ModelInputs
    from .input.video import VideoError
    from .input.visual import PromptError
    from .kv.facts import StorageError
    from .planning import Plan, plan
    from .prefilling.cancelling import RequestCancelled
    from .prefilling.forward import prefill
    from .prefilling.load import load
    from .prefilling.memory import NotEnoughMemoryError
    from .prefilling.result import PrefillResult

__version__ = "0.2.0"

# The submodules of what needs torch and transformers, which take seconds to import: on first use
# (PEP 562).
_HOMES = {
    "Engine": "engine",
    "GenerateResult": "generated",
    "RequestCancelled": "prefilling.cancelling",
    "HostError": "hosts",
    "HostGroup": "hosts",
    "AudioError": "input.audio",
    "ModelInputs": "input.model_inputs",
    "PromptError": "input.visual",
    "VideoError": "input.video",
    "prefill": "prefilling.forward",
    "PrefillResult": "prefilling.result",
    "load": "prefilling.load",
    "NotEnoughMemoryError": "prefilling.memory",
    "plan": "planning",
    "Plan": "planning",
    "StorageError": "kv.facts",
}

__all__ = [
    *(
        "DecodeConfig",
        "PrefillConfig",
        "ReduceConfig",
        "ReuseConfig",
        "SamplingParams",
        "SparseConfig",
    ),
    *("SpeculativeConfig", "VideoConfig"),
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    """Return a public name, or a submodule, which is imported now."""
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
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
