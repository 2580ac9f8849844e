"""apbv: sequence-parallel prefill for long-video vision-language models on unmodified transformers models."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .config import PrefillConfig, ReuseConfig, SamplingConfig, SpeculativeConfig
from .torchvision_guard import ensure_torchvision_imports

if TYPE_CHECKING:
    from .engine import Engine, GenerateResult, RequestCancelled
    from .hosts import HostError, HostGroup
    from .inputs import ModelInputs
    from .prefill import prefill
    from .result import PrefillResult, load
    from .storage import StorageError

__all__ = [
    "Engine",
    "GenerateResult",
    "HostError",
    "HostGroup",
    "ModelInputs",
    "PrefillConfig",
    "PrefillResult",
    "RequestCancelled",
    "ReuseConfig",
    "SamplingConfig",
    "SpeculativeConfig",
    "StorageError",
    "load",
    "prefill",
]
__version__ = "0.1.0"

# The submodules of what needs torch and transformers, which take seconds to import: on first use (PEP 562).
_HOMES = {
    "Engine": "engine",
    "GenerateResult": "engine",
    "RequestCancelled": "engine",
    "HostError": "hosts",
    "HostGroup": "hosts",
    "ModelInputs": "inputs",
    "prefill": "prefill",
    "PrefillResult": "result",
    "load": "result",
    "StorageError": "storage",
}


def __getattr__(name: str) -> Any:
    """A public name, or a submodule, which is imported now."""
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


class _Package(ModuleType):
    """This package, in which ``prefill`` is the function.

    Once a submodule is imported Python puts it into its package, here in place of the function of its name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_submodule = isinstance(value, ModuleType) and name in _HOMES
        super().__setattr__(name, getattr(value, name) if is_submodule else value)


sys.modules[__name__].__class__ = _Package
ensure_torchvision_imports()
