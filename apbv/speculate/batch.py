"""Speculative decoding in a batch: answers draft and are verified together, each with its own window.

A round is one pass of each draft model per drafted position, over the answers that draft there, and one of the
target over every answer's last token and drafted ones. All of it is queued on the device, and waited for once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import SpeculativeConfig
from ..decode.answer import NO_TOKEN, Answer
from ..decode.batch import Arriving, Batch, Member, PrefilledPrompt
from ..decode.batch_steps import BatchRunner, OwnKV
from ..decode.sampling import PURPOSE_DRAFT, NotFiniteError, choose_each
from ..input.request import Request
from ..model.parts import ModelParts
from ..transfer import fetch, to_device
from .draft import Draft
from .pace import LOOKS_BACK, Acceptance, BatchPace, SpeculationStats
from .strategies import why_drafts_alone
from .tree import Tree
from .verify import decide_window


@dataclass
class MemberDraft:
    """Draft of one answer in a batch.

    Attributes:
        draft: the draft, which has read the prompt.
        kv: its model's KV; None before the prefill is done, and if it drafts without a model of its own.
        num_copied: if it takes the target's KV: of how many tokens it has that.
        acceptance: which of its tokens were accepted.
    """

    draft: Draft
    kv: OwnKV | None
    num_copied: int
    acceptance: Acceptance


class DraftingMember(Member):
    """Sequence in a batch that may have a draft.

    Attributes:
        draft: its draft; None if it has none, or no longer.
        stats: speculation metrics.
    """

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self.draft: MemberDraft | None = None
        self.stats = SharedStats()

    def add(self, new: Sequence[int]) -> None:
        self.stats.num_target_forwards += bool(self.tokens)
        self.stats.rounds += bool(self.tokens) and self.draft is not None
        super().add(new)

    def end(self, error: Exception | None = None) -> None:
        super().end(error)
        self.draft = None

    def drop_draft(self, why: str) -> None:
        """Go on without the draft, and free its KV."""
        self.draft = None
        self.stats.switch_off(why, len(self.tokens))

    def learn(self, num_drafted: int, num_accepted: int, is_finite: bool) -> None:
        """Learn from a round with drafted tokens."""
        self.stats.count(num_drafted, num_accepted)
        if self.draft is not None:
            self.draft.acceptance.learn(num_drafted, num_accepted)
            if not is_finite:
                self.drop_draft(f"it gave {NotFiniteError()}")


class SharedStats(SpeculationStats):
    """Speculation metrics of an answer whose rounds it shares with others: no seconds are its own."""

    def times(self) -> dict[str, float | None]:
        return dict.fromkeys(super().times())


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens of one answer, on the device.

    Attributes:
        tokens: int64 ``[γ]``.
        q: ``[γ, Vq]``, see :class:`.drafters.Proposal`.
        shown: int64 ``[γ]``: the tokens; -1 minus it where the draft's logits are NaN or infinite.
    """

    tokens: Tensor
    q: Tensor | None
    shown: Tensor


