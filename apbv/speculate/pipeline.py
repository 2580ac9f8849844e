"""Draft and verify at the same time, on different hosts: PEARL's pipeline, as HIPPO and ParallelVLM use it.

While the target runs over the window that it was given, all of it unverified but the first token (post-verify),
the draft already writes the next one. A round confirms the old tokens and the first new one. What is rejected is
corrected, and stops the draft at once; then the target has nothing to run over but the correction, and checks only
the first token of the next window (pre-verify). The prefill's logits are the first pre-verification.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..config import SamplingConfig
from ..decode.decoder import NO_TOKEN, Decoder, Ending, Stop, require_token
from ..decode.sampling import NotFiniteError
from ..hosts import HostError, HostGroup
from ..timeline import Recorder, Span, seconds_of
from ..warn import warn_caller
from .draft import Draft
from .drafters import Proposal, packed, unpacked
from .link import ALONE, CORRECTED, DONE, FAILED, GO_ON, STARTUP_WINDOWS, DraftGaveUp, Link
from .pace import Pace
from .serial import LOSING, SpeculationStats, judge, say


@dataclass(frozen=True)
class DraftReport:
    """What the draft's side did for a request.

    Attributes:
        num_drafted: tokens, those included that nobody asked for any more.
        bytes_received: from the target.
        spans: its stages and its rounds.
    """

    num_drafted: int
    bytes_received: int
    spans: list[Span]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "DraftReport":
        return cls(**{**fields, "spans": [Span(**span) for span in fields["spans"]]})


@dataclass
class PipelineStats(SpeculationStats):
    """Of the target's side: what it has judged. Windows that a rejection made useless are not counted.

    Attributes:
        num_pre_verify, num_post_verify: rounds by what was to be verified: one token, or a window.
        lost_draft: why the target had to go on alone, if it had to.
        link_bytes: what the two sides sent each other; None where the draft was lost.
        of_draft: the draft's own account; None where it was lost, and on all hosts but 0.
    """

    num_pre_verify: int = 0
    num_post_verify: int = 0
    lost_draft: str | None = None
    link_bytes: int | None = None
    of_draft: DraftReport | None = field(default=None, repr=False)

    @property
    def draft_seconds(self) -> float | None:
        return self.of_draft and seconds_of(self.of_draft.spans, "draft")

    @property
    def target_idle_seconds(self) -> float:
        return self.record.seconds("wait for draft")

    @property
    def draft_idle_seconds(self) -> float | None:
        return self.of_draft and seconds_of(self.of_draft.spans, "wait for scores", "wait for verdict")

    def summary(self, num_new_tokens: int) -> dict:
        """And ``num_written``: all that the draft host drafted, useless windows included."""
        written = self.of_draft and self.of_draft.num_drafted
        figures = super().summary(num_new_tokens)
        return {**figures, "mean_accepted_tokens": figures["accepted_in_a_row"], "num_written": written}

    def seconds_of_round(self) -> tuple[float, float]:
        """Of waiting for the draft and of verifying since this was last asked."""
        before = self._seconds
        self._seconds = self.record.seconds("wait for draft"), self.record.seconds("verify")
        return self._seconds[0] - before[0], self._seconds[1] - before[1]


class _Target:
    """Host 0's side of a request: what is still unverified, and the link to the draft."""

    def __init__(
        self,
        link: Link | None,
        prompt_len: int,
        config: SamplingConfig,
        ending: Ending,
        stats: PipelineStats,
        pace: Pace,
    ):
        self._pace = pace
        self.link, self._prompt_len = link, prompt_len
        self._config, self._ending, self._stats = config, ending, stats
        self._pending, self._num_tokens = Proposal([]), 0

    def decide(self, tokens: list[int], rows: Tensor) -> tuple[list[int], list[int], bool]:
        """What a round confirms, what the next one is to verify, and whether the answer ends.

        The draft hears of it in between.

        Args:
            tokens: all that is verified so far.
            rows: ``[len(pending) + 1, V]``: the target's logits for the pending tokens and the one after.

        Raises:
            NotFiniteError: the target's logits are NaN or infinite.
        """
        self._num_tokens = len(tokens)
        new, code = self._judge(tokens, rows)
        new, has_ended = self._ending.cut(tokens, new)
        has_rest = code == GO_ON
        seconds = self._stats.seconds_of_round()
        if tokens and not self._is_alone:  # at first the target waits for the draft's prefill
            self._pace.learn(len(self._pending.tokens), 0, len(new), *seconds)
        is_losing = self.link is not None and not self._is_alone and self._pace.is_losing()
        if has_ended:
            code = DONE
        elif is_losing:
            code = ALONE
        self._use(lambda link: link.send_verdict(code, len(tokens) + len(new) - 1, new[-1]))
        self._pending = Proposal([])
        if has_rest and code == GO_ON:
            self._pending = self._receive(lambda link: link.receive_rest()) or self._pending
        elif has_rest:
            self._skip(first=False)
        if code == ALONE:
            self._stats.switch_off(LOSING, len(tokens) + len(new))
        return new, self._pending.tokens, has_ended

    def _judge(self, tokens: list[int], rows: Tensor) -> tuple[list[int], int]:
        """What a round confirms, and the code of its verdict: after GO_ON the window at hand has a rest."""
        index, stats, pending = self._prompt_len + len(tokens), self._stats, self._pending
        if pending.tokens:
            verdict = judge(pending, rows[:-1], index, self._config)
            stats.count(len(pending.tokens), verdict.num_accepted)
            if verdict.next_token is not None:
                self._skip(first=True)
                return [*pending.tokens[: verdict.num_accepted], verdict.next_token], CORRECTED
        first = self._receive(lambda link: link.receive_first()) or Proposal([])
        verdict = judge(first, rows[-1:], index + len(pending.tokens), self._config)
        stats.count(len(first.tokens), verdict.num_accepted)
        if verdict.next_token is None:
            return [*pending.tokens, *first.tokens], GO_ON
        self._skip(first=False)
        return [*pending.tokens, verdict.next_token], CORRECTED

    def finish(self) -> None:
        """Hear the draft's account."""
        report = self._await(lambda link: link.receive_json())
        if report is not None:
            self._stats.of_draft = DraftReport.from_json(report)
            self._stats.link_bytes = self.link.request_bytes + self._stats.of_draft.bytes_received

    @property
    def _is_alone(self) -> bool:
        """Whether no window is written any more, while the draft hears of every token all the same."""
        return self._stats.switched_off is not None

    def _receive(self, exchange: Callable[[Link], Proposal]) -> Proposal | None:
        """Some of the window at hand; None where there is none."""
        if self._is_alone:
            return None
        try:
            return self._await(exchange)
        except DraftGaveUp:
            self._stats.switch_off(f"it gave {NotFiniteError()}", self._num_tokens)
            return None

    def _skip(self, first: bool) -> None:
        if not self._is_alone:
            self._use(lambda link: link.skip(first))

    def _await(self, exchange: Callable[[Link], object]):
        """:meth:`_use`, where the target has nothing else to do."""
        with self._stats.record.span("wait for draft"):
            return self._use(exchange)

    def _use(self, exchange: Callable[[Link], object]):
        """Use the link; without it, or when it is lost, None."""
        if self.link is None:
            return None
        try:
            return exchange(self.link)
        except HostError as error:
            with suppress(HostError):  # it may only have been slow
                if not self.link.is_settled:
                    self.link.send_verdict(FAILED)
            self.link, self._stats.lost_draft = None, str(error)
            warn_caller(f"going on without the draft host: {error}")
            return None


