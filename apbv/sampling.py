"""From logits to a token. Random numbers are a function of (seed, position, purpose), never of history."""

import numpy as np
import torch
from torch import Tensor

from .config import SamplingConfig

# What a random number is for. Each is used for one decision only.
PURPOSE_NEXT_TOKEN, PURPOSE_DRAFT, PURPOSE_ACCEPT = range(3)


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
        ``[..., V]`` in fp64 on the CPU, summing to 1.
    """
    p = torch.softmax(logits.detach().double().cpu() / temperature, dim=-1)
    if top_p < 1.0:
        ordered, order = p.sort(descending=True, stable=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def draw(weights: Tensor, number: float) -> int:
    """The token at which the running sum of weights ``[V]``, which need not sum to 1, passes ``number`` of it."""
    cumulative = weights.cumsum(dim=-1)
    return int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))


def sample(logits: Tensor, config: SamplingConfig, position: int) -> int:
    """The next token from logits ``[V]``: the most probable one at temperature 0, else drawn."""
    if config.temperature == 0:
        return int(logits.argmax())
    p = probabilities(logits, config.temperature, config.top_p)
    return draw(p, uniform(config.seed, position, PURPOSE_NEXT_TOKEN))
