"""Samples tokens from logits. Random numbers depend on (seed, position, purpose), not on history.

Tokens are chosen on the logits' device and copied to the CPU together, with a single
synchronization.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingParams
from ..device.copies import fetch, to_device
from ..pending import Pending

# The purpose of a random number: each number is used for one decision only.
PURPOSE_NEXT_TOKEN, PURPOSE_DRAFT, PURPOSE_ACCEPT = range(3)


class NotFiniteError(ValueError):
    """Raised if a model's logits are NaN or infinite, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__("NaN or infinite logits")


class Choice(NamedTuple):
    """Tokens for R rows of logits, chosen on their device.

    Attributes:
        tokens: int64 ``[R]`` on the device; any token of the vocabulary for a row that has none to
            choose.
        are_finite: bool ``[R]``: which rows have one.
    """

    tokens: Tensor
    are_finite: Tensor

    @classmethod
    def joined(cls, choices: Sequence["Choice"]) -> "Choice":
        """Concatenate the rows of several choices."""
        return cls(*map(torch.cat, zip(*choices, strict=True)))

    def fetch(
        self, wait: Callable[[torch.cuda.Event], None] | None = None
    ) -> Pending[list[list[int]]]:
        """Start to copy to the CPU the tokens, and for each whether its row has one.

        Args:
            wait: as of :func:`apbv.device.copies.fetch`.
        """
        return fetch(torch.stack([self.tokens, self.are_finite.long()]), wait)

    def read(self) -> list[int]:
        """Wait for the tokens, and return them.

        Raises:
            NotFiniteError: a row has no token.
        """
        tokens, are_finite = self.fetch().wait()
        if not all(are_finite):
            raise NotFiniteError
        return tokens


def uniform(seed: int, position: int, purpose: int) -> float:
    """Return a number in [0, 1) that depends on the arguments only.

    The generator is Philox, which is counter-based.
    """
    bits = np.random.Philox(key=seed, counter=[0, 0, purpose, position])
    return float(np.random.Generator(bits).random())


def probabilities(
    logits: Tensor, temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """Return the distribution that tokens are sampled from.

    It is the softmax at a temperature, cut by the three other settings.

    Args:
        logits: ``[..., V]``.
        temperature: > 0.
        top_p: only the smallest set of most probable tokens whose probabilities sum to at least
            top_p remains; of equally probable ones the first.
        top_k: only the k most probable ones remain, and those that tie with the last of them; 0:
            all.
        min_p: only those of at least this times the highest probability remain.

    Returns:
        ``[..., V]`` in fp64 on the logits' device, summing to 1; a row is NaN whose logits are NaN,
        +inf, or all -inf.
    """
    p = torch.softmax(logits.detach().double() / temperature, dim=-1)
    if min_p > 0.0:
        p = p.where(p >= min_p * p.amax(dim=-1, keepdim=True), p.new_zeros(()))
    if 0 < top_k < p.shape[-1]:
        p = p.where(
            p >= p.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True),
            p.new_zeros(()),
        )
    if min_p > 0.0 or top_k:
        p = p / p.sum(dim=-1, keepdim=True)
    if top_p < 1.0:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        is_beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(is_beyond, 0.0))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def most_probable(logits: Tensor) -> Choice:
    """Choose for each row of ``[R, V]`` the first most probable token.

    A row has none where a logit is NaN or +inf, or all are -inf; some may be -inf.
    """
    best = logits.argmax(dim=-1)  # NaN counts as the largest number
    return Choice(best, logits.gather(-1, best[:, None])[:, 0].isfinite())


def draw(weights: Tensor, numbers: Sequence[float] | Tensor) -> Choice:
    """Draw a token for each row of weights ``[R, V]``.

    Its probability is proportional to its weight. Every row has a number in [0, 1) to draw by.

    The weights need not sum to 1; a row has no token where they are NaN.
    """
    cumulative = weights.cumsum(dim=-1)
    numbers = to_device(numbers, weights.device, weights.dtype)
    places = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # Only NaN is found after the last token.
    return Choice(places.clamp(max=weights.shape[-1] - 1), ~cumulative[:, -1].isnan())