class SpeculativeBatch(Batch):
    """Decoding batch whose members may each have a draft.

    A member without a draft brings one token to every round. Greedy answers are those without drafts, sampled ones
    have the target's distribution. While no draft pays, steps are those of :class:`Batch`.

    Args:
        parts: the target.
        config: how many tokens are drafted.

    Raises:
        ValueError: answers cannot be batched, or not with these drafts: see :func:`.strategies.why_drafts_alone`.
    """

    _member = DraftingMember
    _members: list[DraftingMember]

    def __init__(self, parts: ModelParts, config: SpeculativeConfig):
        super().__init__(parts)
        if obstacle := why_drafts_alone(config):
            raise ValueError(f"cannot batch answers with drafts: {obstacle}")
        self._pace = BatchPace(config.num_draft_tokens, config.keep_losing_draft)
        self._runners: dict[tuple[nn.Module, ...], BatchRunner] = {}  # of draft models, by their layers

    def join(self, state: PrefilledPrompt, request: Request, draft: Draft | None = None) -> DraftingMember:
        """Add a prefilled prompt as :meth:`Batch.join` does.

        Args:
            draft: built for a batch (:attr:`.draft.DraftTask.in_batch`), in the current stream; None: no draft.
        """
        member = super().join(state, request)
        if draft is None:
            return member
        if member.answer.sampling.looks_back:
            member.stats.switch_off(LOOKS_BACK, 0)
            return member
        member.draft = MemberDraft(draft, None, 0, Acceptance())
        if self._stream is not None:  # the draft's prefill follows the target's
            member.answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        return member

    def _take_in(self) -> None:
        super()._take_in()
        for member in self._members:
            model = None if member.draft is None or member.kv is None else member.draft.draft.drafter.model
            if model is not None and member.draft.kv is None:
                try:
                    member.draft.kv = self._own(model.layers, model.position)
                except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
                    member.drop_draft(f"{error}")

    def _may_run_ahead(self) -> bool:
        return super()._may_run_ahead() and self._windows() is None

    def _windows(self) -> dict[DraftingMember, int] | None:
        """Choose the length of every draft; None: none pays at this batch size."""
        drafting = [member for member in self._members if member.draft is not None and member.kv is not None]
        going = sum(member.kv is not None for member in self._members)
        windows = self._pace.windows(going, [member.draft.acceptance.rate for member in drafting])
        return None if windows is None else dict(zip(drafting, windows, strict=True))

    def _advance(self) -> tuple[list[Member], Arriving]:
        if self._given is None:
            for member in self._members:  # take back what was drafted and not accepted, or of a round that failed
                if member.kv is not None:
                    member.kv.num_run = len(member.tokens) - 1
                    if member.draft is not None and member.draft.kv is not None:
                        member.draft.kv.num_run = min(member.draft.kv.num_run, member.kv.num_run)
            windows = self._windows()
            if windows is not None:
                return self._round(windows)
        return super()._advance()

    def _round(self, windows: Mapping[DraftingMember, int]) -> tuple[list[Member], Arriving]:
        """Queue a round; return its sequences, and a function that waits for their tokens."""
        began, device = time.perf_counter(), self._parts.device
        # The target adds a token.
        windows = {member: min(count, member.answer.num_left - 1) for member, count in windows.items()}
        going = [m for m in self._members if m.goes_on and self._has_room(m, 1 + windows.get(m, 0))]
        if not going:
            return [], list
        drafted = self._draft([member for member in going if windows.get(member)], windows)
        last = to_device([member.tokens[-1] for member in going], device, torch.int64).split(1)
        ids, counts = [], [1 + (len(drafted[m].tokens) if m in drafted else 0) for m in going]
        for member, row in zip(going, last, strict=True):
            ids += [row, drafted[member].tokens] if member in drafted else [row]
        logits = self._runner.run(torch.cat(ids), [member.kv for member in going], counts)
        rows = dict(zip(going, logits.split(counts), strict=True))
        decided = {member: _decide(member.answer, drafted[member], rows[member]) for member in drafted}
        if plain := [member for member in going if member not in drafted]:
            choice = self._choose(plain, torch.cat([rows[member] for member in plain]))
            accepted = torch.zeros_like(choice.tokens)
            numbers = torch.stack([accepted, choice.tokens, choice.are_finite.long()], dim=1)
            decided |= zip(plain, numbers, strict=True)
        shown = [drafted[member].shown for member in going if member in drafted]
        read = fetch(torch.cat([*(decided[member] for member in going), *shown]))

        def arrive() -> list[list[int]]:
            numbers, new = iter(read()), []
            self._pace.learn(len(going), sum(counts) - len(going), time.perf_counter() - began)
            decisions = [list(islice(numbers, 3)) for _ in going]
            for member, count, (num_accepted, token, is_finite) in zip(going, counts, decisions, strict=True):
                found = list(islice(numbers, count - 1))
                tokens = [max(number, -1 - number) for number in found[:num_accepted]]
                new.append([*tokens, token] if is_finite else [NO_TOKEN])
                if found:
                    member.learn(len(found), num_accepted, min(found) >= 0)
            return new

        return going, arrive

    def _draft(
        self, members: Sequence[DraftingMember], windows: Mapping[DraftingMember, int]
    ) -> dict[DraftingMember, Drafted]:
        """Draft for members; of those that are left out the draft failed, or found nothing."""
        found: dict[DraftingMember, Drafted] = {}
        together: dict[BatchRunner, list[DraftingMember]] = {}
        for member in members:
            own, window, known = member.draft, windows[member], len(member.tokens) - 1
            try:
                if own.kv is None:
                    proposal = own.draft.drafter.propose(member.tokens, Tree.chain(window))
                    tokens = to_device(proposal.tokens, self._parts.device, torch.int64)
                    if len(tokens):
                        found[member] = Drafted(tokens, proposal.q, tokens)
                    continue
                own.kv.make_room(known + window - own.kv.num_run)
            except (NotFiniteError, RuntimeError) as error:  # the latter out of memory
                member.drop_draft(f"it gave {error}")
                continue
            if own.draft.takes_target_kv:
                own.kv.num_run = own.num_copied
                own.kv.copy_newest(member.kv, known - own.num_copied)
                own.num_copied = known
            together.setdefault(self._runner_of(own.draft.drafter.model.parts), []).append(member)
        for runner, group in together.items():
            found |= _chains(runner, sorted(group, key=windows.get, reverse=True), windows)
        return found

    def _runner_of(self, parts: ModelParts) -> BatchRunner:
        """Return a draft model's runner; that of answers whose drafts have the same layers is the same."""
        layers = tuple(parts.language_model.layers)
        if layers not in self._runners:
            self._runners[layers] = BatchRunner(parts)
        return self._runners[layers]


