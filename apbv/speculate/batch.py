"""Speculative decoding in a batch: answers draft and are verified together, each with its own
window.

A round is one pass of each draft model per drafted position, over the answers that draft there, and
one of the target over every answer's last token and drafted ones. All of it is queued on the
device, and waited for once.
"""

import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
from .drafters import ModelDrafter
from .pace import CONSTRAINED, Acceptance, Pace, SpeculationStats
from .strategies import why_drafts_alone
from .tree import Tree
from .verify import decide_window


class DraftingMember(Member):
    """Sequence in a batch that may have a draft.

    Attributes:
        draft: its draft, which has read the prompt; None if it has none, or no longer.
        draft_kv: the KV of a draft model; None before the prefill is done, and if the draft has no
            model.
        num_copied: if the target itself drafts: of how many tokens the draft has the target's KV.
        acceptance: how often drafted tokens were accepted.
        stats: speculation metrics.
    """

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self.draft: Draft | None = None
        self.draft_kv: OwnKV | None = None
        self.num_copied, self.acceptance, self.stats = 0, Acceptance(), SpeculationStats()

    def add(self, new: Sequence[int]) -> None:
        self.stats.num_target_forwards += bool(self.tokens)
        super().add(new)

    def summary(self) -> dict[str, Any]:
        """Return speculation metrics, without times: rounds are shared with others."""
        return self.stats.summary(len(self.tokens)) | dict.fromkeys(self.stats.times())

    def end(self, error: Exception | None = None) -> None:
        super().end(error)
        self.draft = self.draft_kv = None

    def drop_draft(self, why: str) -> None:
        """Go on without the draft, and free its KV."""
        self.draft = self.draft_kv = None
        self.stats.switch_off(why, len(self.tokens))

    def learn(self, num_drafted: int, num_accepted: int, is_finite: bool) -> None:
        """Learn from a round with drafted tokens."""
        self.stats.count(num_drafted, num_accepted)
        self.acceptance.learn(num_drafted, num_accepted)
        if not is_finite and self.draft is not None:
            self.drop_draft(f"it gave {NotFiniteError()}")


Windows = dict[DraftingMember, int]  # how many tokens members draft


class Drafted(NamedTuple):
    """Drafted tokens of one answer, on the device.

    Attributes:
        tokens: int64 ``[γ]``.
        shown: int64 ``[γ]``: the tokens; -1 minus it where the draft's logits are NaN or infinite.
        q: ``[γ, Vq]``, see :class:`.drafters.Proposal`.
    """

    tokens: Tensor
    shown: Tensor
    q: Tensor | None = None


