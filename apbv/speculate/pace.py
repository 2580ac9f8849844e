"""Chooses the draft length, and whether to keep drafting, from costs and acceptance rate."""

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import ClassVar

from ..config import longest_window
from ..stats import Recorder

FIRST_AUTO_DRAFT_TOKENS = 4  # the window before anything is measured
TRIAL_PASSES = 8  # the loss, in forward passes of the target, at which a draft is switched off
_REST = 1024  # steps of a batch size without drafts, until they are tried again: their first rounds may be slow
_FEWEST_PLAIN_PASSES = 3  # passes without a window that are measured before a draft is judged
_MEMORY = 0.95  # the weight of a round's acceptance decays by this factor per round
_LONGEST_ROUND = 3.0  # in medians: a longer round was delayed by something else
_SHORTEST_SECONDS = 1e-9  # a clock may be coarse


def best_windows(rates: Sequence[float], size: int, seconds: float, cost: float, most: int) -> list[int]:
    """Return the windows γ of the highest goodput, expected tokens per second of a round (SmartSpec, Liu et al.).

    By Leviathan et al.'s Eq. 1 for the tokens, they maximise (R + Σ_i Σ_{g <= γ_i} α_i^g) / (T + c Σ_i γ_i). For
    one answer that is TABED's Eq. 1 with ParallelVLM's Lemma 1.

    Args:
        rates: α of each answer that has a draft: the probability that a token is accepted if all before it are.
        size: R, how many answers get tokens, with those that have none.
        seconds: T, of a round without drafted tokens.
        cost: c, the seconds that each drafted token adds.
        most: the longest window.
    """
    tokens, windows = float(size), [0] * len(rates)
    gains = [(rate**level, place) for place, rate in enumerate(rates) for level in range(1, most + 1)]
    # The likeliest tokens first: one more raises the goodput as long as α^g / c is higher than that is.
    for gain, place in sorted(gains, reverse=True):
        if gain * seconds <= tokens * cost:
            break
        tokens, seconds = tokens + gain, seconds + cost
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
        self.rejections = _MEMORY * self.rejections + (num_accepted < num_drafted)

    @property
    def rate(self) -> float:
        """The estimated probability."""
        return (self.accepted + 2 * self.expected) / (self.accepted + self.rejections + 2)


class Pace:
    """Chooses the draft lengths of one answer; on host 0.

    A draft is judged by the seconds of the target's passes over a single token. Now and then :meth:`next_window`
    returns 0 to measure one: such a pass costs no more than decoding without a draft.

    Args:
        num_draft_tokens: γ, or ``"auto"``: the best one by :func:`best_windows`.
        keep_losing_draft: whether a draft is never judged; then :meth:`is_losing` is always false.
    """

    def __init__(self, num_draft_tokens: int | str, keep_losing_draft: bool = True):
        self._wanted, self._keeps_losing_draft = num_draft_tokens, keep_losing_draft
        self.most = longest_window(num_draft_tokens)
        self._num_rounds, self._spent, self._num_tokens = 0, 0.0, 0
        self._plain: deque[float] = deque(maxlen=9)  # seconds of the target's latest passes over one token
        # Of the latest rounds with a window: seconds of drafting and of verifying, and drafted tokens.
        self._rounds: deque[tuple[float, float, int]] = deque(maxlen=32)
        self._acceptance = Acceptance()

    def next_window(self) -> int:
        """Return the number of tokens, or levels of a tree, to draft next; 0 for a pass without a draft."""
        if not self._keeps_losing_draft and self._wants_plain_pass():
            return 0
        if self._wanted != "auto":
            return self._wanted
        if not self._rounds:
            return FIRST_AUTO_DRAFT_TOKENS
        draft, verify, drafted = (sum(each) / len(self._rounds) for each in zip(*self._rounds, strict=True))
        plain = min(median(self._plain), verify) if self._plain else verify
        # The seconds that a longer window adds to the target's pass are part of a drafted token's cost.
        cost = max((draft + verify - plain) / drafted, _SHORTEST_SECONDS)
        return max(1, *best_windows([self._acceptance.rate], 1, max(plain, _SHORTEST_SECONDS), cost, self.most))

    def learn(self, num_drafted: int, num_accepted: int, num_new: int, draft: float, verify: float) -> None:
        """Learn from a round.

        Args:
            num_drafted, num_accepted: tokens of the window, or levels of the tree.
            num_new: tokens that the round added to the answer.
            draft, verify: seconds of drafting and of verifying; with a draft host of waiting for it and of
                verifying.
        """
        self._num_rounds += 1
        if not num_drafted:
            self._plain.append(verify)
            self._spent += draft
            return
        self._rounds.append((draft, verify, num_drafted))
        if self._num_rounds > 1:  # the first one is slow everywhere
            usual = median(drafting + verifying for drafting, verifying, _ in self._rounds)
            self._spent += min(draft + verify, _LONGEST_ROUND * usual)
            self._num_tokens += num_new
        self._acceptance.learn(num_drafted, num_accepted)

    def is_losing(self) -> bool:
        """Return whether drafting has cost more than it has saved by :data:`TRIAL_PASSES` passes of the target."""
        has_plain_passes = len(self._plain) >= _FEWEST_PLAIN_PASSES
        return not self._keeps_losing_draft and has_plain_passes and self._seems_losing()

    def _seems_losing(self) -> bool:
        if not self._plain:
            return False
        alone = self._num_tokens + TRIAL_PASSES  # passes that the target alone may take
        return self._spent > alone * max(median(self._plain), _SHORTEST_SECONDS)

    def _wants_plain_pass(self) -> bool:
        """Return whether to run a pass without a draft: after 2, 8, 32, … rounds, or if the draft may lose."""
        count = len(self._plain)
        return self._num_rounds >= 2 * 4**count or (count < _FEWEST_PLAIN_PASSES and self._seems_losing())