def _chains(
    runner: BatchRunner, members: Sequence[DraftingMember], windows: Mapping[DraftingMember, int]
) -> dict[DraftingMember, Drafted]:
    """Draft chains with one model, the longest windows first, without synchronization."""
    model, kvs = members[0].draft.draft.drafter.model, [member.draft.kv for member in members]
    missing = [member.tokens[kv.num_run :] for member, kv in zip(members, kvs, strict=True)]
    counts, levels = [*map(len, missing)], []
    ids = [token if token < model.parts.vocab_size else 0 for tokens in missing for token in tokens]
    for level in range(windows[members[0]]):
        drafting = [member for member in members if windows[member] > level]
        if level:
            logits = runner.run(ids[: len(drafting)], kvs[: len(drafting)])
        else:
            ends = [end - 1 for end in accumulate(counts)]
            logits = runner.run(ids, kvs, counts)[to_device(ends, model.parts.device)]
        answers = [member.answer for member in drafting]
        places = [answer.next_index + level for answer in answers]
        samplings = [answer.sampling for answer in answers]
        levels.append(choose_each(logits[:, : model.vocab_size], samplings, places, PURPOSE_DRAFT))
        ids = levels[-1][0].tokens  # which the CPU does not know yet
    found = {}
    for row, member in enumerate(members):
        chosen = levels[: windows[member]]
        tokens = torch.stack([choice.tokens[row] for choice, _ in chosen])
        are_finite = torch.stack([choice.are_finite[row] for choice, _ in chosen])
        q = None if chosen[0][1][row] is None else torch.stack([drawn_from[row] for _, drawn_from in chosen])
        found[member] = Drafted(tokens, q, tokens.where(are_finite, -1 - tokens))
    return found


def _decide(answer: Answer, drafted: Drafted, rows: Tensor) -> Tensor:
    """Verify drafted tokens by the target's logits ``[γ + 1, V]``; see :func:`decide_window`."""
    index = answer.next_index
    allowed = answer.allowed(rows, range(index, index + len(rows)))
    decision = decide_window(drafted.tokens, drafted.q, allowed, index, answer.sampling)
    if answer.sampling.logprobs is not None:
        is_accepted = torch.arange(len(rows), device=rows.device) < decision[0]
        answer.tell_of(rows, functional.pad(drafted.tokens, (0, 1)).where(is_accepted, decision[1]))
    return decision
