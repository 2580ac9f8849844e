"""Speculative decoding in a batch.

Answers draft and are verified together, each with its own window.

A round is one pass of each draft model per drafted position, over the answers that draft there, and
one of the target over every answer's last token and drafted ones. All of it is queued on the
device, and waited for once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...config import STRATEGY_FACTS, SpeculativeConfig
from ...decode.answer import NO_TOKEN, Answer
from ...decode.batch import ArrivingTokens, Batch, Member
from ...decode.sampling import PURPOSE_DRAFT, Choice, NotFiniteError, choose_each
from ...device.copies import fetch, to_device
from ...errors import InvalidConfigError
from ...kv.cache import growing_layers
from ...model.parts import ModelParts
from ...pending import Pending
from ...runner.batch_steps import BatchRunner, OwnKV
from ...runner.outputs import TokenOutputs
from ..drafters.draft import Draft
from ..drafters.drafters import ModelDrafter
from ..drafters.next_token import NextTokenBatchRunner, NextTokenDrafter, NextTokenKV
from ..drafters.tree import Tree
from ..strategies.table import draft_batching_obstacle
from ..verify import decide_window
from .pace import CONSTRAINED, Acceptance, Pace, SpeculationStats


@dataclass
class ModelDraft:
    """Draft of an answer in a batch, by a model.

    Attributes:
        drafter: the drafter, whose model and settings the batch uses.
        kv: the draft's KV.
        num_copied: if the target itself drafts: of how many tokens the draft has the target's KV.
    """

    drafter: ModelDrafter
    kv: OwnKV
    num_copied: int = 0


class DraftingMember(Member):
    """Sequence in a batch that may have a draft.

    Attributes:
        draft: its draft, which has read the prompt; None if it has none, or no longer.
        model_draft: the draft, if it is a model whose prefill is done; else None.
        acceptance: how often drafted tokens were accepted.
        stats: speculation metrics.
    """

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self.draft: Draft | None = None
        self.model_draft: ModelDraft | None = None
        self.acceptance = Acceptance()
        self.stats = SpeculationStats()

    @property
    def drafting_model(self) -> "ModelDraft":
        """The draft that a model continues in this round."""
        assert self.model_draft is not None, "a model drafts for this answer"
        return self.model_draft

    def add(self, new: Sequence[int]) -> None:
        # The first token comes from the prefill.
        if self.tokens:
            self.stats.num_target_forwards += 1
        super().add(new)

    def summary(self) -> dict[str, Any]:
        """Return speculation metrics, without times: rounds are shared with others."""
        return self.stats.summary(len(self.tokens)) | dict.fromkeys(self.stats.times())

    def end(self, error: Exception | None = None) -> None:
        super().end(error)
        self.draft = self.model_draft = None

    def drop_draft(self, why: str) -> None:
        """Go on without the draft, and free its KV."""
        self.draft = self.model_draft = None
        if self.kv is not None:
            self.kv.outputs = None
        self.stats.switch_off(why, len(self.tokens))

    def learn(self, num_drafted: int, num_accepted: int, is_finite: bool) -> None:
        """Learn from a round with drafted tokens."""
        self.stats.count(num_drafted, num_accepted)
        self.acceptance.learn(num_drafted, num_accepted)
        if not is_finite and self.draft is not None:
            self.drop_draft(f"it gave {NotFiniteError()}")


Windows = dict[DraftingMember, int]  # how many tokens members draft


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens of one answer, on the device.

    Attributes:
        tokens: int64 ``[γ]``.
        are_finite: int64 ``[γ]``: 1; 0 where the draft's logits are NaN or infinite.
        q: ``[γ, Vq]``, see :class:`.drafters.Proposal`.
    """

    tokens: Tensor
    are_finite: Tensor
    q: Tensor | None = None

    @classmethod
    def nothing(cls, device: torch.device) -> "Drafted":
        """Return no tokens."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(empty, empty)


@dataclass(frozen=True)
class RoundResult:
    """What a round decided about one answer, on the CPU.

    Attributes:
        num_accepted: how many drafted tokens the target accepted, from the first one on.
        next_token: the target's own token after them.
        is_finite: whether the target's logits for it are.
        drafted: the drafted tokens.
        draft_is_finite: whether all of the draft's logits were.
    """

    num_accepted: int
    next_token: int
    is_finite: bool
    drafted: list[int]
    draft_is_finite: bool

    @property
    def new_tokens(self) -> list[int]:
        """The answer's new tokens; :data:`NO_TOKEN` alone if there is none to choose."""
        if not self.is_finite:
            return [NO_TOKEN]
        return [*self.drafted[: self.num_accepted], self.next_token]

    @staticmethod
    def pack(decisions: Sequence[Tensor], drafted: Sequence[Drafted]) -> Tensor:
        """Put the results of several answers into one tensor on the device, for a single copy.

        Args:
            decisions: int64 ``[3]`` of each answer, see :func:`.verify.decide_window`.
            drafted: of each answer.
        """
        tokens = [each.tokens for each in drafted]
        are_finite = [each.are_finite for each in drafted]
        return torch.cat([*decisions, *tokens, *are_finite])

    @classmethod
    def unpack(cls, numbers: Sequence[int], windows: Sequence[int]) -> list["RoundResult"]:
        """Return the results that :meth:`pack` packed.

        Args:
            windows: γ of each answer.
        """
        tokens_at = 3 * len(windows)
        finite_at = tokens_at + sum(windows)
        results = []
        for row, window in enumerate(windows):
            num_accepted, next_token, is_finite = numbers[3 * row : 3 * row + 3]
            drafted = list(numbers[tokens_at : tokens_at + window])
            draft_is_finite = all(numbers[finite_at : finite_at + window])
            results.append(cls(num_accepted, next_token, bool(is_finite), drafted, draft_is_finite))
            tokens_at += window
            finite_at += window
        return results


