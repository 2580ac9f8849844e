"""This module defines drafters, which propose tokens for the target to verify. They run on host 0.

A drafter is not told which of its tokens were accepted: it is given all tokens so far, keeps the KV that it has
already computed for them, and rolls the rest back. So no second record of the accepted tokens can be wrong. Only a
:class:`Learner` is also given the target's logits for the new tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import SamplingConfig
from ..decode.runner import ModelRunner
from ..decode.sampling import PURPOSE_DRAFT, Choice, choose_tokens
from ..decode.step import NewTokens
from ..kv.growing import appending_in_place, replace_last
from ..model.attention import ChosenKV
from ..model.parts import ModelParts
from .draft_kv import prune_prompt

# Returns the target's KV of the last so many tokens; see Decoder.newest_kv.
NewestKV = Callable[[int], Sequence[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Proposal:
    """A Proposal is a window of drafted tokens.

    Attributes:
        tokens: at most as many tokens as were asked for.
        q: ``[len(tokens), Vq]`` in fp64, on whatever device, the distributions the tokens were drawn from; None if
            they were not drawn.
    """

    tokens: list[int]
    q: Tensor | None = None


def pack_tokens(tokens: Sequence[int], most: int) -> list[int]:
    """Encode at most ``most`` tokens as a message of ``1 + most`` numbers: their count, the tokens, and zeros."""
    return [len(tokens), *tokens, *[0] * (most - len(tokens))]


def unpack_tokens(numbers: Sequence[int]) -> list[int]:
    """Decode the tokens of a message of :func:`pack_tokens`."""
    count, *tokens = numbers
    return tokens[:count]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


class VerifiedKV:
    """A VerifiedKV replaces a draft's KV of verified tokens by the target's, which attended to the whole prompt.

    Only for a draft that is the target itself on less of the prompt (STD: dense KV takes the place of sparse).

    Args:
        newest_kv: returns the target's KV of the last so many tokens; see
            :meth:`apbv.decode.decoder.Decoder.newest_kv`.
    """

    def __init__(self, newest_kv: NewestKV):
        self._newest_kv, self._num_replaced = newest_kv, 0

    def put_into(self, cache: DynamicCache, num_cached: int, verified: Sequence[int]) -> list[int]:
        """Let the draft's cache end with the target's KV of all verified new tokens.

        Args:
            num_cached: how many new tokens the cache holds; all of them are verified.
            verified: all new tokens whose KV the target has.

        Returns:
            The new tokens that the cache holds then.
        """
        already = self._num_replaced
        replace_last(cache, num_cached - already, self._newest_kv(len(verified) - already))
        self._num_replaced = len(verified)
        return list(verified)


class Drafter(Protocol):
    """A Drafter proposes how a sequence goes on."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Draft at most ``count`` tokens that follow all the new ``tokens`` (at least one) since the prompt.

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite; then the draft is useless for this prompt.
        """


@runtime_checkable
class Learner(Drafter, Protocol):
    """A Learner is a drafter that adapts to the target while it drafts; only where both take turns."""

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Learn from the S tokens that a round has added, and the target's logits ``[S, V]``.

        The first new token, which the prefill chose, is never among them.
        """