def choose_each(
    logits: Tensor,
    configs: Sequence[SamplingParams],
    positions: Sequence[int],
    purpose: int = PURPOSE_NEXT_TOKEN,
) -> tuple[Choice, list[Tensor | None]]:
    """Choose a token for each row of logits ``[R, V]``.

    At temperature 0 it is the most probable one, else it is drawn.

    Args:
        configs: one for each row.
        positions: each token's index in its own sequence.

    Returns:
        The tokens, and for each the distribution ``[V]`` that it was drawn from; None if it was not
        drawn.
    """
    alike: dict[tuple, list[int]] = {}
    for row, config in enumerate(configs):
        alike.setdefault(config.cuts, []).append(row)
    choices = []
    drawn_from: list[Tensor | None] = [None] * len(configs)
    for cuts, rows in alike.items():
        chosen_from = logits if len(alike) == 1 else logits[to_device(rows, logits.device)]
        if cuts[0] == 0:
            choices.append(most_probable(chosen_from))
            continue
        p = probabilities(chosen_from, *cuts)
        numbers = [uniform(configs[row].seed, positions[row], purpose) for row in rows]
        choices.append(draw(p, numbers))
        for row, distribution in zip(rows, p, strict=True):
            drawn_from[row] = distribution
    if len(choices) == 1:
        return choices[0], drawn_from
    order = [row for rows in alike.values() for row in rows]
    places = to_device([order.index(row) for row in range(len(order))], logits.device)
    return Choice(*(each[places] for each in Choice.joined(choices))), drawn_from


def forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return logits ``[R, V]`` with these tokens masked in these rows; the others are unchanged."""
    places = to_device(rows, logits.device)[:, None]
    columns = to_device([token for token in tokens if token < logits.shape[1]], logits.device)
    return logits.index_put((places, columns), logits.new_full((), -torch.inf))


class Penalties:
    """The penalties of one answer: repetition, presence and frequency penalty.

    Args:
        prompt_ids: int64 ``[n]``.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(
        self, config: SamplingParams, prompt_ids: Tensor, vocab_size: int, device: torch.device
    ):
        self._config = config
        # Placeholders may exceed V.
        is_in_prompt = prompt_ids.bincount(minlength=vocab_size)[:vocab_size] > 0
        self._is_in_prompt = to_device(is_in_prompt, device)

    def penalised(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        drafted: Tensor | Sequence[int] = (),
        precede: Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[S, V']`` with the penalties for earlier tokens, in fp32 at least.

        V' may be less than V, for a draft with a smaller vocabulary.

        Args:
            tokens: the answer so far.
            drafted: int64 ``[N]``, tokens that may follow it, which the CPU need not know yet.
            precede: bool ``[S, N]``: which of these come before each row's token; None: the last
                row's token comes after all, each row's before it after one less.
        """
        config = self._config
        num_rows, vocab_size = logits.shape
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        drafted = to_device(drafted, logits.device, torch.int64)
        if precede is None:
            precede = torch.ones(num_rows, len(drafted)).tril(len(drafted) - num_rows)
        # In the last column what a draft's vocabulary lacks.
        earlier = torch.cat([to_device(tokens, logits.device, torch.int64), drafted]).clamp(
            max=vocab_size
        )
        counted = to_device(
            torch.cat([precede.new_ones(num_rows, len(tokens)), precede], dim=1), logits.device
        )
        counts = logits.new_zeros(num_rows, vocab_size + 1)
        counts = counts.scatter_add_(1, earlier.expand(num_rows, -1), counted.to(logits))[
            :, :vocab_size
        ]
        is_in_prompt = self._is_in_prompt[:vocab_size]
        occurs = counts > 0
        if (factor := config.repetition_penalty) not in (None, 1):
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(occurs | is_in_prompt, scaled, logits)
        return logits - config.presence_penalty * occurs - config.frequency_penalty * counts


def biased(logits: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """Return logits ``[R, V]`` with a bias added to those of some tokens."""
    tokens, amounts = zip(*bias, strict=True)
    values = to_device(amounts, logits.device, logits.dtype).expand(len(logits), -1)
    return logits.index_add(1, to_device(tokens, logits.device, torch.int64), values)
