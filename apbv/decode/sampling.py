"""This module samples tokens from logits. Random numbers depend on (seed, position, purpose), not on history."""

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig

# The purpose of a random number: each number is used for one decision only.
PURPOSE_NEXT_TOKEN, PURPOSE_DRAFT, PURPOSE_ACCEPT = range(3)


class NotFiniteError(ValueError):
    """A NotFiniteError says that a model's logits are NaN or infinite, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__("NaN or infinite logits")


def uniform(seed: int, position: int, purpose: int) -> float:
    """Return a number in [0, 1) that depends on the arguments only (Philox counter-based generator)."""
    bits = np.random.Philox(key=seed, counter=[0, 0, purpose, position])
    return float(np.random.Generator(bits).random())


def probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the distribution that tokens are sampled from: softmax at a temperature, cut by top-p.

    Args:
        logits: ``[..., V]``.
        temperature: > 0.
        top_p: only the smallest set of most probable tokens whose probabilities sum to at least top_p remains.

    Returns:
        ``[..., V]`` in fp64 on the CPU, summing to 1; a row is NaN whose logits are NaN, +inf, or all -inf.
    """
    p = torch.softmax(logits.detach().double().cpu() / temperature, dim=-1)
    if top_p < 1.0:
        ordered, order = p.sort(descending=True, stable=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def most_probable_of_rows(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Return for each row of ``[T, V]`` the first most probable token, and whether the row has one.

    A row has none where a logit is NaN or +inf, or all are -inf. The device is waited for once.
    """
    best = logits.argmax(dim=-1)  # NaN counts as the largest number
    is_finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
    tokens, are_finite = torch.stack([best, is_finite.long()]).tolist()
    return tokens, [bool(finite) for finite in are_finite]


def most_probable(logits: Tensor) -> int:
    """Return the first most probable token by logits ``[V]``, of which some, but not all, may be -inf.

    Raises:
        NotFiniteError: a logit is NaN or +inf, or all are -inf.
    """
    (token,), (is_finite,) = most_probable_of_rows(logits[None])
    if not is_finite:
        raise NotFiniteError
    return token


def require_distribution(p: Tensor) -> Tensor:
    """Return one row ``[V]`` of :func:`probabilities`, unless it is NaN.

    Raises:
        NotFiniteError: the row is NaN; then all of its entries are.
    """
    if p[0].isnan():
        raise NotFiniteError
    return p


def draw(weights: Tensor, number: float) -> int:
    """Draw a token in proportion to weights ``[V]``, which need not sum to 1, by a number in [0, 1)."""
    cumulative = weights.cumsum(dim=-1)
    return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))


def sample(logits: Tensor, config: SamplingConfig, position: int) -> int:
    """Choose the next token from logits ``[V]``: the most probable one at temperature 0, else a drawn one.

    Raises:
        NotFiniteError: the logits are NaN or infinite.
    """
    if config.temperature == 0:
        return most_probable(logits)
    p = require_distribution(probabilities(logits, config.temperature, config.top_p))
    return draw(p, uniform(config.seed, position, PURPOSE_NEXT_TOKEN))
