"""This package holds the prefill methods, each a layout and an attention that is called in every layer."""

from .apb import ApbMethod
from .apbv import ApbvMethod
from .base import PrefillMethod
from .full import FullMethod
from .star import StarMethod
from .ulysses import UlyssesMethod
from .zigzag_ring import ZigzagRingMethod

METHODS: dict[str, type[PrefillMethod]] = {
    method.name: method
    for method in (FullMethod, ZigzagRingMethod, UlyssesMethod, StarMethod, ApbMethod, ApbvMethod)
}

__all__ = ["METHODS", "PrefillMethod"]