class SpeculativeBatch(Batch):
    """Decoding batch whose members may each have a draft.

    A member without a draft brings one token to every round. Greedy answers are those without
    drafts, sampled ones have the target's distribution. While no draft pays, steps are those of
    :class:`Batch`.

    Args:
        parts: the target.
        config: how many tokens are drafted.

    Raises:
        InvalidConfigError: answers cannot be batched, or not with these drafts: see
            :func:`.strategies.draft_batching_obstacle`.
    """

    _member = DraftingMember

    def __init__(self, parts: ModelParts, config: SpeculativeConfig):
        super().__init__(parts)
        if obstacle := draft_batching_obstacle(config):
            raise InvalidConfigError(f"cannot batch answers with drafts: {obstacle}")
        self._config = config
        if STRATEGY_FACTS[config.strategy].reads_outputs:
            self._runner = BatchRunner(parts, keeps_outputs=True)
        self._pace_of_size: dict[int, Pace] = {}
        self._acceptance = Acceptance()  # of all drafts
        # By the identity of the parts of a model that drafts.
        self._draft_runners: dict[int, BatchRunner] = {}

    def join(self, answer: Answer, draft: Draft | None = None) -> DraftingMember:
        """Add an answer as :meth:`Batch.join` does.

        Args:
            draft: its draft, built in the current stream.
        """
        member = super().join(answer)
        assert isinstance(member, DraftingMember), "the class of this batch's members"
        if draft is not None and answer.sampling.is_constrained:
            member.stats.switch_off(CONSTRAINED, 0)
        elif draft is not None:
            member.draft = draft
            # As others' drafts; if these are bad it is tried all the same.
            member.acceptance = Acceptance(expected=max(self._acceptance.rate, 0.5))
            if self._stream is not None:  # the draft's prefill follows the target's
                answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        return member

    @property
    def _drafting_members(self) -> list[DraftingMember]:
        """The batch's members, each of which may have a draft."""
        return [member for member in self._members if isinstance(member, DraftingMember)]

    def pace(self, size: int) -> Pace:
        """Return the chooser of draft lengths for a batch of this size."""
        if size not in self._pace_of_size:
            config = self._config
            self._pace_of_size[size] = Pace(
                config.num_draft_tokens, config.ablation.keep_losing_draft, size
            )
        return self._pace_of_size[size]

    def _take_in(self) -> None:
        super()._take_in()
        for member in self._drafting_members:
            if member.draft is None or member.kv is None or member.model_draft is not None:
                continue
            drafter = member.draft.drafter
            if not isinstance(drafter, ModelDrafter):
                continue
            try:
                kv = self._kv_of_draft(drafter, member)
            except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
                member.drop_draft(str(error))
            else:
                member.model_draft = ModelDraft(drafter, kv)

    def _kv_of_draft(self, drafter: ModelDrafter, member: DraftingMember) -> OwnKV:
        """Take over a draft's KV.

        Raises:
            RuntimeError: there is too little memory.
        """
        layers = growing_layers(drafter.cache)
        if not isinstance(drafter, NextTokenDrafter):
            return self._own(layers, drafter.position, drafter.prompt_states)
        kv = self._own(layers, drafter.position, None, NextTokenKV)
        member.running_kv.outputs = TokenOutputs()
        return kv

    def _may_run_ahead(self) -> bool:
        return super()._may_run_ahead() and self._windows() is None

    def _windows(self) -> Windows | None:
        """Choose the length of every draft; None: none pays at this batch size."""
        running = [member for member in self._drafting_members if member.kv is not None]
        drafting = [member for member in running if member.draft is not None]
        if not drafting:
            return None
        rates = [member.acceptance.rate for member in drafting]
        windows = self.pace(len(running)).windows(rates)
        if windows is None:
            return None
        return dict(zip(drafting, windows, strict=True))

    def _advance(self) -> tuple[list[Member], ArrivingTokens]:
        if self._queued is not None:
            return super()._advance()
        self._roll_back()
        windows = self._windows()
        if windows is None:
            return super()._advance()
        return self._round(windows)

    def _roll_back(self) -> None:
        """Take back the KV of what was drafted and not accepted, or of a round that failed."""
        for member in self._drafting_members:
            if member.kv is None:
                continue
            member.kv.num_run = len(member.tokens) - 1
            if member.model_draft is not None:
                draft_kv = member.model_draft.kv
                draft_kv.num_run = min(draft_kv.num_run, member.kv.num_run)

    def _round(self, windows: Windows) -> tuple[list[Member], ArrivingTokens]:
        """Queue a round; return its sequences, and their tokens."""
        began = time.perf_counter()
        device = self._parts.device

        # Plan. The target adds a token to the drafted ones.
        members = []
        to_draft: Windows = {}
        for member in self._drafting_members:
            if not member.may_go_on:
                continue
            window = min(windows.get(member, 0), member.answer.num_left - 1)
            if self._make_room_or_end(member, 1 + window):
                members.append(member)
                if window:
                    to_draft[member] = window
        if not members:
            return [], Pending(list)

        # Draft.
        drafted_of = self._draft(to_draft)
        drafted = [drafted_of.get(member, Drafted.nothing(device)) for member in members]

        # Verify: every answer's last token and its drafted ones in one pass.
        last_tokens = to_device([member.tokens[-1] for member in members], device, torch.int64)
        ids = []
        for last_token, of_member in zip(last_tokens.split(1), drafted, strict=True):
            ids += [last_token, of_member.tokens]
        counts = [1 + len(of_member.tokens) for of_member in drafted]
        logits = self._runner.run(torch.cat(ids), [member.running_kv for member in members], counts)
        decisions = [
            decide(member.answer, of_member, rows)
            for member, of_member, rows in zip(members, drafted, logits.split(counts), strict=True)
        ]

        def take_results(packed: list) -> list[list[int]]:
            windows = [count - 1 for count in counts]
            results = RoundResult.unpack(packed, windows)
            seconds = time.perf_counter() - began
            self.pace(len(members)).learn(sum(windows), 0.0, seconds)
            for member, result in zip(members, results, strict=True):
                self._learn(member, result)
            return [result.new_tokens for result in results]

        return [*members], fetch(RoundResult.pack(decisions, drafted)).then(take_results)

    def _learn(self, member: DraftingMember, result: RoundResult) -> None:
        """Count a round of one answer."""
        if member.draft is not None:
            member.stats.rounds += 1
        num_drafted = len(result.drafted)
        if num_drafted:
            member.learn(num_drafted, result.num_accepted, result.draft_is_finite)
            self._acceptance.learn(num_drafted, result.num_accepted)

    def _draft(self, windows: Windows) -> dict[DraftingMember, Drafted]:
        """Draft for members; of those that are left out the draft failed."""
        drafted: dict[DraftingMember, Drafted] = {}
        windows_by_runner: dict[BatchRunner, Windows] = {}
        for member, window in windows.items():
            draft = member.draft
            assert draft is not None, "only answers with drafts have windows"
            by_model = member.model_draft
            num_known = len(member.tokens) - 1
            try:
                if by_model is None:
                    # Without a model, such as a lookup.
                    proposal = draft.own_drafter.propose(member.tokens, Tree.chain(window))
                    tokens = to_device(proposal.tokens, self._parts.device, torch.int64)
                    drafted[member] = Drafted(tokens, torch.ones_like(tokens), proposal.q)
                    continue
                kv = by_model.kv
                if isinstance(kv, NextTokenKV) and isinstance(by_model.drafter, NextTokenDrafter):
                    last_hidden = by_model.drafter.last_hidden
                    kv.prepare(len(member.tokens), last_hidden, member.running_kv)
                kv.make_room(num_known + window - kv.num_run)
            except (NotFiniteError, RuntimeError) as error:  # the latter out of memory
                member.drop_draft(f"it gave {error}")
                continue
            if draft.runs(self._parts):
                # The target drafts itself: it has the KV of the tokens so far.
                kv.num_run = by_model.num_copied
                kv.copy_newest(member.running_kv, num_known - kv.num_run)
                by_model.num_copied = num_known
            runner = self._runner_of(by_model.drafter)
            windows_by_runner.setdefault(runner, {})[member] = window
        for runner, windows_of_model in windows_by_runner.items():
            drafted |= _draft_chains(runner, windows_of_model)
        return drafted

    def _runner_of(self, drafter: ModelDrafter) -> BatchRunner:
        """Return the runner of a model over the newest tokens of the answers that it drafts for."""
        parts = drafter.parts
        if parts is self._parts:
            return self._runner
        if id(parts) not in self._draft_runners:
            if isinstance(drafter, NextTokenDrafter):
                self._draft_runners[id(parts)] = NextTokenBatchRunner(drafter.model)
            else:
                self._draft_runners[id(parts)] = BatchRunner(parts)
        return self._draft_runners[id(parts)]


