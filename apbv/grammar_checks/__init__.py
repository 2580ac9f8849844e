"""Checks of JSON schemas and grammars, in a process that limits of time and memory can end."""

from .checks import GrammarCheckError, GrammarChecks, GrammarChecksBusyError

__all__ = ["GrammarCheckError", "GrammarChecks", "GrammarChecksBusyError"]
