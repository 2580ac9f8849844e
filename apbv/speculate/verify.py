"""Which drafted tokens the target would have said itself: lossless verification, as a pure function.

Speculative sampling (Leviathan et al.): a drafted x from q is accepted with probability min(1, p(x) / q(x));
the first rejected one is replaced by a draw from norm(max(0, p - q)). Whatever q is, what comes out is distributed
as p. At temperature 0 p is one-hot, and this is comparing with the argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.sampling import NotFiniteError, draw, most_probable_of_rows, require_distribution


@dataclass(frozen=True)
class Verdict:
    """What the target says of a window of drafted tokens.

    Attributes:
        num_accepted: so many of them, from the first one, stand.
        next_token: what follows them: instead of the first rejected one, or, where all stand, a bonus; None where
            all stand and the target has not looked further.
    """

    num_accepted: int
    next_token: int | None


def verify_greedy(drafted: Sequence[int], logits: Tensor) -> Verdict:
    """Accept drafted tokens for as long as they are the most probable ones.

    Args:
        drafted: γ tokens.
        logits: the target's, ``[γ + 1, V]``: row i is for the place of drafted token i, the last for the bonus.
            With γ rows there is no bonus.

    Raises:
        NotFiniteError: a row that matters is NaN or infinite; those behind a rejected token do not.
    """
    best, is_finite = most_probable_of_rows(logits)
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
    """Accept drafted tokens at random, such that the output is distributed as p.

    Args:
        drafted: γ tokens.
        q: ``[γ, Vq]``, the distributions they were *actually* drawn from; None where they were not drawn at all
            (a greedy draft, a lookup), which is a one-hot q.
        p: ``[γ + 1, Vp]``, the target's, or ``[γ, Vp]`` for no bonus. Vp and Vq may differ: what one vocabulary
            lacks has probability 0.
        accept_draws: γ numbers in [0, 1), each used for this decision and nothing else.
        next_draws: γ + 1 numbers in [0, 1) likewise, of which the one for the next token's place is used.

    Raises:
        NotFiniteError: a row of p that matters is NaN.
    """
    for place, token in enumerate(drafted):
        p_row = require_distribution(p[place])
        p_token = float(p_row[token]) if token < len(p_row) else 0.0
        q_token = 1.0 if q is None else float(q[place, token])
        if accept_draws[place] * q_token < p_token:
            continue
        if q is None:
            left = p_row.index_fill(0, torch.tensor([token] if token < len(p_row) else []).long(), 0.0)
        else:
            left = p_row.clone()
            shared = min(len(p_row), q.shape[1])
            left[:shared] -= q[place, :shared]
            left.clamp_(min=0.0)
        if not left.any():  # p equals q up to rounding
            left = p_row
        return Verdict(place, draw(left, next_draws[place]))
    if len(p) == len(drafted):
        return Verdict(len(drafted), None)
    return Verdict(len(drafted), draw(require_distribution(p[-1]), next_draws[len(drafted)]))
