"""Constrained decoding by a JSON schema or a grammar, with llguidance (an extra)."""

import json
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..compat.versions import how_to_install
from ..device.copies import to_device
from ..errors import BackendUnavailableError, InvalidRequestError
from ..reporting import raised_as
from .checks import GrammarChecks
from .schemas import prepared

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON as models write it on one line; where blanks are free, a weak model writes nothing else.
_SPACING: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_MAX_SCHEMA_CHARS = 2**16  # one of this length takes half a second to compile


class Grammar:
    """Follows one answer, and masks the tokens that its schema or grammar does not allow next.

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
            reason = self._matcher.get_error().partition("\n")[0]  # without the parser's state
            raise RuntimeError(
                f"the answer cannot follow its JSON schema or grammar any further: {reason:.200}"
            )
        bits = np.unpackbits(mask, count=logits.shape[1], bitorder="little")
        is_forbidden = torch.from_numpy(bits) == 0
        return logits.masked_fill(to_device(is_forbidden, logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)


def quoted(text: str) -> str:
    """Return a text as a string of JSON, and of llguidance's grammars."""
    return json.dumps(text, ensure_ascii=False)


def tag_rule(tag: str, added_tokens: Mapping[str, int]) -> str:
    """Return a tag in a grammar: its token, or its text."""
    if tag in added_tokens:
        return f"<[{added_tokens[tag]}]>"
    return quoted(tag) if tag else ""


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Return the right side of a grammar's rule for JSON that follows a schema.

    Raises:
        InvalidRequestError: it is not a schema, allows no value, or has references that lead back
            to themselves without an end.
        RecursionError: it is too deep.
    """
    rule_schema = {**prepared(json.dumps(schema)), "x-guidance": _SPACING}
    return f"%json {json.dumps(rule_schema)}"


class Grammars:
    """Compiles grammars for one model.

    Another process (:mod:`.checks`) finds grammars that would take seconds or much memory
    to compile; they are never compiled in this one.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: the number of the model's logits.
        eos_token_ids: tokens that are allowed once an answer is complete.

    Raises:
        InvalidRequestError: llguidance is not installed, or does not know this kind of tokenizer.

    Attributes:
        checks: looks at grammars before they are compiled.
    """

    def __init__(self, tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        try:
            from llguidance import hf
        except ImportError as error:
            raise BackendUnavailableError(
                f"JSON schemas need llguidance: {how_to_install('json')}"
            ) from error
        eos_tokens = list(eos_token_ids) or tokenizer.eos_token_id
        self._tokenizer = hf.from_tokenizer(tokenizer, vocab_size, eos_tokens)
        # Changed like hf.from_tokenizer does before it uses the tokenizer.
        backend_tokenizer = copy(tokenizer.backend_tokenizer)
        backend_tokenizer.no_padding()
        backend_tokenizer.no_truncation()
        self.checks = GrammarChecks(backend_tokenizer.to_str(), vocab_size, eos_tokens)

    def begin(self, json_schema: str | None, grammar: str | None = None) -> Grammar:
        """Check and compile a schema, or a grammar instead, for a new answer.

        Raises:
            InvalidRequestError: it is invalid, too long, too complex, or uses unsupported features.
            GrammarCheckError: it could not be checked.
        """
        self.check(json_schema, grammar)
        return self.compile(json_schema, grammar)

    def check(
        self,
        json_schema: str | None,
        grammar: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reject a schema, or a grammar instead, that answers cannot follow.

        Args:
            is_wanted: called several times a second; if it returns false, the check ends.

        Raises:
            InvalidRequestError: it is invalid, too long, too complex, or uses unsupported features.
            GrammarCheckError: it could not be checked.
        """
        reason = self.checks.reason_against(_for_matcher(json_schema, grammar), is_wanted)
        if reason:
            raise InvalidRequestError(f"this {_kind(grammar)} {reason}")

    def compile(self, json_schema: str | None, grammar: str | None = None) -> Grammar:
        """Compile a schema, or a grammar instead, that :meth:`check` accepted on any host.

        Raises:
            InvalidRequestError: it is not supported.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, _for_matcher(json_schema, grammar), log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(
                f"this {_kind(grammar)} is not supported: {matcher.get_error():.200}"
            )
        return Grammar(matcher)


def _kind(grammar: str | None) -> str:
    return "JSON schema" if grammar is None else "grammar"


def _for_matcher(json_schema: str | None, grammar: str | None) -> str:
    """Return a schema, or a grammar instead, in the form that llguidance's ``LLMatcher`` takes.

    Raises:
        InvalidRequestError: it is too long, or not JSON.
    """
    from llguidance import LLMatcher

    kind = _kind(grammar)
    text = json_schema if grammar is None else grammar
    assert text is not None, "a schema is given, or a grammar"
    if len(text) > _MAX_SCHEMA_CHARS:
        raise InvalidRequestError(f"a {kind} may have at most {_MAX_SCHEMA_CHARS} characters")
    with raised_as(InvalidRequestError, f"not a valid {kind}", ValueError, RecursionError):
        if grammar is not None:
            return LLMatcher.grammar_from_lark(text)
        schema = json.dumps(prepared(text))
        return LLMatcher.grammar_from_json_schema(schema, defaults=_SPACING)