class BatchPace:
    """Chooses the draft lengths of a batch's answers, by the seconds of its latest rounds at each batch size.

    Args:
        num_draft_tokens: the largest length; ``"auto"``: the limit of that.
        keep_losing_draft: whether drafts go on that do not pay; with a number as long ones as it says.

    Attributes:
        acceptance: of all answers' drafts.
    """

    def __init__(self, num_draft_tokens: int | str, keep_losing_draft: bool = True):
        self._wanted, self._keeps_losing_draft = num_draft_tokens, keep_losing_draft
        # By batch size: the seconds of rounds, and the tokens that all answers together drafted.
        self._rounds: dict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=64))
        self._rested = Counter[int]()  # by batch size: steps without drafts
        self.acceptance = Acceptance()

    def windows(self, size: int, rates: Sequence[float]) -> list[int] | None:
        """Return the number of tokens to draft next, for each draft by its acceptance rate.

        All are 0 where a round without drafted tokens is to be measured. None: for now no draft pays at this batch
        size.

        Args:
            size: how many answers the batch has.
        """
        if not rates:
            return None
        plain = [seconds for seconds, count in self._rounds[size] if not count]
        costs = [each for each in self._rounds[size] if each[1]]
        nothing, most = [0] * len(rates), longest_window(self._wanted)
        if len(costs) < 2 or (self._keeps_losing_draft and self._wanted != "auto"):
            return [min(most, FIRST_AUTO_DRAFT_TOKENS) if self._wanted == "auto" else most] * len(rates)
        if len(plain) <= len(costs) // 32:
            return nothing
        seconds = median(plain)
        cost = max(median((spent - seconds) / count for spent, count in costs), _SHORTEST_SECONDS)
        windows = best_windows(rates, size, seconds, cost, most)
        if any(windows):
            return windows
        if self._keeps_losing_draft:
            return [1] * len(rates)
        if len(plain) < _FEWEST_PLAIN_PASSES:
            return nothing
        self._rested[size] += 1
        if self._rested[size] % _REST == 0:
            self._rounds[size].clear()
        return None

    def learn(self, size: int, num_drafted: int, seconds: float) -> None:
        """Learn from a round in which all answers together drafted ``num_drafted`` tokens."""
        self._rounds[size].append((seconds, num_drafted))


# Why an answer is decoded without its draft.
LOSING = "with it the answer takes longer than without"
CONSTRAINED = "with a JSON schema or a grammar no token can be judged before all those before it are known"


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
        draft, verify = self.record.seconds["draft"], self.record.seconds["verify"]
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
        self.num_rejections += num_accepted < num_drafted

    def seconds_of_round(self) -> tuple[float, float]:
        """Return the seconds of drafting, or of waiting for it, and of verifying since the last call."""
        before, self._seconds = self._seconds, (self.record.seconds[self.waiting], self.record.seconds["verify"])
        return self._seconds[0] - before[0], self._seconds[1] - before[1]

    def switch_off(self, why: str, num_tokens: int) -> None:
        """Record that the target continues without the draft, and warn."""
        self.switched_off, self.switched_off_after = why, num_tokens
        warnings.warn(f"decoding continues without the draft: {why}", stacklevel=3)

    def summary(self, num_new_tokens: int) -> dict:
        """Return the metrics for JSON; the first token comes from the prefill, and does not count.

        ``mean_accepted_tokens`` is the mean acceptance length, the papers' MAT or M of sequential drafting and
        TABED's block efficiency: tokens per round, the target's own included. ``accepted_in_a_row`` is the mean
        number of tokens accepted between two rejections, over any number of rounds: PEARL's metric, and HIPPO's
        MAT of parallel drafting.
        """
        forwards, drafted = self.num_target_forwards, self.num_drafted
        in_rounds = num_new_tokens - 1 - (forwards - self.rounds)  # others come from passes without a draft
        counted = [counter.name for counter in fields(self) if counter.repr]  # fields without repr are not metrics
        return {
            **{name: getattr(self, name) for name in counted},
            **self.times(),
            "tokens_per_target_forward": (num_new_tokens - 1) / forwards if forwards else None,
            "acceptance_rate": self.num_accepted / drafted if drafted else None,
            "mean_accepted_tokens": in_rounds / self.rounds if self.rounds else None,
            "accepted_in_a_row": self.num_accepted / (self.num_rejections + 1) if drafted else None,
        }
