"""Lossless verification of drafted tokens, as pure functions.

Speculative sampling (Leviathan et al.): a drafted x from q is accepted with probability min(1, p(x)
/ q(x)); the first rejected one is replaced by a draw from norm(max(0, p - q)). Whatever q is, the
output is distributed as p. At temperature 0 p is one-hot, and a token is accepted if it is the
argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SamplingParams
from ..decode.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_NEXT_TOKEN,
    NotFiniteError,
    draw,
    most_probable,
    probabilities,
    uniform,
)
from ..device.copies import to_device
from .drafters.drafters import Proposal


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a draft.

    Attributes:
        num_accepted: how many drafted tokens are accepted, from the first one on.
        next_token: the token after them: in place of the first rejected one, or, where all are
            accepted, a bonus; None if all are accepted and there are no logits for a bonus.
    """

    num_accepted: int
    next_token: int | None


def verify_window(
    proposal: Proposal, logits: Tensor, index: int, config: SamplingParams
) -> Verdict:
    """Verify a draft, whose first token has this index in the sequence.

    Args:
        proposal: γ drafted tokens.
        logits: the target's logits, ``[γ + 1, V]``, or ``[γ, V]`` for no bonus.

    Raises:
        NotFiniteError: a row is NaN or infinite; rows after a rejected token do not matter.
    """
    tokens = to_device(proposal.tokens, logits.device, torch.int64)
    return verdict_of(decide_window(tokens, proposal.q, logits, index, config), len(logits))


def verdict_of(decision: Tensor, num_rows: int) -> Verdict:
    """Wait for a decision of :func:`decide_window`.

    Args:
        num_rows: of the target's logits.

    Raises:
        NotFiniteError: the logits of the next token are NaN or infinite.
    """
    num_accepted, token, is_finite = decision.tolist()
    if not is_finite:
        raise NotFiniteError
    return Verdict(num_accepted, token if num_accepted < num_rows else None)


def decide_window(
    tokens: Tensor, q: Tensor | None, logits: Tensor, index: int, config: SamplingParams
) -> Tensor:
    """Verify a draft like :func:`verify_window`, on the logits' device without synchronization.

    Args:
        tokens: int64 ``[γ]`` on the device.
        q: see :class:`Proposal`.

    Returns:
        int64 ``[3]``: the number of accepted tokens, the next token, and 1 where the logits for it
        are finite. If all are accepted and there are no logits for a bonus, the next token has no
        meaning.
    """
    if config.is_greedy:
        return decide_greedy(tokens, logits)
    p = probabilities(logits, *config.cuts)
    places = range(index, index + len(p))
    accept_draws = [uniform(config.seed, place, PURPOSE_ACCEPT) for place in places]
    next_draws = [uniform(config.seed, place, PURPOSE_NEXT_TOKEN) for place in places]
    return decide_sampled(tokens, q, p, accept_draws, next_draws)


def decide_greedy(tokens: Tensor, logits: Tensor) -> Tensor:
    """Accept drafted tokens up to the first that is not the target's most probable one.

    Args:
        tokens: int64 ``[γ]``.
        logits: the target's, ``[γ + 1, V]``: row i is for the place of drafted token i, the last
            for the bonus. With γ rows there is no bonus.

    Returns:
        The decision, as :func:`decide_window` does.
    """
    best, are_finite = most_probable(logits)
    count = len(tokens)
    accepted = _num_true((tokens == best[:count]) & are_finite[:count])
    place = accepted.clamp(max=len(best) - 1)
    next_token = best.index_select(0, place)
    is_finite = are_finite.index_select(0, place).long()
    return torch.cat([accepted, next_token, is_finite])


def decide_sampled(
    tokens: Tensor,
    q: Tensor | None,
    p: Tensor,
    accept_draws: Sequence[float],
    next_draws: Sequence[float],
) -> Tensor:
    """Accept drafted tokens by speculative sampling, so that the output is distributed as p.

    Args:
        tokens: int64 ``[γ]``.
        q: ``[γ, Vq]``, the distributions they were *actually* drawn from; None for a one-hot q,
            where they were not drawn (a greedy draft, a lookup). A token whose row is NaN is
            rejected.
        p: ``[γ + 1, Vp]``, the target's, or ``[γ, Vp]`` for no bonus. Vp and Vq may differ: what
            one vocabulary lacks has probability 0.
        accept_draws: at least γ numbers in [0, 1), each used for this decision and nothing else.
        next_draws: a number in [0, 1) for every row of p, of which the one for the next token's
            place is used.

    Returns:
        The decision, as :func:`decide_window` does.
    """
    count = len(tokens)
    num_rows = len(p)
    device = p.device
    q = None if q is None else to_device(q, device)
    draws = to_device([*accept_draws[:count], *next_draws[:num_rows]], device, torch.float64)
    p_token = _probability(p[:count], tokens)
    q_token = 1.0 if q is None else _probability(q, tokens)
    # Comparisons with NaN are false: after a row of NaN nothing is accepted.
    accepted = _num_true(draws[:count] * q_token < p_token)
    place = accepted.clamp(max=num_rows - 1)  # of the next token; without a bonus there may be none
    p_row = p.index_select(0, place)
    weights = p_row
    if count:
        rejected = accepted.clamp(max=count - 1)
        if q is None:
            is_token = torch.arange(p.shape[1], device=device) == tokens.index_select(0, rejected)
            residual = p_row.masked_fill(is_token, 0.0)
        else:
            residual = p_row.clone()
            shared = min(p.shape[1], q.shape[1])
            residual[:, :shared] -= q.index_select(0, rejected)[:, :shared]
            residual.clamp_(min=0.0)
        # No residual: p equals q up to rounding, or q is NaN, by which every token is rejected.
        weights = torch.where((accepted < count) & (residual.sum() > 0), residual, p_row)
    chosen = draw(weights, draws[count:].index_select(0, place))
    return torch.cat([accepted, chosen.tokens, chosen.are_finite.long()])


def _num_true(values: Tensor) -> Tensor:
    """Count the leading true values of bool ``[γ]``; int64 ``[1]``."""
    return values.long().cumprod(dim=0).sum(dim=0, keepdim=True)


def _probability(p: Tensor, tokens: Tensor) -> Tensor:
    """Return each row's probability of its token, ``[γ]``; 0 for tokens that p lacks.

    Args:
        p: ``[γ, V]``.
    """
    known = p.gather(1, tokens.clamp(max=p.shape[1] - 1)[:, None])[:, 0]
    return known.masked_fill(tokens >= p.shape[1], 0.0)
