"""Who proposes tokens for the target to verify. A drafter lives on host 0.

No drafter is told what became of its proposals: it is given all tokens so far, keeps what it has already computed
of them, and drops the rest. So there is no second account of what was accepted that could be wrong. A
:class:`Learner` is told besides what the target thought of the tokens that stand.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import SamplingConfig
from ..decode.decoder import run_language_model
from ..decode.sampling import PURPOSE_DRAFT, draw, most_probable, probabilities, require_distribution, uniform
from ..kv.cache import appending_in_place, replace_last
from ..model.attention import LayerAttention
from ..model.parts import ModelParts
from .draft_kv import forget_prompt

# The target's KV of so many new tokens, the last that are verified; see Decoder.newest_kv.
NewestKV = Callable[[int], Sequence[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Attributes:
        tokens: as many as were asked for, or fewer.
        q: ``[len(tokens), Vq]`` in fp64, the distributions they were drawn from; None where they were not drawn.
    """

    tokens: list[int]
    q: Tensor | None = None


def packed(tokens: Sequence[int], most: int) -> list[int]:
    """At most so many tokens as ``1 + most`` numbers, which is how they travel: their count, they, and zeros."""
    return [len(tokens), *tokens, *[0] * (most - len(tokens))]


def unpacked(numbers: Sequence[int]) -> list[int]:
    """The tokens out of what :func:`packed` made."""
    count, *tokens = numbers
    return tokens[:count]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


class Drafter(Protocol):
    """Proposes how a sequence goes on."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """At most ``count`` tokens to follow all the new ``tokens`` (at least one) since the prompt.

        Raises:
            NotFiniteError: the draft's logits are NaN or infinite: it is of no use for this prompt.
        """


@runtime_checkable
class Learner(Drafter, Protocol):
    """A drafter that adapts to the target while it drafts; only where both take turns."""

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """What a round of verification has added to the sequence, and the target's logits for each, ``[S, V]``.

        The first new token, which the prefill chose, is not among them.
        """


class ModelDrafter:
    """A language model, autoregressively, from a cache that holds the prompt as this drafter sees it.

    Args:
        parts: the model; it may be the target itself on a smaller KV.
        cache: plain transformers cache of the prompt. It grows and shrinks, and what it held at first stays.
        next_position: rotary position of the first new token: a cache slot is not a position.
        prompt_len: n, on which random numbers depend.
        config: how tokens are drawn.
        vocab_size: only tokens below it are drafted: the target has no others. What it says beyond the draft's own
            vocabulary the draft reads as token 0, which can make its proposals worse, but not wrong.
        attention: by which it sees a prompt that is not in the cache, which is then empty at first; None: it is.
    """

    def __init__(
        self,
        parts: ModelParts,
        cache: DynamicCache,
        next_position: int,
        prompt_len: int,
        config: SamplingConfig,
        vocab_size: int,
        attention: LayerAttention | None = None,
    ):
        self._parts, self._position, self._attention = parts, next_position, attention
        self._cache = appending_in_place(cache)
        self._prompt_len, self._config, self._vocab_size = prompt_len, config, vocab_size
        self._cached: list[int] = []  # the new tokens whose KV the cache holds
        self._newest_kv: NewestKV | None = None
        self._num_verified = 0  # so many of them with the target's KV

    def follow(self, newest_kv: NewestKV) -> None:
        """The target's KV of verified tokens will replace this drafter's own, which saw less of the prompt.

        Only for a drafter that is the target itself (STD: dense KV takes the place of sparse).
        """
        self._newest_kv = newest_kv

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        drafted = list(itertools.islice(self.stream(tokens), count))
        rows = [row for _, row in drafted if row is not None]
        return Proposal([token for token, _ in drafted], torch.stack(rows) if rows else None)

    def stream(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor | None]]:
        """One token after the other, each with the distribution ``[Vq]`` that it was drawn from, if it was."""
        self._keep_common(tokens)
        sequence = list(tokens)
        while True:
            missing = sequence[len(self._cached) :]
            logits = self._run([token if token < self._parts.vocab_size else 0 for token in missing])
            self._cached += missing
            token, row = self._choose(logits, self._prompt_len + len(self._cached))
            sequence.append(token)
            yield token, row

    def forget_prompt(self, kept: Tensor) -> None:
        """Keep of the prompt's KV only these rows, ``[T]``, ascending; new tokens' stay.

        Raises:
            ValueError: the prompt is not in the cache.
        """
        if self._attention is not None:
            raise ValueError("this drafter's cache does not hold the prompt: there is nothing of it to forget")
        self._cache = appending_in_place(forget_prompt(self._cache, kept, len(self._cached)))

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[Vq]`` of what follows these tokens, which go into the cache."""
        position = self._position + len(self._cached)
        logits = run_language_model(self._parts, tokens, position, self._cache, self._attention, last_only=True)
        return logits[-1, : self._vocab_size]

    def _choose(self, logits: Tensor, index: int) -> tuple[int, Tensor | None]:
        if self._config.temperature == 0:
            return most_probable(logits), None
        row = require_distribution(probabilities(logits, self._config.temperature, self._config.top_p))
        return draw(row, uniform(self._config.seed, index, PURPOSE_DRAFT)), row

    def _keep_common(self, tokens: Sequence[int]) -> None:
        """Forget what was rejected, and at least the last token, whose logits are wanted."""
        common = common_length(self._cached, tokens[:-1])
        if common < len(self._cached):
            self._cache.crop(common - len(self._cached))
            del self._cached[common:]
        if self._newest_kv is not None:
            verified, known = list(tokens[:-1]), self._num_verified
            replace_last(self._cache, common - known, self._newest_kv(len(verified) - known))
            self._cached, self._num_verified = verified, len(verified)


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens where they occurred before. No model runs.

    Args:
        prompt: the prompt's token ids.
        longest: try to match so many tokens first, then fewer.
    """

    def __init__(self, prompt: Sequence[int], longest: int = 3):
        self._prompt, self._longest = list(prompt), longest
        self._followed: dict[tuple[int, ...], int] = {}  # where the latest occurrence of a few tokens ended
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        sequence = [*self._prompt, *tokens]
        # Tokens are never taken back: what was indexed stays. The end of the sequence is followed by nothing yet.
        for end in range(self._indexed + 1, len(sequence)):
            for length in range(1, min(self._longest, end) + 1):
                self._followed[tuple(sequence[end - length : end])] = end
        self._indexed = len(sequence) - 1
        for length in range(min(self._longest, len(sequence)), 0, -1):
            end = self._followed.get(tuple(sequence[-length:]))
            if end is not None:
                return Proposal(sequence[end : end + count])
        return Proposal([])
