"""The ways to prefill, by name. A method is a layout and an attention that is called in every layer."""

from .apbv import ApbvMethod
from .base import PrefillMethod
from .full import FullMethod

METHODS: dict[str, type[PrefillMethod]] = {method.name: method for method in (ApbvMethod, FullMethod)}

__all__ = ["METHODS", "PrefillMethod"]
