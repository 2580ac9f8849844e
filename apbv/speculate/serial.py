"""Draft, then verify, in turn: vanilla speculative decoding, and whatever differs from it in the draft only."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from ..config import SamplingConfig
from ..decode.decoder import NO_TOKEN, Decoder, Ending, Stop, choose_token, require_token
from ..decode.sampling import PURPOSE_ACCEPT, PURPOSE_NEXT_TOKEN, NotFiniteError, probabilities, uniform
from ..hosts import HostGroup
from ..timeline import Recorder
from .drafters import Drafter, Learner, Proposal, packed, unpacked
from .pace import Pace
from .verify import Verdict, verify_greedy, verify_sampled

LOSING = "with it the answer takes longer than without"
SWITCHED_OFF = -1  # what host 0 tells the others in place of how many tokens are drafted


@dataclass
class SpeculationStats:
    """What speculation did to one request, as host 0 counted it.

    Attributes:
        rounds: passes of the target until the draft was switched off, if it was.
        num_target_forwards: forward passes of the target after the prefill.
        num_drafted, num_accepted: tokens.
        num_rejections: of a token, after which the rest of its window is void.
        switched_off: why the rest of the answer was decoded without the draft; None: it was not.
        switched_off_after: so many tokens.
        record: when the draft drafted and the target verified.
    """

    rounds: int = 0
    num_target_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    switched_off: str | None = None
    switched_off_after: int | None = None
    record: Recorder = field(default_factory=lambda: Recorder("decoding"), repr=False)
    _seconds: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

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

    def seconds_of_round(self) -> tuple[float, float]:
        """Of drafting and of verifying since this was last asked."""
        before, self._seconds = self._seconds, (self.record.seconds("draft"), self.record.seconds("verify"))
        return self._seconds[0] - before[0], self._seconds[1] - before[1]

    def switch_off(self, why: str, num_tokens: int) -> None:
        """Note that the target goes on without the draft, and say so."""
        self.switched_off, self.switched_off_after = why, num_tokens
        warnings.warn(f"decoding goes on without the draft: {why}", stacklevel=3)

    def summary(self, num_new_tokens: int) -> dict:
        """For JSON; the first token comes out of the prefill and is not counted as speculation's.

        ``mean_accepted_tokens`` is the papers' MAT or M of drafting in turn, TABED's block efficiency: tokens of a
        round, the target's own included. ``accepted_in_a_row`` is how many tokens are accepted between two
        rejections, in however many rounds: PEARL's figure, and HIPPO's MAT of drafting beside the target.
        """
        forwards, drafted = self.num_target_forwards, self.num_drafted
        in_rounds = num_new_tokens - 1 - (forwards - self.rounds)  # the others came of passes without a draft
        in_a_row = self.num_accepted / (self.num_rejections + 1) if drafted else None
        counted = [counter.name for counter in fields(self) if counter.repr]  # the others are no figures
        times = ("draft_seconds", "verify_seconds", "target_idle_seconds", "draft_idle_seconds")
        return {
            **{name: getattr(self, name) for name in (*counted, *times)},
            "tokens_per_target_forward": (num_new_tokens - 1) / forwards if forwards else None,
            "acceptance_rate": self.num_accepted / drafted if drafted else None,
            "mean_accepted_tokens": in_rounds / self.rounds if self.rounds else None,
            "accepted_in_a_row": in_a_row,
        }


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
    drop_losing_draft: bool = False,
) -> tuple[list[int], SpeculationStats]:
    """:func:`apbv.decode.decoder.generate_tokens`, with several tokens per forward pass of the target.

    Every token is distributed as if the target had chosen it alone; at temperature 0 it is the same token.
    Between rounds the target's KV is that of all tokens so far but the last.

    Args:
        drafter: on the leader; None on the others.
        num_draft_tokens: γ, or ``"auto"`` (:func:`apbv.speculate.pace.best_window`).
        on_token, stop: as there; several calls after each round.
        drop_losing_draft: go on without a draft that costs more time than it saves (:class:`Pace`).

    Returns:
        The new tokens, and the statistics; their times are as this host saw them.

    Raises:
        AgreedError: the target's logits are NaN or infinite; on every host. Where the draft's are, it is dropped.
    """
    stats = SpeculationStats(record=Recorder("decoding", hosts.clock))
    pace = Pace(num_draft_tokens, drop_losing_draft)
    tokens: list[int] = []
    drafted: list[int] = []
    ending = Ending(eos_token_ids, config.max_new_tokens, stop)
    token, has_ended = choose_token(logits, prompt_len, tokens, hosts, config, ending)
    new, is_drafting = [token], True
    while True:
        # The target has run the last token and all drafted ones: all new tokens but one are in its KV, no others.
        decoder.take_back(len(drafted) + 1 - len(new))
        say(new, tokens, on_token)
        if has_ended:
            return tokens, stats
        # The target adds one token to those that it accepts.
        room = config.max_new_tokens - len(tokens) - 1
        proposal, plan, drafted = Proposal([]), None, []
        if is_drafting and room:
            with stats.record.span("draft") as details:
                if hosts.is_leader:
                    proposal = _propose(drafter, tokens, room, pace, stats)
                drafted = _share(proposal, min(pace.most, room), hosts)
                is_drafting = drafted is not None
                drafted = drafted or []
                details["tokens"] = len(drafted)
        with stats.record.span("verify", tokens=len(drafted) + 1) as details:
            rows = decoder.advance([tokens[-1], *drafted])
            if hosts.is_leader:
                try:
                    verdict = judge(proposal or Proposal([]), rows, prompt_len + len(tokens), config)
                    accepted, token = verdict.num_accepted, verdict.next_token
                    new, has_ended = ending.cut(tokens, [*drafted[:accepted], token])
                    plan = [accepted, token, len(new), has_ended]
                except NotFiniteError:
                    plan = [0, NO_TOKEN, 1, True]
            accepted, token, num_new, has_ended = hosts.broadcast_ints(plan, 4)
            require_token(token, tokens)
            details["accepted"] = accepted
        new = [*drafted[:accepted], token][:num_new]
        if is_drafting and isinstance(drafter, Learner):
            drafter.learn(new, rows[: len(new)])
        stats.rounds += is_drafting
        stats.num_target_forwards += 1
        stats.count(len(drafted), accepted)
        if is_drafting:
            pace.learn(len(drafted), accepted, len(new), *stats.seconds_of_round())


def _propose(
    drafter: Drafter, tokens: list[int], room: int, pace: Pace, stats: SpeculationStats
) -> Proposal | None:
    """The next window, in which there is room for so many tokens; None where the draft is of no use any more."""
    if pace.is_losing():
        stats.switch_off(LOSING, len(tokens))
        return None
    count = min(pace.next_window(), room)
    try:
        return drafter.propose(tokens, count) if count else Proposal([])
    except NotFiniteError as error:
        stats.switch_off(f"it gave {error}", len(tokens))
        return None


def _share(proposal: Proposal | None, most: int, hosts: HostGroup) -> list[int] | None:
    """The drafted tokens, at most so many, on every host; None where host 0 has switched the draft off."""
    numbers = None
    if hosts.is_leader:
        numbers = [SWITCHED_OFF, *[0] * most] if proposal is None else packed(proposal.tokens, most)
    numbers = hosts.broadcast_ints(numbers, most + 1)
    return None if numbers[0] == SWITCHED_OFF else unpacked(numbers)


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
