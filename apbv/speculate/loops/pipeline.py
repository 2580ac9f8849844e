"""Parallel drafting and verification on different hosts: PEARL's pipeline.

HIPPO and ParallelVLM use it, too.

While the target runs over a window, of which only the first token is verified (post-verify), the
draft already drafts the next one. A round verifies the rest of the old window and the first new
token. A rejected token is corrected, and the draft stops at once; then the target runs over the
correction alone, and verifies only the first token of the next window (pre-verify). The prefill's
logits are the first pre-verification.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from ...decode.answer import NO_TOKEN, Answer
from ...decode.sampling import NotFiniteError
from ...stats import Recorder
from ..drafters.draft import Draft
from ..drafters.drafters import Proposal, pack_tokens, unpack_tokens
from ..verify import verify_window
from .link import ALONE, CORRECTED, DONE, GO_ON, STARTUP_WINDOWS, DraftGaveUp, Link, Pair
from .pace import CONSTRAINED, LOSING, Pace, SpeculationStats


@dataclass(frozen=True)
class RoundPlan:
    """What host 0 decides about a round, as it is sent to all of the target's hosts.

    Attributes:
        new: the round's new tokens; :data:`NO_TOKEN` alone if the target's logits are NaN or
            infinite.
        pending: the drafted tokens that the next round verifies.
        has_ended: whether the answer ends with the last new token.
    """

    new: list[int]
    pending: list[int]
    has_ended: bool

    @staticmethod
    def num_ints(most: int) -> int:
        """Return the length of :meth:`to_ints`.

        It is of the end, and of two lists of at most ``most`` tokens, each after its length.
        """
        return 1 + 2 * (1 + most)

    def to_ints(self, most: int) -> list[int]:
        """Return the plan as numbers, for :meth:`from_ints`."""
        new = pack_tokens(self.new, most)
        pending = pack_tokens(self.pending, most)
        return [int(self.has_ended), *new, *pending]

    @classmethod
    def from_ints(cls, numbers: Sequence[int], most: int) -> "RoundPlan":
        """Return the plan that :meth:`to_ints` encoded."""
        new = unpack_tokens(numbers[1 : 2 + most])
        pending = unpack_tokens(numbers[2 + most :])
        return cls(new, pending, bool(numbers[0]))


class DraftReport(NamedTuple):
    """The draft host's report on a request.

    Attributes:
        windows: the drafted tokens of each window, also of those that a rejection made useless.
        drafting, idle: the seconds of drafting, and of waiting for the target.
    """

    windows: list[int]
    drafting: float
    idle: float

    @property
    def num_drafted(self) -> int:
        """All drafted tokens."""
        return sum(self.windows)


@dataclass
class PipelineStats(SpeculationStats):
    """Metrics of verification; drafts that a rejection made useless do not count.

    Attributes:
        lost_draft: why the target had to continue alone; None if it did not.
        of_draft: the draft's report; None if the draft was lost, and on all hosts but 0.
    """

    lost_draft: str | None = None
    of_draft: DraftReport | None = field(default=None, repr=False)

    waiting: ClassVar = "wait for draft"

    def times(self) -> dict[str, float | None]:
        times = super().times()
        times["draft_seconds"] = None if self.of_draft is None else self.of_draft.drafting
        times["draft_idle_seconds"] = None if self.of_draft is None else self.of_draft.idle
        return times

    def summary(self, num_new_tokens: int) -> dict:
        """Return the metrics for JSON.

        ``num_written`` counts all drafted tokens, including useless ones.
        """
        figures = super().summary(num_new_tokens)
        figures["lost_draft"] = self.lost_draft
        figures["mean_accepted_tokens"] = figures["accepted_in_a_row"]
        figures["num_written"] = None if self.of_draft is None else self.of_draft.num_drafted
        return figures


class _Target:
    """Host 0's side of a request: the unverified tokens, and the link to the draft."""

    def __init__(self, answer: Answer, pair: Pair, stats: PipelineStats, pace: Pace):
        self._answer = answer
        self._pair = pair
        self._stats = stats
        self._pace = pace
        self._pending = Proposal([])

    def decide(self, rows: Tensor) -> RoundPlan:
        """Decide about a round, and send the draft the verdict.

        Args:
            rows: ``[len(pending) + 1, V]``: the target's logits for the pending tokens and the one
                after.

        Raises:
            NotFiniteError: the target's logits are NaN or infinite.
        """
        answer = self._answer
        stats = self._stats
        new, code = self._verify(rows)
        answer.tell_of(rows[: len(new)], new)
        new, has_ended = answer.cut(new)
        num_tokens = len(answer.tokens) + len(new)

        # Learn. In the first round the target waits for the draft's prefill.
        seconds = stats.seconds_of_round()
        if answer.tokens and not stats.switched_off:
            self._pace.learn(len(self._pending.tokens), *seconds, len(new))

        # Tell the draft.
        obstacle = self._obstacle()
        if has_ended:
            code = DONE
        elif obstacle is not None:
            code = ALONE
        self._pair.with_other(lambda link: link.send_verdict(code, num_tokens - 1, new[-1]))

        # The rest of the window is verified in the next round.
        self._pending = Proposal([])
        if code == GO_ON:
            self._pending = self._receive(lambda link: link.receive_rest())
        if obstacle is not None and not has_ended:
            stats.switch_off(obstacle, num_tokens)
        return RoundPlan(new, self._pending.tokens, has_ended)

    def _obstacle(self) -> str | None:
        """Return why the target should continue without the draft.

        None: it should not, or does so already.
        """
        if self._stats.switched_off or self._pair.link is None:
            return None
        if self._answer.sampling.is_constrained:
            return CONSTRAINED
        if self._pace.is_losing():
            return LOSING
        return None

    def _verify(self, rows: Tensor) -> tuple[list[int], int]:
        """Return a round's new tokens, and its verdict's code.

        After GO_ON the current window has more tokens.
        """
        index = self._answer.next_index
        sampling = self._answer.sampling
        stats = self._stats
        pending = self._pending
        rows = self._answer.allowed(rows, range(index, index + len(rows)), pending.tokens)
        if pending.tokens:
            verdict = verify_window(pending, rows[:-1], index, sampling)
            stats.count(len(pending.tokens), verdict.num_accepted)
            if verdict.next_token is not None:
                if not stats.switched_off:
                    # And nothing of it is read.
                    self._pair.with_other(lambda link: link.expect_window())
                return [*pending.tokens[: verdict.num_accepted], verdict.next_token], CORRECTED
        first = self._receive(lambda link: link.receive_first())
        verdict = verify_window(first, rows[-1:], index + len(pending.tokens), sampling)
        stats.count(len(first.tokens), verdict.num_accepted)
        if verdict.next_token is None:
            return [*pending.tokens, *first.tokens], GO_ON
        return [*pending.tokens, verdict.next_token], CORRECTED

    def finish(self) -> None:
        """Receive the draft's report."""
        with self._stats.record.section("wait for draft"):
            report = self._pair.with_other(lambda link: link.receive_json())
        if report is not None:
            self._stats.of_draft = DraftReport(*report)
        self._stats.lost_draft = self._pair.lost

    def _receive(self, exchange: Callable[[Link], Proposal]) -> Proposal:
        """Receive tokens of the current draft; none if the draft is switched off or lost."""
        if self._stats.switched_off:  # then the draft still receives verdicts
            return Proposal([])
        try:
            with self._stats.record.section("wait for draft"):
                return self._pair.with_other(exchange) or Proposal([])
        except DraftGaveUp:
            self._stats.switch_off(f"it gave {NotFiniteError()}", len(self._answer.tokens))
            return Proposal([])


