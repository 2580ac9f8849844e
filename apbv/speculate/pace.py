"""How many tokens to draft next, and whether to draft at all, by what drafting has cost and brought so far."""

from collections import deque
from statistics import median

from ..config import longest_window
from . import theory

FIRST_AUTO_DRAFT_TOKENS = 4  # before anything is measured
TRIAL_PASSES = 8  # a draft may cost so many of the target's passes more than it saves
_FEWEST_PLAIN_PASSES = 3  # before a draft is judged by them
_MEMORY = 0.95  # how much a round's acceptance and costs still count in the next one
_LONGEST_ROUND = 3.0  # medians: what took longer was held up by something else
_SHORTEST_SECONDS = 1e-9  # a clock may be coarse


def best_window(cost_ratio: float, acceptance: float, most: int) -> int:
    """γ in 1 .. ``most`` of the highest expected speed-up; of equal ones the shortest.

    TABED's Eq. 1 with ParallelVLM's Lemma 1 (truncated geometric) for the tokens of a round.

    Args:
        cost_ratio: c, the time of a pass of the target over what one more drafted token costs.
        acceptance: τ, how likely a drafted token is accepted where those before it are.
    """

    def speedup(gamma: int) -> float:
        tokens = 1 + theory.expected_accepted(gamma, acceptance)
        return theory.by_block_efficiency(tokens, gamma, cost_ratio)

    return max(range(1, most + 1), key=speedup)


def passes_lost(seconds: float, num_tokens: int, pass_seconds: float) -> float:
    """How many passes of the target over a single token drafting has cost more than it has saved.

    Args:
        seconds: of drafting and verifying.
        num_tokens: what came of it; the target alone takes one pass for each.
        pass_seconds: of one such pass.
    """
    return seconds / max(pass_seconds, _SHORTEST_SECONDS) - num_tokens


class Pace:
    """Chooses the windows of one answer; on the host that drafts in turn with the target, or judges windows.

    The target's passes over a single token, by which a draft is judged, are those of windows that were empty. Now
    and then :meth:`next_window` asks for one: such a pass costs what it costs without a draft.

    Args:
        num_draft_tokens: γ, or ``"auto"``: the best one by :func:`best_window`.
        drop_losing: whether :meth:`is_losing` is asked.
    """

    def __init__(self, num_draft_tokens: int | str, drop_losing: bool = False):
        self._wanted, self._drops = num_draft_tokens, drop_losing
        self.most = longest_window(num_draft_tokens)
        self._num_rounds, self._spent, self._num_tokens = 0, 0.0, 0
        self._plain: deque[float] = deque(maxlen=9)  # seconds of the target's latest passes over one token
        self._rounds: deque[float] = deque(maxlen=64)  # seconds of the latest rounds with a window
        # Of rounds with a window, the earlier the less: their number, seconds and tokens.
        self._windows = self._draft_seconds = self._verify_seconds = 0.0
        self._drafted = self._accepted = self._rejections = 0.0

    def next_window(self) -> int:
        """How many tokens to draft next, or levels of a tree; 0: the target is to take one pass alone."""
        if self._drops and self._wants_plain_pass():
            return 0
        if self._wanted != "auto":
            return self._wanted
        if not self._drafted:
            return FIRST_AUTO_DRAFT_TOKENS
        verify = self._verify_seconds / self._windows
        plain = min(median(self._plain), verify) if self._plain else verify
        # Whatever a longer window adds to the target's pass is part of the price of a drafted token.
        per_token = (self._draft_seconds + self._verify_seconds - self._windows * plain) / self._drafted
        cost_ratio = max(plain, _SHORTEST_SECONDS) / max(per_token, _SHORTEST_SECONDS)
        acceptance = (self._accepted + 1) / (self._accepted + self._rejections + 2)
        return best_window(cost_ratio, acceptance, self.most)

    def learn(self, num_drafted: int, num_accepted: int, num_new: int, draft: float, verify: float) -> None:
        """A round.

        Args:
            num_drafted, num_accepted: tokens of the window, or levels of the tree.
            num_new: tokens that it added to the answer.
            draft, verify: seconds; on a draft host the first are those that the target waited.
        """
        self._num_rounds += 1
        if not num_drafted:
            self._plain.append(verify)
            self._spent += draft
            return
        self._rounds.append(draft + verify)
        if self._num_rounds > 1:  # the first one is slow everywhere
            self._spent += min(draft + verify, _LONGEST_ROUND * median(self._rounds))
            self._num_tokens += num_new
        sums = (self._windows, self._draft_seconds, self._verify_seconds, self._drafted)
        sums += (self._accepted, self._rejections)
        new = (1, draft, verify, num_drafted, num_accepted, num_accepted < num_drafted)
        sums = [_MEMORY * old + added for old, added in zip(sums, new, strict=True)]
        self._windows, self._draft_seconds, self._verify_seconds, self._drafted, *sums = sums
        self._accepted, self._rejections = sums

    def is_losing(self) -> bool:
        """Whether the draft has had its trial and lost it."""
        return self._drops and self._seems_losing() and len(self._plain) >= _FEWEST_PLAIN_PASSES

    def _seems_losing(self) -> bool:
        return bool(self._plain) and passes_lost(self._spent, self._num_tokens, median(self._plain)) > TRIAL_PASSES

    def _wants_plain_pass(self) -> bool:
        """After 2, 8, 32, … rounds, and where the draft seems to lose."""
        count = len(self._plain)
        return self._num_rounds >= 2 * 4**count or (count < _FEWEST_PLAIN_PASSES and self._seems_losing())