def join_batch(batch: Batch, answer: Answer, draft: Draft | None) -> Member:
    """Add an answer to a batch, with its draft if it has one.

    Args:
        draft: its draft; the batch is then one that drafts.
    """
    if draft is None:
        return batch.join(answer)
    assert isinstance(batch, SpeculativeBatch), "requests with drafts need such a batch"
    return batch.join(answer, draft)


def _draft_chains(runner: BatchRunner, windows: Windows) -> dict[DraftingMember, Drafted]:
    """Draft chains with the model, without synchronization.

    Answers leave the passes by their windows.
    """
    # The longest windows first: those that still draft are then the first rows of every pass.
    members = sorted(windows, key=windows.__getitem__, reverse=True)
    levels = _draft_levels(runner, members, windows)

    drafted = {}
    for row, member in enumerate(members):
        of_member = levels[: windows[member]]
        tokens = torch.stack([level.choice.tokens[row] for level in of_member])
        are_finite = torch.stack([level.choice.are_finite[row] for level in of_member])
        drawn_from = [level.distributions[row] for level in of_member]
        rows = [distribution for distribution in drawn_from if distribution is not None]
        q = torch.stack(rows) if rows else None
        drafted[member] = Drafted(tokens, are_finite.long(), q)
    return drafted


class _Level(NamedTuple):
    """One drafted token of every answer whose window is that long.

    Attributes:
        choice: the tokens, a row an answer.
        distributions: of each row ``[Vq]``, what it was drawn from; None if it was not drawn.
    """

    choice: Choice
    distributions: list[Tensor | None]


