"""From logits to a token. Random numbers are a function of (seed, position, purpose), never of history."""

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig

# What a random number is for. Each is used for one decision only.
PURPOSE_NEXT_TOKEN, PURPOSE_DRAFT, PURPOSE_ACCEPT = range(3)


class NotFiniteError(ValueError):
    """A model's logits are NaN or infinite: there is no token to choose by them."""

    def __init__(self) -> None:
        super().__init__("NaN or infinite logits")


def uniform(seed: int, position: int, purpose: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (Philox counter-based generator)."""
    bits = np.random.Philox(key=seed, counter=[0, 0, purpose, position])
    return float(np.random.Generator(bits).random())


def probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution that is sampled from.

    Args:
        logits: ``[..., V]``.
        temperature: > 0.
        top_p: the smallest set of most probable tokens whose probabilities sum to at least top_p is kept.

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
    """For each row of ``[T, V]`` the first of the most probable tokens, and whether there is one.

    There is none where a logit is NaN or +inf, or all are -inf. The device is waited for once.
    """
    best = logits.argmax(dim=-1)  # NaN counts as the largest number
    is_finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
    tokens, are_finite = torch.stack([best, is_finite.long()]).tolist()
    return tokens, [bool(finite) for finite in are_finite]


def most_probable(logits: Tensor) -> int:
    """The first of the most probable tokens by logits ``[V]``, of which some, but not all, may be -inf.

    Raises:
        NotFiniteError: there is none.
    """
    (token,), (is_finite,) = most_probable_of_rows(logits[None])
    if not is_finite:
        raise NotFiniteError
    return token


def require_distribution(p: Tensor) -> Tensor:
    """One row ``[V]`` of what :func:`probabilities` returned, unless it is NaN.

    Raises:
        NotFiniteError: it is, which all of a row are if one is.
    """
    if p[0].isnan():
        raise NotFiniteError
    return p


def draw(weights: Tensor, number: float) -> int:
    """The token at which the running sum of weights ``[V]``, which need not sum to 1, passes ``number`` of it."""
    cumulative = weights.cumsum(dim=-1)
    return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))


def sample(logits: Tensor, config: SamplingConfig, position: int) -> int:
    """The next token from logits ``[V]``: the most probable one at temperature 0, else drawn.

    Raises:
        NotFiniteError: the logits are NaN or infinite.
    """
    if config.temperature == 0:
        return most_probable(logits)
    p = require_distribution(probabilities(logits, config.temperature, config.top_p))
    return draw(p, uniform(config.seed, position, PURPOSE_NEXT_TOKEN))
