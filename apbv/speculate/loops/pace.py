"""Chooses the draft length, and whether to keep drafting, from costs and acceptance rate."""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import ClassVar

from ...config import longest_window
from ...stats import Recorder

FIRST_AUTO_DRAFT_TOKENS = 4  # the window before anything is measured
TRIAL_PASSES = 8  # the loss, in forward passes of the target, at which a draft is switched off
# Steps of a batch size without drafts, until they are tried again: their costs may have changed.
_REST = 1024
_PERIOD = 64  # rounds, after the first of which passes without drafted tokens are measured
# Such passes, and rounds with drafted tokens, that are measured before any is judged: one may be
# slow.
_FEWEST = 3
_MEMORY = 0.95  # the weight of a round's acceptance decays by this factor per round
_SHORTEST_SECONDS = 1e-9  # a clock may be coarse


def best_windows(
    rates: Sequence[float], size: int, seconds: float, cost: float, most: int
) -> list[int]:
    """Return the windows γ of the highest goodput.

    Goodput is the expected tokens per second of a round (SmartSpec, Liu et al.).

    By Leviathan et al.'s Eq. 1 for the tokens, they maximise (R + Σ_i Σ_{g <= γ_i} α_i^g) / (T + c
    Σ_i γ_i). For one answer that is TABED's Eq. 1 with ParallelVLM's Lemma 1.

    Args:
        rates: α of each answer that has a draft: the probability that a token is accepted if all
            before it are.
        size: R, how many answers get tokens, with those that have none.
        seconds: T, of a round without drafted tokens.
        cost: c, the seconds that each drafted token adds.
        most: the longest window.
    """
    tokens = float(size)
    windows = [0] * len(rates)
    gains = [
        (rate**level, place) for place, rate in enumerate(rates) for level in range(1, most + 1)
    ]
    # The likeliest tokens first: one more raises the goodput as long as α^g / c is higher than that
    # is.
    for gain, place in sorted(gains, reverse=True):
        if gain * seconds <= tokens * cost:
            break
        tokens = tokens + gain
        seconds = seconds + cost
        windows[place] += 1
    return windows


