"""Warnings that point at the line of the caller's code that led to them."""

import sys
import warnings

# A decorator or a context manager adds a frame of its own module to the stack.
_PASSED_THROUGH = ("torch.utils._contextlib", "contextlib")


def warn_caller(message: str) -> None:
    """Warn as if the innermost line outside this package did; Python shows a line's warning once."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "apbv" or module in _PASSED_THROUGH