class SpeculativeBatch(Batch):
    """Decoding batch whose members may each have a draft.

    A member without a draft brings one token to every round. Greedy answers are those without
    drafts, sampled ones have the target's distribution. While no draft pays, steps are those of
    :class:`Batch`.

    Args:
        parts: the target.
        config: how many tokens are drafted.

    Raises:
        ValueError: answers cannot be batched, or not with these drafts: see
            :func:`.strategies.why_drafts_alone`.
    """

    _member = DraftingMember
    _members: list[DraftingMember]

    def __init__(self, parts: ModelParts, config: SpeculativeConfig):
        super().__init__(parts)
        if obstacle := why_drafts_alone(config):
            raise ValueError(f"cannot batch answers with drafts: {obstacle}")
        # Of each batch size.
        self._pace = cache(partial(Pace, config.num_draft_tokens, config.keep_losing_draft))
        self._acceptance = Acceptance()  # of all drafts
        # By the identity of the parts of a model that drafts.
        self._draft_runners: dict[int, BatchRunner] = {}

    def join(
        self, state: PrefilledPrompt, request: Request, draft: Draft | None = None
    ) -> DraftingMember:
        """Add a prefilled prompt as :meth:`Batch.join` does.

        Args:
            draft: its draft, built in the current stream.
        """
        member = super().join(state, request)
        if draft is not None and member.answer.sampling.is_constrained:
            member.stats.switch_off(CONSTRAINED, 0)
        elif draft is not None:
            member.draft = draft
            # As others' drafts; if these are bad it is tried all the same.
            member.acceptance = Acceptance(expected=max(self._acceptance.rate, 0.5))
            if self._stream is not None:  # the draft's prefill follows the target's
                member.answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        return member

    def _take_in(self) -> None:
        super()._take_in()
        for member in self._members:
            drafter = None if member.draft is None or member.kv is None else member.draft.drafter
            if isinstance(drafter, ModelDrafter) and member.draft_kv is None:
                try:
                    member.draft_kv = self._own(drafter.cache.layers, drafter.position)
                except (
                    RuntimeError
                ) as error:  # out of memory, which on a CPU has no class of its own
                    member.drop_draft(str(error))

    def _may_run_ahead(self) -> bool:
        return super()._may_run_ahead() and self._windows() is None

    def _windows(self) -> Windows | None:
        """Choose the length of every draft; None: none pays at this batch size."""
        going = [member for member in self._members if member.kv is not None]
        drafting = [member for member in going if member.draft is not None]
        windows = drafting and self._pace(len(going)).windows(
            [member.acceptance.rate for member in drafting]
        )
        return dict(zip(drafting, windows, strict=True)) if windows else None

    def _advance(self) -> tuple[list[Member], Arriving]:
        if self._given is not None:
            return super()._advance()
        for member in (
            self._members
        ):  # take back what was drafted and not accepted, or of a round that failed
            if member.kv is not None:
                member.kv.num_run = len(member.tokens) - 1
                if member.draft_kv is not None:
                    member.draft_kv.num_run = min(member.draft_kv.num_run, member.kv.num_run)
        windows = self._windows()
        return super()._advance() if windows is None else self._round(windows)

    def _round(self, windows: Windows) -> tuple[list[Member], Arriving]:
        """Queue a round; return its sequences, and a function that waits for their tokens."""
        began = time.perf_counter()
        device = self._parts.device
        # The target adds a token.
        windows = {
            member: min(count, member.answer.num_left - 1) for member, count in windows.items()
        }
        going = [m for m in self._members if m.goes_on and self._has_room(m, 1 + windows.get(m, 0))]
        if not going:
            return [], list
        drafted = dict.fromkeys(
            going, Drafted(*torch.empty(2, 0, dtype=torch.int64, device=device))
        )
        drafted |= self._draft({member: windows[member] for member in going if windows.get(member)})
        newest = to_device([member.tokens[-1] for member in going], device, torch.int64).split(1)
        ids = [
            rows for m, row in zip(going, newest, strict=True) for rows in (row, drafted[m].tokens)
        ]
        counts = [1 + len(drafted[member].tokens) for member in going]
        logits = self._runner.run(torch.cat(ids), [member.kv for member in going], counts).split(
            counts
        )
        decisions = [
            _decide(m.answer, drafted[m], rows) for m, rows in zip(going, logits, strict=True)
        ]
        read = fetch(torch.cat([*decisions, *(drafted[member].shown for member in going)]))

        def arrive() -> list[list[int]]:
            numbers = iter(read())
            new = []
            self._pace(len(going)).learn(sum(counts) - len(going), 0.0, time.perf_counter() - began)
            decisions = [list(islice(numbers, 3)) for _ in going]
            for member, count, (num_accepted, token, is_finite) in zip(
                going, counts, decisions, strict=True
            ):
                shown = list(islice(numbers, count - 1))
                tokens = [max(number, -1 - number) for number in shown[:num_accepted]]
                new.append([*tokens, token] if is_finite else [NO_TOKEN])
                member.stats.rounds += member.draft is not None
                if shown:
                    member.learn(len(shown), num_accepted, min(shown) >= 0)
                    self._acceptance.learn(len(shown), num_accepted)
            return new

        return going, arrive

    def _draft(self, windows: Windows) -> dict[DraftingMember, Drafted]:
        """Draft for members; of those that are left out the draft failed."""
        found: dict[DraftingMember, Drafted] = {}
        by_runner: dict[BatchRunner, Windows] = {}
        for member, window in windows.items():
            draft = member.draft
            kv = member.draft_kv
            known = len(member.tokens) - 1
            try:
                if kv is None:
                    proposal = draft.drafter.propose(member.tokens, Tree.chain(window))
                    tokens = to_device(proposal.tokens, self._parts.device, torch.int64)
                    found[member] = Drafted(tokens, tokens, proposal.q)
                    continue
                kv.make_room(known + window - kv.num_run)
            except (NotFiniteError, RuntimeError) as error:  # the latter out of memory
                member.drop_draft(f"it gave {error}")
                continue
            if draft.runs(self._parts):
                kv.num_run = member.num_copied
                kv.copy_newest(member.kv, known - kv.num_run)
                member.num_copied = known
            runner = self._runner_of(draft.drafter.parts)
            by_runner.setdefault(runner, {})[member] = window
        for runner, together in by_runner.items():
            found |= _draft_chains(runner, together)
        return found

    def _runner_of(self, parts: ModelParts) -> BatchRunner:
        """Return the runner of a model over the newest tokens of the answers that it drafts for."""
        if parts is self._parts:
            return self._runner
        if id(parts) not in self._draft_runners:
            self._draft_runners[id(parts)] = BatchRunner(parts)
        return self._draft_runners[id(parts)]


