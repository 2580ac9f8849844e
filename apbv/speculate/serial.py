"""Draft, then verify, in turn: vanilla speculative decoding, and whatever differs from it in the draft only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from ..config import SamplingConfig, longest_window
from ..decode import Decoder, Ending, Stop, choose_token
from ..hosts import HostGroup
from ..sampling import PURPOSE_ACCEPT, PURPOSE_NEXT_TOKEN, probabilities, uniform
from ..timeline import Recorder
from .drafters import Drafter, Learner, Proposal, packed, unpacked
from .verify import Verdict, verify_greedy, verify_sampled

FIRST_AUTO_DRAFT_TOKENS = 4  # before anything is measured


@dataclass
class SpeculationStats:
    """What speculation did to one request, as host 0 counted it.

    Attributes:
        rounds: windows verified.
        num_target_forwards: forward passes of the target after the prefill.
        num_drafted, num_accepted: tokens.
        num_rejections: of a token, after which the rest of its window is void.
        record: when the draft drafted and the target verified.
    """

    rounds: int = 0
    num_target_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    record: Recorder = field(default_factory=lambda: Recorder("decoding"), repr=False)

    @property
    def draft_seconds(self) -> float | None:
        """Of drafting."""
        return self.record.seconds("draft")

    @property
    def verify_seconds(self) -> float:
        """Of the target's forward passes."""
        return self.record.seconds("verify")

    @property
    def target_idle_seconds(self) -> float:
        """How long the target had nothing to do: in turn, while the draft drafts."""
        return self.draft_seconds

    @property
    def draft_idle_seconds(self) -> float | None:
        """How long the draft had nothing to do."""
        return self.verify_seconds

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Of a window, or of a part of it that is judged by itself."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_rejections += num_accepted < num_drafted

    def summary(self, num_new_tokens: int) -> dict:
        """For JSON; the first token comes out of the prefill and is not counted as speculation's.

        ``mean_accepted_tokens`` is PEARL's and HIPPO's MAT: how many tokens are accepted in a row between two
        rejections, in however many rounds.
        """
        forwards, drafted = self.num_target_forwards, self.num_drafted
        counted = [counter.name for counter in fields(self) if counter.repr]  # the others are no figures
        times = ("draft_seconds", "verify_seconds", "target_idle_seconds", "draft_idle_seconds")
        return {
            **{name: getattr(self, name) for name in (*counted, *times)},
            "tokens_per_target_forward": (num_new_tokens - 1) / forwards if forwards else None,
            "acceptance_rate": self.num_accepted / drafted if drafted else None,
            "mean_accepted_tokens": self.num_accepted / (self.num_rejections + 1) if drafted else None,
        }


class WindowLength:
    """γ: how many tokens to draft before they are verified. Fixed, or as many as the draft says in one pass of
    the target, round(T_p / T_q), by what has been measured so far.

    Args:
        wanted: γ, or ``"auto"``.
    """

    def __init__(self, wanted: int | str, stats: SpeculationStats):
        self._wanted, self._stats = wanted, stats
        self.most = longest_window(wanted)

    def __call__(self) -> int:
        stats = self._stats
        if self._wanted != "auto":
            return self._wanted
        if not stats.num_drafted:
            return FIRST_AUTO_DRAFT_TOKENS
        per_round, per_token = stats.verify_seconds / stats.rounds, stats.draft_seconds / stats.num_drafted
        return min(self.most, max(1, round(per_round / per_token)))


def generate_speculatively(
    decoder: Decoder,
    drafter: Drafter | None,
    logits: Tensor,
    prompt_len: int,
    hosts: HostGroup,
    config: SamplingConfig,
    eos_token_ids: tuple[int, ...],
    num_draft_tokens: int | str,
    on_token: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> tuple[list[int], SpeculationStats]:
    """:func:`apbv.decode.generate_tokens`, with several tokens per forward pass of the target.

    Every token is distributed as if the target had chosen it alone; at temperature 0 it is the same token.
    Between rounds the target's KV is that of all tokens so far but the last.

    Args:
        drafter: on host 0; None on the others.
        num_draft_tokens: γ, or ``"auto"`` (:class:`WindowLength`).
        on_token, stop: as there; several calls after each round.

    Returns:
        The new tokens, and the statistics; their times are as this host saw them.
    """
    stats = SpeculationStats()
    window_length = WindowLength(num_draft_tokens, stats)
    tokens: list[int] = []
    drafted: list[int] = []
    ending = Ending(eos_token_ids, config.max_new_tokens, stop)
    token, has_ended = choose_token(logits, prompt_len, tokens, hosts, config, ending)
    new = [token]
    while True:
        # The target has run the last token and all drafted ones: all new tokens but one are in its KV, no others.
        decoder.take_back(len(drafted) + 1 - len(new))
        say(new, tokens, on_token)
        if has_ended:
            return tokens, stats
        # The target adds one token to those that it accepts.
        room = config.max_new_tokens - len(tokens) - 1
        proposal = plan = None
        with stats.record.span("draft") as details:
            if hosts.rank == 0:
                proposal = drafter.propose(tokens, min(window_length(), room))
            drafted = _share(proposal, min(window_length.most, room), hosts)
            details["tokens"] = len(drafted)
        with stats.record.span("verify", tokens=len(drafted) + 1) as details:
            rows = decoder.advance([tokens[-1], *drafted])
            if hosts.rank == 0:
                verdict = judge(proposal, rows, prompt_len + len(tokens), config)
                accepted, token = verdict.num_accepted, verdict.next_token
                new, has_ended = ending.cut(tokens, [*drafted[:accepted], token])
                plan = [accepted, token, len(new), has_ended]
            accepted, token, num_new, has_ended = hosts.broadcast_ints(plan, 4)
            details["accepted"] = accepted
        new = [*drafted[:accepted], token][:num_new]
        if isinstance(drafter, Learner):
            drafter.learn(new, rows[: len(new)])
        stats.rounds += 1
        stats.num_target_forwards += 1
        stats.count(len(drafted), accepted)


def _share(proposal: Proposal | None, most: int, hosts: HostGroup) -> list[int]:
    """The drafted tokens, at most so many, on every host."""
    if not most:
        return []
    return unpacked(hosts.broadcast_ints(proposal and packed(proposal.tokens, most), most + 1))


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


def say(new: Sequence[int], tokens: list[int], on_token: Callable[[int], None] | None) -> None:
    """Add new tokens to those of the answer, and show each."""
    for token in new:
        tokens.append(token)
        if on_token is not None:
            on_token(token)