def generate_beside_draft(
    answer: Answer, pair: Pair, pace: Pace
) -> tuple[list[int], PipelineStats]:
    """Decode like :func:`apbv.decode.answer.generate_tokens`, while another host drafts.

    That host runs :func:`draft_beside`.

    If the draft host fails, the target warns once and continues alone, greedy to the same tokens.
    It also does so if the draft's logits are NaN or infinite; then the draft host drafts again for
    the next request.

    Args:
        answer: the answer to decode, on the target's hosts.
        pair: the target's end of the link to the draft.
        pace: gives γ, the longest window but for the first, and decides whether a draft is dropped
            that costs more time than it saves.

    Raises:
        ModelOutputError: the target's logits are NaN or infinite; on every one of its hosts.
    """
    hosts = answer.decoder.hosts
    tokens = answer.tokens
    stats = PipelineStats(record=Recorder(hosts.clock))
    target = _Target(answer, pair, stats, pace) if hosts.rank == 0 else None
    pending: list[int] = []
    rows: Tensor | None = answer.logits[None]
    longest_window = STARTUP_WINDOWS * pace.most
    while True:
        # Decide.
        numbers = None
        if target is not None:
            assert rows is not None, "host 0 has the target's logits"
            hosts.settle()
            try:
                plan = target.decide(rows)
            except NotFiniteError:
                plan = RoundPlan([NO_TOKEN], pending=[], has_ended=True)
            numbers = plan.to_ints(longest_window)
        numbers = hosts.broadcast_ints(numbers, RoundPlan.num_ints(longest_window))
        plan = RoundPlan.from_ints(numbers, longest_window)
        answer.require_token(plan.new[0])

        # The target has run the last verified token and the pending ones: keep the KV of all new
        # tokens but the last. The first one comes from the prefill.
        if tokens:
            answer.decoder.take_back(len(pending) + 1 - len(plan.new))
        answer.add(plan.new)
        if plan.has_ended:
            if target is not None:
                target.finish()
            return tokens, stats

        # Run the target, whose logits verify the pending tokens.
        pending = plan.pending
        with stats.record.section("verify"):
            rows = answer.decoder.advance([tokens[-1], *pending])
        stats.num_target_forwards += 1
        if stats.switched_off is None:
            stats.rounds += 1


