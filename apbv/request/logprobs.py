"""Log probabilities of an answer's tokens and of their alternatives."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log probabilities of an answer's token and of the most probable alternatives.

    They are the model's own, before temperature, penalties and other sampling parameters.

    Attributes:
        logprob: the token's.
        top: the most probable tokens in descending order, each with its own.
    """

    logprob: float
    top: list[tuple[int, float]]

    @classmethod
    def unpack(cls, numbers: Sequence[float]) -> "TokenLogprobs":
        """Read a row of :func:`log_probabilities`."""
        own, *top = numbers
        half = len(top) // 2
        return cls(own, list(zip(map(int, top[:half]), top[half:], strict=True)))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return log-probabilities of tokens ``[S]``, and the ``count`` highest in their places.

    Args:
        logits: ``[S, V]``.

    Returns:
        ``[S, 1 + 2 count]`` in fp64: each token's own, the most probable tokens in descending
        order, and theirs.
    """
    logs = logits.double().log_softmax(dim=-1)
    best = logs.topk(min(count, logs.shape[-1]), dim=-1)
    return torch.cat([logs.gather(-1, tokens[:, None]), best.indices.double(), best.values], dim=-1)