def generate_beside_draft(
    decoder: Decoder,
    link: Link | None,
    logits: Tensor,
    prompt_len: int,
    hosts: HostGroup,
    config: SamplingConfig,
    eos_token_ids: tuple[int, ...],
    num_draft_tokens: int,
    on_token: Callable[[int], None] | None = None,
    stop: Stop | None = None,
    drop_losing_draft: bool = False,
) -> tuple[list[int], PipelineStats]:
    """The target's side: :func:`apbv.decode.decoder.generate_tokens` with :func:`draft_beside` on another host.

    Where the draft host is lost, the target says so once and goes on alone: greedy, to the same tokens. So it does
    where the draft's logits are NaN or infinite; then the draft host is asked again for the next request.

    Args:
        link: on host 0; None on the others, and where there is no draft host any more.
        hosts: the target's.
        num_draft_tokens: γ, the longest window but for the first.
        drop_losing_draft: go on without windows that cost more time than they save.

    Raises:
        AgreedError: the target's logits are NaN or infinite; on every one of its hosts.
    """
    stats = PipelineStats(record=Recorder("decoding", hosts.clock))
    pace = Pace(num_draft_tokens, drop_losing_draft)
    ending = Ending(eos_token_ids, config.max_new_tokens, stop)
    target = _Target(link, prompt_len, config, ending, stats, pace) if hosts.rank == 0 else None
    tokens: list[int] = []
    pending: list[int] = []
    rows: Tensor | None = logits[None]
    width = STARTUP_WINDOWS * num_draft_tokens
    while True:
        plan = None
        if target is not None:
            try:
                new, waiting, has_ended = target.decide(tokens, rows)
            except NotFiniteError:
                new, waiting, has_ended = [NO_TOKEN], [], True
            plan = [has_ended, *packed(new, width), *packed(waiting, width)]
        has_ended, *plan = hosts.broadcast_ints(plan, 1 + 2 * (1 + width))
        new, waiting = unpacked(plan[: 1 + width]), unpacked(plan[1 + width :])
        require_token(new[0], tokens)
        # The target has run all verified tokens and the pending ones; of the new ones all but the last are kept.
        decoder.take_back(len(pending) + 1 - len(new) if tokens else 0)
        say(new, tokens, on_token)
        if has_ended:
            if target is not None:
                target.finish()
            return tokens, stats
        pending = waiting
        with stats.record.span("verify", tokens=1 + len(pending), mode="post" if pending else "pre"):
            rows = decoder.advance([tokens[-1], *pending])
        stats.num_target_forwards += 1
        if stats.switched_off is None:
            stats.rounds += 1
            stats.num_post_verify += bool(pending)
            stats.num_pre_verify += not pending


