"""Triton's interpreter, without what it does anew at every launch.

Before each launch it looks through Triton's language for functions to replace, and afterwards puts
them back: more work than most kernels of a test. In a process that only interprets, they may stay
replaced.
"""

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

_replace_for = interpreter._patch_lang
_replaced: set[frozenset[str]] = set()


def _replace_once(function) -> SimpleNamespace:
    """Replace the language's functions, once for every set of modules through which kernels' files
    know them."""
    known = frozenset(
        each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core
    )
    if known not in _replaced:
        _replace_for(function)
        _replaced.add(known)
    return SimpleNamespace(restore=lambda: None)  # there is nothing to put back


def keep_replaced() -> None:
    """Let all launches of this process find the language's functions replaced."""
    interpreter._patch_lang = _replace_once
