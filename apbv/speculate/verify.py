"""Lossless verification of drafted tokens, as pure functions.

Speculative sampling (Leviathan et al.): a drafted x from q is accepted with probability min(1, p(x) / q(x));
the first rejected one is replaced by a draw from norm(max(0, p - q)). Whatever q is, the output is distributed as
p. At temperature 0 p is one-hot, and a token is accepted if it is the argmax.
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
from ..transfer import to_device
from .drafters import Proposal


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a draft.

    Attributes:
        num_accepted: how many of them are accepted, from the first one on.
        next_token: the token after them: in place of the first rejected one, or, where all are accepted, a bonus;
            None if all are accepted and there are no logits for a bonus.
    """

    num_accepted: int
    next_token: int | None


def verify_window(proposal: Proposal, logits: Tensor, index: int, config: SamplingParams) -> Verdict:
    """Verify a draft, whose first token has this index in the sequence.

    Args:
        proposal: γ drafted tokens.
        logits: the target's, ``[γ + 1, V]``, or ``[γ, V]`` for no bonus.
    """
    if config.temperature == 0:
        return verify_greedy(proposal.tokens, logits)
    p = probabilities(logits, *config.cuts)
    places = range(index, index + len(p))
    return verify_sampled(
        proposal.tokens,
        proposal.q,
        p,
        [uniform(config.seed, place, PURPOSE_ACCEPT) for place in places],
        [uniform(config.seed, place, PURPOSE_NEXT_TOKEN) for place in places],
    )


def verify_greedy(drafted: Sequence[int], logits: Tensor) -> Verdict:
    """Accept drafted tokens up to the first that is not the target's most probable one.

    Args:
        drafted: γ tokens.
        logits: the target's, ``[γ + 1, V]``: row i is for the place of drafted token i, the last for the bonus.
            With γ rows there is no bonus.

    Raises:
        NotFiniteError: a row is NaN or infinite; rows after a rejected token do not matter.
    """
    best, is_finite = most_probable(logits).fetch()()
    accepted = 0
    while accepted < len(drafted) and is_finite[accepted] and drafted[accepted] == best[accepted]:
        accepted += 1
    if not all(is_finite[: accepted + 1]):
        raise NotFiniteError
    return Verdict(accepted, best[accepted] if accepted < len(best) else None)


def verify_sampled(
    drafted: Sequence[int],
    q: Tensor | None,
    p: Tensor,
    accept_draws: Sequence[float],
    next_draws: Sequence[float],
) -> Verdict:
    """Accept drafted tokens by speculative sampling, so that the output is distributed as p.

    Everything is decided on the device of p, with one synchronization.

    Args:
        drafted: γ tokens.
        q: ``[γ, Vq]``, the distributions they were *actually* drawn from; None for a one-hot q, where they were
            not drawn (a greedy draft, a lookup).
        p: ``[γ + 1, Vp]``, the target's, or ``[γ, Vp]`` for no bonus. Vp and Vq may differ: what one vocabulary
            lacks has probability 0.
        accept_draws: γ numbers in [0, 1), each used for this decision and nothing else.
        next_draws: γ + 1 numbers in [0, 1), of which the one for the next token's place is used.

    Raises:
        NotFiniteError: a row of p is NaN; rows after a rejected token do not matter.
    """
    count, num_rows, device = len(drafted), len(p), p.device
    q = None if q is None else to_device(q, device)
    tokens = to_device(drafted, device, torch.int64)
    draws = to_device([*accept_draws[:count], *next_draws[:num_rows]], device, torch.float64)
    p_token = _probability(p[:count], tokens)
    q_token = 1.0 if q is None else _probability(q, tokens)
    # Comparisons with NaN are false: after a row of NaN nothing is accepted.
    accepted = (draws[:count] * q_token < p_token).long().cumprod(dim=0).sum(dim=0, keepdim=True)
    place = accepted.clamp(max=num_rows - 1)  # of the next token; without a bonus there may be none
    weights = p_row = p.index_select(0, place)
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
        # No residual: p equals q up to rounding.
        weights = torch.where((accepted < count) & residual.any(), residual, p_row)
    chosen = draw(weights, draws[count:].index_select(0, place))
    decided = torch.cat([accepted, chosen.tokens, chosen.are_finite.long()])
    num_accepted, token, is_finite = decided.tolist()
    if num_accepted == num_rows:
        return Verdict(num_accepted, None)
    if not is_finite:
        raise NotFiniteError
    return Verdict(num_accepted, token)


def _probability(p: Tensor, tokens: Tensor) -> Tensor:
    """Return each row's probability of its token, ``[γ]`` of ``[γ, V]``; 0 for what the vocabulary lacks."""
    known = p.gather(1, tokens.clamp(max=p.shape[1] - 1)[:, None])[:, 0]
    return known.masked_fill(tokens >= p.shape[1], 0.0)