@dataclass
class Acceptance:
    """How often drafted tokens are accepted if all before them are; earlier rounds weigh less.

    Attributes:
        expected: the rate before the first round, which weighs as much as two tokens.
    """

    accepted: float = 0.0
    rejections: float = 0.0
    expected: float = 0.5

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a round."""
        self.accepted = _MEMORY * self.accepted + num_accepted
        was_rejected = num_accepted < num_drafted
        self.rejections = _MEMORY * self.rejections + int(was_rejected)

    @property
    def rate(self) -> float:
        """The estimated probability."""
        return (self.accepted + 2 * self.expected) / (self.accepted + self.rejections + 2)


class Pace:
    """Chooses the draft lengths of one answer, or of a batch at one size; on host 0.

    It chooses by the seconds that rounds take.

    Drafts are judged against passes of the target without drafted tokens. After the first round,
    which is slow everywhere, three are measured, and three in every 64 rounds: they cost no more
    than decoding without drafts.

    Args:
        num_draft_tokens: the largest length, and the only one of an answer by itself, whose tokens
            do not depend on time then, as long as it has its draft; ``"auto"``: at most the limit
            of that.
        keep_losing_draft: whether drafts go on that do not pay; with a number always as long as it
            says.
        size: how many answers the batch has; None for an answer by itself.

    Attributes:
        most: the largest length.
        acceptance: of an answer by itself.
    """

    def __init__(
        self, num_draft_tokens: int | str, keep_losing_draft: bool = True, size: int | None = None
    ):
        self.most = longest_window(num_draft_tokens)
        self._is_auto = num_draft_tokens == "auto"
        self._keeps_losing_draft = keep_losing_draft
        self._size = size
        self.acceptance = Acceptance()
        self._num_rounds = self._num_rested = 0
        self._plain = deque[float](maxlen=9)  # seconds of the latest passes without drafted tokens
        # Seconds that each drafted token added to the latest other rounds.
        self._costs = deque[float](maxlen=32)
        # By how many passes of the target drafting has cost more than it has saved.
        self._lost = 0.0

    def windows(self, rates: Sequence[float]) -> list[int] | None:
        """Return the number of tokens, or levels of a tree, to draft next, by :func:`best_windows`.

        All are 0 where a pass without drafted tokens is to be measured. None, in a batch: for now
        no draft pays.

        Args:
            rates: the acceptance rate of each draft.
        """
        is_judged = self._is_auto or not self._keeps_losing_draft
        if is_judged and 1 <= self._num_rounds % _PERIOD <= _FEWEST:
            return [0] * len(rates)
        is_chosen = self._is_auto or (is_judged and self._size is not None)
        if not is_chosen or len(self._costs) < _FEWEST:
            return [FIRST_AUTO_DRAFT_TOKENS if self._is_auto else self.most] * len(rates)
        cost = max(median_low(self._costs), _SHORTEST_SECONDS)
        windows = best_windows(rates, self._size or 1, median_low(self._plain), cost, self.most)
        if any(windows):
            return windows
        if self._keeps_losing_draft or self._size is None:
            return [1] * len(rates)
        self._num_rested += 1
        if self._num_rested % _REST == 0:
            self._costs.clear()
            self._plain.clear()
            self._num_rounds = 0
        return None

    def learn(self, num_drafted: int, draft: float, verify: float, num_new: int = 1) -> None:
        """Learn from a round.

        Args:
            num_drafted: drafted tokens, of all answers together, or levels of the tree.
            draft, verify: seconds of drafting and of verifying; with a draft host of waiting for it
                and of verifying; in a batch, whose rounds are measured as a whole, 0 and those of
                the round.
            num_new: tokens that the round added to an answer by itself.
        """
        self._num_rounds += 1
        if not num_drafted:
            self._plain.append(max(verify, _SHORTEST_SECONDS))
        if len(self._plain) < _FEWEST:
            return
        plain = median_low(self._plain)
        cost = draft + (verify - plain if num_drafted else 0.0)
        if num_drafted:
            self._costs.append(cost / num_drafted)
        # No single round is decisive, as something else may have delayed it.
        self._lost += min(cost / plain - (num_new - 1), TRIAL_PASSES / 2)

    def is_losing(self) -> bool:
        """Return whether drafting for an answer costs more than it saves.

        It does if it has cost :data:`TRIAL_PASSES` passes more than it has saved.
        """
        return not self._keeps_losing_draft and self._lost >= TRIAL_PASSES


# Why an answer is decoded without its draft.
LOSING = "with it the answer takes longer than without"
CONSTRAINED = (
    "with a JSON schema or a grammar no token can be judged before all those before it are known"
)


@dataclass
class SpeculationStats:
    """Speculation metrics of one request, on host 0.

    Attributes:
        rounds: forward passes of the target while the draft was not switched off.
        num_target_forwards: forward passes of the target after the prefill.
        num_drafted, num_accepted: drafted and accepted tokens.
        num_rejections: windows of which a token was rejected.
        switched_off: why the rest of the answer was decoded without the draft; None if it was not.
        switched_off_after: after how many tokens.
        record: the seconds of drafting and verifying.
    """

    rounds: int = 0
    num_target_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    switched_off: str | None = None
    switched_off_after: int | None = None
    record: Recorder = field(default_factory=Recorder, repr=False)
    waiting: ClassVar = "draft"  # the section in which the target waits
    _seconds: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def times(self) -> dict[str, float | None]:
        """Return the seconds of drafting, of verification, and of either side's idling."""
        draft = self.record.seconds["draft"]
        verify = self.record.seconds["verify"]
        return {
            "draft_seconds": draft,
            "verify_seconds": verify,
            "target_idle_seconds": self.record.seconds[self.waiting],
            "draft_idle_seconds": verify,
        }

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a window, or a part of it that is verified separately."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted < num_drafted:
            self.num_rejections += 1

    def seconds_of_round(self) -> tuple[float, float]:
        """Return the seconds of drafting and of verifying since the last call.

        If another host drafts, waiting for it takes the place of drafting.
        """
        before = self._seconds
        self._seconds = (self.record.seconds[self.waiting], self.record.seconds["verify"])
        return self._seconds[0] - before[0], self._seconds[1] - before[1]

    def switch_off(self, why: str, num_tokens: int) -> None:
        """Record that the target continues without the draft, and warn."""
        self.switched_off = why
        self.switched_off_after = num_tokens
        warnings.warn(f"decoding continues without the draft: {why}", stacklevel=3)

    def summary(self, num_new_tokens: int) -> dict:
        """Return the metrics for JSON; the first token comes from the prefill, and does not count.

        ``mean_accepted_tokens`` is the mean acceptance length, the papers' MAT or M of sequential
        drafting and TABED's block efficiency: tokens per round, the target's own included.
        ``accepted_in_a_row`` is the mean number of tokens accepted between two rejections, over any
        number of rounds: PEARL's metric, and HIPPO's MAT of parallel drafting.
        """
        num_after_first = num_new_tokens - 1
        # Passes without a draft add one token each.
        num_in_rounds = num_after_first - (self.num_target_forwards - self.rounds)
        figures = {
            "rounds": self.rounds,
            "num_target_forwards": self.num_target_forwards,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_rejections": self.num_rejections,
            "switched_off": self.switched_off,
            "switched_off_after": self.switched_off_after,
            **self.times(),
            "tokens_per_target_forward": None,
            "acceptance_rate": None,
            "mean_accepted_tokens": None,
            "accepted_in_a_row": None,
        }
        if self.num_target_forwards:
            figures["tokens_per_target_forward"] = num_after_first / self.num_target_forwards
        if self.rounds:
            figures["mean_accepted_tokens"] = num_in_rounds / self.rounds
        if self.num_drafted:
            figures["acceptance_rate"] = self.num_accepted / self.num_drafted
            figures["accepted_in_a_row"] = self.num_accepted / (self.num_rejections + 1)
        return figures
