"""Warnings that point at the line of the caller's that led to them."""

import sys
import warnings

# Behind a decorator or a context manager the stack has a frame of theirs.
_PASSED_THROUGH = ("torch.utils._contextlib", "contextlib")


def warn_caller(message: str) -> None:
    """Warn as from the innermost line outside this package; Python shows a line's warning once."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "apbv" or module in _PASSED_THROUGH