class ModelDrafter:
    """A ModelDrafter drafts autoregressively with a language model, on top of its own KV of the prompt.

    Args:
        parts: the model; it may be the target itself on a smaller KV.
        cache: plain transformers cache of the prompt. New tokens are appended and rolled back; the prompt's KV
            stays.
        next_position: rotary position of the first new token, which may exceed the number of cached tokens.
        prompt_len: n, on which random numbers depend.
        config: how tokens are drawn.
        vocab_size: only tokens below it are drafted: the target has no others. The draft reads the target's tokens
            beyond its own vocabulary as token 0, which can cost acceptance, but keeps decoding lossless.
        prompt_kv: the KV of a prompt that is not in the cache, which then starts empty; None if it is.
    """

    def __init__(
        self,
        parts: ModelParts,
        cache: DynamicCache,
        next_position: int,
        prompt_len: int,
        config: SamplingConfig,
        vocab_size: int,
        prompt_kv: ChosenKV | None = None,
    ):
        self._parts, self._position = parts, next_position
        self._prompt_kv = prompt_kv
        self._continue(cache)
        self._prompt_len, self._config, self._vocab_size = prompt_len, config, vocab_size
        self._cached: list[int] = []  # the new tokens whose KV the cache holds
        self._num_cached = 0  # their number, also while a window is drafted whose tokens are not read yet
        self._verified_kv: VerifiedKV | None = None

    def take_target_kv(self, newest_kv: NewestKV) -> None:
        """Replace this drafter's KV of verified tokens by the target's from now on; see :class:`VerifiedKV`."""
        self._verified_kv = VerifiedKV(newest_kv)

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        missing = self._roll_back(tokens)
        choices, rows = [], []
        for _ in range(count):
            choice, row = self._next(missing)
            choices.append(choice)
            rows += [] if row is None else [row]
            missing = choice.tokens  # which the host does not know yet
        drafted = Choice.read_all(choices) if choices else []
        self._cached = [*tokens, *drafted][: self._num_cached]
        return Proposal(drafted, torch.cat(rows) if rows else None)

    def stream(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Yield drafted tokens, each with the distribution ``[Vq]`` it was drawn from, or None where greedy."""
        sequence, missing = list(tokens), self._roll_back(tokens)
        while True:
            choice, row = self._next(missing)
            self._cached = sequence[: self._num_cached]
            missing = choice.read()
            sequence += missing
            yield missing[0], None if row is None else row[0]

    def prune_prompt(self, rows: Tensor) -> None:
        """Drop all of the prompt's KV but these rows, ``[T]`` ascending; the new tokens' KV stays.

        Raises:
            ValueError: the prompt is not in the cache.
        """
        if self._prompt_kv is not None:
            raise ValueError("this drafter's cache does not hold the prompt, so that its KV cannot be pruned")
        self._continue(prune_prompt(self._cache, rows, self._num_cached))

    def _continue(self, cache: DynamicCache) -> None:
        """Go on with this cache."""
        self._cache = appending_in_place(cache)
        self._runner = ModelRunner(self._parts, self._cache, prompt=self._prompt_kv)

    def _next(self, missing: Sequence[int] | Tensor) -> tuple[Choice, Tensor | None]:
        """Run tokens that the cache lacks, and choose the one behind them; see :func:`choose_tokens`."""
        if not isinstance(missing, Tensor):
            missing = [token if token < self._parts.vocab_size else 0 for token in missing]
        logits = self._run(missing)
        self._num_cached += len(missing)
        return self._choose(logits, self._prompt_len + self._num_cached)

    def _run(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run the model on these tokens, cache their KV, and return the logits ``[1, Vq]`` after the last."""
        new = NewTokens(tokens, self._position + self._num_cached)
        return self._runner.run(new, last_only=True)[:, : self._vocab_size]

    def _choose(self, logits: Tensor, index: int) -> tuple[Choice, Tensor | None]:
        return choose_tokens(logits, self._config, [index], PURPOSE_DRAFT)

    def _roll_back(self, tokens: Sequence[int]) -> list[int]:
        """Roll back what was rejected, and at least the last token, whose logits are wanted.

        Returns:
            The tokens that the cache lacks then.
        """
        common = common_length(self._cached, tokens[:-1])
        if common < len(self._cached):
            self._cache.crop(common - len(self._cached))
            del self._cached[common:]
        if self._verified_kv is not None:
            self._cached = self._verified_kv.put_into(self._cache, common, tokens[:-1])
        self._num_cached = len(self._cached)
        return list(tokens[self._num_cached :])


class NgramDrafter:
    """An NgramDrafter drafts what followed the last tokens where they occurred before (prompt lookup).

    Args:
        prompt: the prompt's token ids.
        longest: the number of tokens that are matched first; then fewer.
    """

    def __init__(self, prompt: Sequence[int], longest: int = 3):
        self._prompt, self._longest = list(prompt), longest
        self._followed: dict[tuple[int, ...], int] = {}  # n-gram: the end of its latest occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        sequence = [*self._prompt, *tokens]
        # Verified tokens are never rolled back, so the index stays valid. The last token has no successor yet.
        for end in range(self._indexed + 1, len(sequence)):
            for length in range(1, min(self._longest, end) + 1):
                self._followed[tuple(sequence[end - length : end])] = end
        self._indexed = len(sequence) - 1
        for length in range(min(self._longest, len(sequence)), 0, -1):
            end = self._followed.get(tuple(sequence[-length:]))
            if end is not None:
                return Proposal(sequence[end : end + count])
        return Proposal([])
