"""What speculation should gain: ParallelVLM's Theorems 2 to 6, and TABED's Eq. 1, as functions.

gamma tokens are drafted per round; c = T_p / T_q: so many tokens the draft says while the target runs once; tau is
the share of drafted tokens that are accepted. Where not said otherwise, functions return the speed-up over
autoregressive decoding.
"""


def serial(gamma: float, c: float, tau: float = 1.0) -> float:
    """Draft, then verify (Theorem 4; Theorem 2 where tau is 1)."""
    return c * (tau * gamma + 1) / (gamma + c)


def by_block_efficiency(tokens_per_block: float, gamma: float, c: float) -> float:
    """Draft, then verify, by the tokens of a round (TABED's Eq. 1); Theorem 4 where these are tau gamma + 1."""
    return tokens_per_block / (gamma / c + 1)


def parallel(gamma: float, c: float, tau: float = 1.0) -> float:
    """Draft while verifying, all in post-verify mode (Theorem 5; Theorem 3 where tau is 1)."""
    return c * tau * gamma / max(gamma, c)


def expected_accepted(gamma: float, tau: float) -> float:
    """Tokens accepted of a window whose tokens are accepted independently until the first is not (Lemma 1)."""
    return float(gamma) if tau == 1 else tau * (1 - tau**gamma) / (1 - tau)


def parallel_with_rollback(gamma: float, c: float, tau: float = 1.0) -> float:
    """Draft while verifying, with the rounds that a rejection costs (Theorem 6)."""
    return c * (1 + tau**gamma) * expected_accepted(gamma, tau) / (2 * max(gamma, c))
