"""Constrained decoding by a JSON schema or a grammar, with llguidance (an extra)."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .schemas import prepared
from .transfer import to_device
from .warn import raised_as

# JSON as models write it on one line; where blanks are free, a weak model writes nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_SCHEMA_CHARS = 2**16  # one of this length takes half a second to compile


class Grammar:
    """Tracks one answer and masks the tokens that the schema or grammar does not allow next.

    Args:
        matcher: llguidance's ``LLMatcher``.
    """

    def __init__(self, matcher):
        self._matcher = matcher

    def copy(self) -> "Grammar":
        """Return an independent copy in the same state."""
        return Grammar(self._matcher.deep_copy())

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits ``[1, V]`` for the next token, -inf for tokens that are not allowed.

        Raises:
            RuntimeError: the grammar takes too long to follow.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot be followed: {self._matcher.get_error():.200}")
        may_come = torch.from_numpy(np.unpackbits(mask, count=logits.shape[1], bitorder="little"))
        return logits.masked_fill(to_device(may_come == 0, logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)


def quoted(text: str) -> str:
    """Return a text as a string of JSON, and of llguidance's grammars."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Return the right side of a grammar's rule for JSON that follows a schema.

    Raises:
        ValueError: as of :func:`apbv.schemas.prepared`.
    """
    ready = prepared(json.dumps(schema))
    return f"%json {json.dumps({**ready, 'x-guidance': _SPACING})}"


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: how many logits the model has.
        eos_token_ids: tokens that are allowed once an answer is complete.

    Raises:
        ValueError: llguidance is not installed, or does not know this kind of tokenizer.
    """

    def __init__(self, tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        try:
            from llguidance import hf
        except ImportError as error:
            raise ValueError("JSON schemas need llguidance: pip install 'apbv[json]'") from error
        self._tokenizer = hf.from_tokenizer(tokenizer, vocab_size, list(eos_token_ids) or None)

    def begin(self, json_schema: str | None, grammar: str | None = None) -> Grammar:
        """Compile a schema, or a grammar instead, for an answer that has no tokens yet.

        Raises:
            ValueError: it is invalid, too long, or uses unsupported features.
        """
        from llguidance import LLMatcher

        what, given = ("JSON schema", json_schema) if grammar is None else ("grammar", grammar)
        if len(given) > _MAX_SCHEMA_CHARS:
            raise ValueError(f"a {what} may have at most {_MAX_SCHEMA_CHARS} characters")
        with raised_as(ValueError, f"not a valid {what}", ValueError, RecursionError):
            if grammar is None:
                given = LLMatcher.grammar_from_json_schema(json.dumps(prepared(given)), defaults=_SPACING)
            else:
                given = LLMatcher.grammar_from_lark(given)
            matcher = LLMatcher(self._tokenizer, given)
        if matcher.is_error():
            raise ValueError(f"this {what} is not supported: {matcher.get_error():.200}")
        return Grammar(matcher)
