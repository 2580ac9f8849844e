"""Draft, then verify, in turn: vanilla speculative decoding, and whatever differs from it in the draft only."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch import Tensor

from ..config import SamplingConfig
from ..decode import Decoder
from ..hosts import HostGroup
from ..sampling import PURPOSE_ACCEPT, PURPOSE_NEXT_TOKEN, probabilities, sample, uniform
from .drafters import Drafter, Learner, Proposal, packed, unpacked
from .verify import Verdict, verify_greedy, verify_sampled


@dataclass
class SpeculationStats:
    """What speculation did to one request, as host 0 counted it.

    Attributes:
        rounds: windows verified.
        num_target_forwards: forward passes of the target after the prefill.
        num_drafted, num_accepted: tokens.
        draft_seconds, verify_seconds: of waiting for each.
    """

    rounds: int = 0
    num_target_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def summary(self, num_new_tokens: int) -> dict:
        """For JSON; the first token comes out of the prefill and is not counted as speculation's."""
        forwards, drafted = self.num_target_forwards, self.num_drafted
        return {
            **asdict(self),
            "tokens_per_target_forward": (num_new_tokens - 1) / forwards if forwards else None,
            "acceptance_rate": self.num_accepted / drafted if drafted else None,
        }


def generate_speculatively(
    decoder: Decoder,
    drafter: Drafter | None,
    logits: Tensor,
    prompt_len: int,
    hosts: HostGroup,
    config: SamplingConfig,
    eos_token_ids: tuple[int, ...],
    num_draft_tokens: int,
    on_token: Callable[[int], None] | None = None,
) -> tuple[list[int], SpeculationStats]:
    """:func:`apbv.decode.generate_tokens`, with several tokens per forward pass of the target.

    Every token is distributed as if the target had chosen it alone; at temperature 0 it is the same token.
    Between rounds the target's KV is that of all tokens so far but the last.

    Args:
        drafter: on host 0; None on the others.
        num_draft_tokens: γ.
        on_token: as there; several calls after each round.

    Returns:
        The new tokens, and the statistics, which only host 0 has counted times in.
    """
    stats = SpeculationStats()
    tokens: list[int] = []
    drafted: list[int] = []
    chosen = [sample(logits, config, prompt_len)] if hosts.rank == 0 else None
    new = hosts.broadcast_ints(chosen, 1)
    while True:
        new = until_the_end(new, eos_token_ids)
        # The target has run the last token and all drafted ones: all new tokens but one are in its KV, no others.
        decoder.take_back(len(drafted) + 1 - len(new))
        for token in new:
            tokens.append(token)
            if on_token is not None:
                on_token(token)
        if tokens[-1] in eos_token_ids or len(tokens) >= config.max_new_tokens:
            return tokens, stats
        began = time.perf_counter()
        # The target adds one token to those that it accepts.
        count = min(num_draft_tokens, config.max_new_tokens - len(tokens) - 1)
        proposal = drafter.propose(tokens, count) if hosts.rank == 0 else None
        drafted = _share(proposal, count, hosts)
        stats.draft_seconds += time.perf_counter() - began
        began = time.perf_counter()
        rows = decoder.advance([tokens[-1], *drafted])
        verdict = judge(proposal, rows, prompt_len + len(tokens), config) if hosts.rank == 0 else None
        accepted, token = hosts.broadcast_ints(verdict and [verdict.num_accepted, verdict.next_token], 2)
        stats.verify_seconds += time.perf_counter() - began
        new = [*drafted[:accepted], token]
        if isinstance(drafter, Learner):
            drafter.learn(new, rows[: len(new)])
        stats.rounds += 1
        stats.num_target_forwards += 1
        stats.num_drafted += len(drafted)
        stats.num_accepted += accepted


def _share(proposal: Proposal | None, count: int, hosts: HostGroup) -> list[int]:
    """The drafted tokens, on every host."""
    if not count:
        return []
    return unpacked(hosts.broadcast_ints(proposal and packed(proposal.tokens, count), count + 1))


def judge(proposal: Proposal, logits: Tensor, index: int, config: SamplingConfig) -> Verdict:
    """Verify a window whose first token would be at this index of the sequence.

    Args:
        logits: the target's, ``[γ + 1, V]``, or ``[γ, V]`` for no bonus.
    """
    if config.temperature == 0:
        return verify_greedy(proposal.tokens, logits)
    p = probabilities(logits, config.temperature, config.top_p)
    places = range(index, index + len(p))
    return verify_sampled(
        proposal.tokens,
        proposal.q,
        p,
        [uniform(config.seed, place, PURPOSE_ACCEPT) for place in places],
        [uniform(config.seed, place, PURPOSE_NEXT_TOKEN) for place in places],
    )


def until_the_end(tokens: list[int], eos_token_ids: tuple[int, ...]) -> list[int]:
    """The tokens up to the first end token, which is included."""
    for number, token in enumerate(tokens, start=1):
        if token in eos_token_ids:
            return tokens[:number]
    return tokens