def _draft_chains(runner: BatchRunner, windows: Windows) -> dict[DraftingMember, Drafted]:
    """Draft chains with the model, without synchronization; answers leave the passes by their
    windows."""
    members = sorted(windows, key=windows.get, reverse=True)
    drafter = members[0].draft.drafter
    kvs = [member.draft_kv for member in members]
    missing = [member.tokens[kv.num_run :] for member, kv in zip(members, kvs, strict=True)]
    ids = [
        token if token < drafter.parts.vocab_size else 0 for tokens in missing for token in tokens
    ]
    counts = [*map(len, missing)]
    levels = []
    ends = to_device([end - 1 for end in accumulate(counts)], drafter.parts.device)
    for level in range(windows[members[0]]):
        answers = [member.answer for member in members if windows[member] > level]
        if level:
            logits = runner.run(levels[-1][0].tokens[: len(answers)], kvs[: len(answers)])
        else:
            logits = runner.run(ids, kvs, counts)[ends]
        logits = logits[:, : drafter.vocab_size]
        if any(answer.penalties for answer in answers):
            rows = list(logits.split(1))
            for row, answer in enumerate(answers):
                if answer.penalties is not None:
                    drafted = (
                        torch.cat([chosen.tokens[row : row + 1] for chosen, _ in levels])
                        if levels
                        else ()
                    )
                    rows[row] = answer.penalties.penalised(rows[row], answer.tokens, drafted)
            logits = torch.cat(rows)
        samplings, places = zip(
            *((answer.sampling, answer.next_index + level) for answer in answers), strict=True
        )
        levels.append(choose_each(logits, samplings, places, PURPOSE_DRAFT))
    found = {}
    for row, member in enumerate(members):
        choices, drawn_from = zip(*levels[: windows[member]], strict=True)
        tokens, are_finite = (
            torch.stack([each[row] for each in of_all]) for of_all in zip(*choices, strict=True)
        )
        q = None if drawn_from[0][row] is None else torch.stack([each[row] for each in drawn_from])
        found[member] = Drafted(tokens, tokens.where(are_finite, -1 - tokens), q)
    return found


def _decide(answer: Answer, drafted: Drafted, rows: Tensor) -> Tensor:
    """Verify drafted tokens by the target's logits ``[γ + 1, V]``; see :func:`decide_window`."""
    index = answer.next_index
    allowed = answer.allowed(rows, range(index, index + len(rows)), drafted.tokens)
    decision = decide_window(drafted.tokens, drafted.q, allowed, index, answer.sampling)
    if answer.sampling.logprobs is not None:
        is_accepted = torch.arange(len(rows), device=rows.device) < decision[0]
        answer.tell_of(rows, functional.pad(drafted.tokens, (0, 1)).where(is_accepted, decision[1]))
    return decision