def _draft_levels(
    runner: BatchRunner, members: list[DraftingMember], windows: Windows
) -> list[_Level]:
    """Draft token after token for answers whose windows descend."""
    vocab_size = members[0].drafting_model.drafter.vocab_size
    kvs = [member.drafting_model.kv for member in members]
    levels: list[_Level] = []
    for depth in range(windows[members[0]]):
        drafting = [member for member in members if windows[member] > depth]
        if depth == 0:
            logits = _run_missing(runner, members)
        else:
            previous = levels[-1].choice.tokens
            logits = runner.run(
                previous[: len(drafting)], kvs[: len(drafting)], follows_drafted=True
            )
        answers = [member.answer for member in drafting]
        logits = _penalised(logits[:, :vocab_size], answers, levels)
        samplings = [answer.sampling for answer in answers]
        indices = [answer.next_index + depth for answer in answers]
        levels.append(_Level(*choose_each(logits, samplings, indices, PURPOSE_DRAFT)))
    return levels


def _run_missing(runner: BatchRunner, members: list[DraftingMember]) -> Tensor:
    """Run the draft on the tokens of every answer that it has no KV of.

    Return the logits after the last of each, ``[R, Vq]``.
    """
    parts = members[0].drafting_model.drafter.parts
    kvs = [member.drafting_model.kv for member in members]
    ids = []
    counts = []
    for member, kv in zip(members, kvs, strict=True):
        missing = member.tokens[kv.num_run :]
        # What the draft's vocabulary lacks is read as its first token.
        ids += [token if token < parts.vocab_size else 0 for token in missing]
        counts.append(len(missing))
    last_rows = [end - 1 for end in accumulate(counts)]
    return runner.run(ids, kvs, counts)[to_device(last_rows, parts.device)]