def draft_beside(
    link: Link, draft: Draft, last_prompt_token: int, stops_with_target: bool = False
) -> tuple[list[int], DraftReport]:
    """Draft windows on the draft host until the target is done.

    It also ends if the draft's logits are NaN or infinite.

    Args:
        link: the link to the target's host 0.
        draft: a draft whose drafter is a :class:`ModelDrafter`, with the prompt but for the last
            token in its cache. A provisional draft drafts only the first window.
        last_prompt_token: the token that the cache lacks.
        stops_with_target: whether a window ends when the target has verified the one before. Else
            only a correction ends it before it is full.

    Returns:
        The answer's tokens, and the report.

    Raises:
        HostError: the target's hosts failed, or went on without this one.
    """
    sequence = [last_prompt_token]  # verified tokens, then drafted ones
    record = Recorder()
    windows = []
    drafts = True
    code = GO_ON
    num_certain = 1  # tokens of the sequence that the target has verified
    while code != DONE:
        successor = draft.successor
        is_provisional = successor is not None
        verdict = link.expect_verdict() if successor is None else successor.awaited
        window: list[int] = []
        rows: list[Tensor] = []
        if drafts:
            with record.section("draft"):
                try:
                    for token, row in draft.own_drafter.stream(sequence, num_certain):
                        window.append(token)
                        if row is not None:
                            rows.append(row)
                        if len(window) == 1:
                            link.send_first(token, row)
                        if len(window) == link.most:
                            break
                        # A verdict ends the window, unless it is to go on and windows are full.
                        if verdict.ready():
                            if is_provisional or stops_with_target:
                                break
                            if verdict.wait()[0] != GO_ON:
                                break
                    link.send_rest(window[1:], rows[1:])
                except NotFiniteError:
                    link.send_failure(for_good=False)
                    drafts = False
            windows.append(len(window))
        sequence += window
        if successor is not None:
            with record.section("idle"):
                verdict.wait()
            draft = successor.build()
            verdict = link.expect_verdict()
        with record.section("idle"):
            code, num_verified, token = verdict.wait().tolist()
        num_certain = 1 + num_verified
        if code != GO_ON:
            sequence = [*sequence[: 1 + num_verified], token]
        if code == ALONE:
            drafts = False
    report = DraftReport(windows, record.seconds["draft"], record.seconds["idle"])
    link.send_json(report)
    link.wait_until_received()
    return sequence[1:], report
