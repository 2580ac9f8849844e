"""The prefill methods, each a layout and an attention that is called in every layer."""

from ...config import METHOD_FACTS, SPARSE_NAMES, PrefillConfig
from .apb import ApbMethod
from .apbv import ApbvMethod
from .base import FullMethod, PrefillMethod
from .star import StarMethod
from .ulysses import UlyssesMethod
from .zigzag_ring import ZigzagRingMethod

# Methods by which host 0 alone computes the blocks that the selection of this name chooses.
_SPARSE_METHODS: list[type[PrefillMethod]] = [
    type(name, (FullMethod,), {"name": name, "facts": METHOD_FACTS[name]}) for name in SPARSE_NAMES
]
_METHODS: list[type[PrefillMethod]] = [
    FullMethod,
    *_SPARSE_METHODS,
    ZigzagRingMethod,
    UlyssesMethod,
    StarMethod,
    ApbMethod,
    ApbvMethod,
]
METHODS: dict[str, type[PrefillMethod]] = {method.name: method for method in _METHODS}


def method_alone(config: PrefillConfig) -> type[PrefillMethod]:
    """Return the method by which host 0 computes a prompt alone: full or sparse attention."""
    sparse = config.sparse_attention
    if sparse is None:
        return FullMethod
    return METHODS[sparse.method]


def resolve_method(config: PrefillConfig, num_hosts: int) -> type[PrefillMethod]:
    """Return a config's method for a number of hosts.

    A single host computes the prompt alone, unless the config keeps the method there.
    """
    method = METHODS[config.method]
    if not method.facts.splits or (num_hosts == 1 and not config.ablation.on_single_host):
        return method_alone(config)
    return method


__all__ = ["METHODS", "PrefillMethod", "method_alone", "resolve_method"]
