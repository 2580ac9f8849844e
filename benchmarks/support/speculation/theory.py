"""Predicts what speculation gains, by ParallelVLM's Theorems 2 to 6 and TABED's Eq. 1.

Here gamma tokens are drafted per round, c = T_p / T_q is how many tokens the draft drafts during one forward pass
of the target, and tau is the acceptance rate. Unless stated otherwise, functions return the speed-up over
autoregressive decoding.
"""


def serial(gamma: float, c: float, tau: float = 1.0) -> float:
    """Return the speed-up of drafting and verifying in turn (Theorem 4; Theorem 2 where tau is 1)."""
    return c * (tau * gamma + 1) / (gamma + c)


def by_block_efficiency(tokens_per_block: float, gamma: float, c: float) -> float:
    """Return the speed-up in turn by the tokens of a round (TABED's Eq. 1); Theorem 4 for tau gamma + 1 tokens."""
    return tokens_per_block / (gamma / c + 1)


def parallel(gamma: float, c: float, tau: float = 1.0) -> float:
    """Return the speed-up of drafting while verifying, all post-verify (Theorem 5; Theorem 3 where tau is 1)."""
    return c * tau * gamma / max(gamma, c)


def expected_accepted(gamma: float, tau: float) -> float:
    """Return the mean number of a window's accepted tokens, each accepted with probability tau (Lemma 1)."""
    return float(gamma) if tau == 1 else tau * (1 - tau**gamma) / (1 - tau)


def parallel_with_rollback(gamma: float, c: float, tau: float = 1.0) -> float:
    """Return the speed-up of drafting while verifying, with the rounds that rejections cost (Theorem 6)."""
    return c * (1 + tau**gamma) * expected_accepted(gamma, tau) / (2 * max(gamma, c))