def draft_beside(
    link: Link,
    draft: Draft,
    last_prompt_token: int,
    earlier: Sequence[Span] = (),
    stops_with_target: bool = False,
) -> tuple[list[int], DraftReport, Draft]:
    """The draft's side: write windows until the target is done, or this side's logits are NaN or infinite.

    Args:
        draft: its drafter is a :class:`ModelDrafter`, whose cache holds the prompt but for the last token. Where
            it is provisional, the first window is its last.
        earlier: what this host did for the request before.
        stops_with_target: a window ends when the target has run over the one before. Else only a correction ends
            it before it is full.

    Returns:
        The new tokens as the target settled them, what was done, and the draft that drafted last.

    Raises:
        HostError: the target's hosts failed, or went on without this one.
    """
    sequence = [last_prompt_token]  # what is verified, and what is believed
    record, total, is_over = Recorder("decoding"), 0, False
    while True:
        provisional = draft.successor is not None
        verdict = None if provisional else link.expect_verdict()

        def has_to_stop(draft=draft, verdict=verdict) -> bool:
            if verdict is None:
                return draft.successor.is_due()
            return verdict.has_ended() and (stops_with_target or verdict.wait()[0] != GO_ON)

        window: list[int] = []
        rows: list[Tensor] = []
        with record.span("draft") as details:
            try:
                for token, row in draft.drafter.stream(sequence):
                    window.append(token)
                    rows += [] if row is None else [row]
                    if len(window) == 1:
                        link.send_first(token, row)
                    if len(window) == link.most or has_to_stop():
                        break
                link.send_rest(window[1:], rows[1:])
            except NotFiniteError:
                link.send_failure(first=not window, for_good=False)
                is_over = True
            except Exception:
                link.send_failure(first=not window)
                raise
            details["tokens"] = len(window)
        total += len(window)
        if provisional:
            with record.span("wait for scores"):
                draft.successor.wait()
            with record.span("prune"):
                draft = _succeed(draft, link)
            verdict = link.expect_verdict()
        sequence += window
        while True:
            with record.span("wait for verdict"):
                code, num_standing, token = verdict.wait().tolist()
            if code == FAILED:
                raise HostError("the target's hosts failed")
            if code != GO_ON:
                sequence = [*sequence[: 1 + num_standing], token]
            is_over |= code == ALONE
            if code == DONE:
                report = DraftReport(total, link.request_bytes, [*earlier, *record.spans])
                link.send_json(report.as_json())
                link.wait_until_received()
                return sequence[1:], report, draft
            if not is_over:
                break
            verdict = link.expect_verdict()


def _succeed(draft: Draft, link: Link) -> Draft:
    """What a provisional draft was for; where it cannot be built, the target is told instead of given a window."""
    try:
        return draft.successor.build()
    except HostError:  # the target's: it need not be told
        raise
    except Exception:
        link.send_failure(first=True)
        raise