def _penalised(logits: Tensor, answers: list[Answer], levels: list[_Level]) -> Tensor:
    """Return logits ``[R, Vq]`` with the answers' penalties.

    The penalties are for their tokens and the drafted ones.
    """
    if all(answer.penalties is None for answer in answers):
        return logits
    rows = list(logits.split(1))
    for row, answer in enumerate(answers):
        if answer.penalties is None:
            continue
        drafted: Tensor | tuple[()] = ()
        if levels:
            drafted = torch.cat([level.choice.tokens[row : row + 1] for level in levels])
        rows[row] = answer.penalties.penalised(rows[row], answer.tokens, drafted)
    return torch.cat(rows)


def decide(answer: Answer, drafted: Drafted, rows: Tensor) -> Tensor:
    """Verify drafted tokens by the target's logits ``[γ + 1, V]``; see :func:`decide_window`."""
    index = answer.next_index
    allowed = answer.allowed(rows, range(index, index + len(rows)), drafted.tokens)
    decision = decide_window(drafted.tokens, drafted.q, allowed, index, answer.sampling)
    if answer.sampling.logprobs is not None:
        num_accepted, next_token = decision[0], decision[1]
        is_accepted = torch.arange(len(rows), device=rows.device) < num_accepted
        tokens = functional.pad(drafted.tokens, (0, 1)).where(is_accepted, next_token)
        answer.tell_of(rows, tokens)
    return decision
