"""Continuous batching: decodes several answers at a time, one token of each per forward pass.

The newest tokens of all answers are rows of one input, ``[1, R]``, each at its own rotary position,
so that the model's matrix products have R rows. Attention reads the KV of each row's own prompt in
place.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hosts.exchange import describe_error
from ..input.request import Request
from ..kv.cache import GrowingLayer
from ..model.parts import ModelParts
from ..transfer import side_stream, to_device
from .answer import NO_TOKEN, Answer, finish_reason
from .batch_steps import BatchRunner, OwnKV
from .sampling import Choice, choose_each


class PrefilledPrompt(Protocol):
    """A prompt whose KV is computed, such as :class:`apbv.PrefillResult`."""

    def begin_answer(self, parts: ModelParts, request: Request) -> Answer:
        """Begin an answer to this prompt, without tokens."""


class Member:
    """Sequence in a batch: one answer being decoded.

    Attributes:
        tokens: the answer so far, an end token included.
        finish_reason: ``"stop"`` or ``"length"`` once the answer is complete; None before, and if
            it was aborted.
        error: why the answer failed; None if it did not.
        kv: the answer's KV; None before the prefill is done, and after the answer's end.
    """

    def __init__(self, answer: Answer):
        self.tokens = answer.tokens
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.answer: Answer | None = answer
        self.kv: OwnKV | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no token follows: the answer is complete, failed or was aborted."""
        return self.answer is None

    @property
    def goes_on(self) -> bool:
        """Whether another token follows the chosen ones, judging by their number."""
        return self.kv is not None and self.kv.num_run + 1 < self.answer.sampling.max_new_tokens

    def add(self, new: Sequence[int]) -> None:
        """Append the next tokens, which may end the answer; :data:`~.answer.NO_TOKEN` makes it
        fail."""
        answer = self.answer
        try:
            answer.require_token(new[-1])
            new, is_last = answer.cut(new)
            answer.add(new)
        except Exception as error:  # whatever it is, it affects no other answer
            self.end(error)
            return
        if is_last:
            self.finish_reason = finish_reason(self.tokens, answer.sampling, answer.eos_token_ids)
            self.end()

    def summary(self) -> dict[str, Any] | None:
        """Return speculation metrics; None without speculation."""
        return None

    def end(self, error: Exception | None = None) -> None:
        """Release the KV; no token follows."""
        # The frames of an error's traceback hold the KV, and this member, which holds the error.
        self.error = None if error is None else error.with_traceback(None)
        self.answer = self.kv = None


# A step that was queued on the device: its sequences and their tokens.
Given = tuple[list[Member], Choice]
# Waits for the new tokens of each sequence of a step.
Arriving = Callable[[], list[list[int]]]


class Batch:
    """Decoding batch of one host, which sequences join and leave between steps.

    One thread uses it. Another may prefill with the same model meanwhile, if
    :func:`apbv.model.attention.apbv_attention` is in force around both.

    On a GPU the batch has its own stream, which a prefill in another stream does not block. Each
    step is queued before the CPU has read the tokens of the last; results after an answer's end are
    ignored.

    Args:
        parts: the model.

    Raises:
        ValueError: answers of this model cannot be batched; see :func:`why_not_together`.
    """

    _member: ClassVar[type[Member]] = Member

    def __init__(self, parts: ModelParts):
        if obstacle := why_not_together(parts):
            raise ValueError(f"cannot batch answers: {obstacle}")
        self._parts, self._runner = parts, BatchRunner(parts)
        self._members: list[Member] = []
        self._given: Given | None = None  # a step whose tokens have not been read yet
        self._runs_ahead = parts.device.type == "cuda"
        # The few small kernels of a step take precedence over a prefill's waiting kernels.
        self._stream = (
            side_stream(parts.device, "decoding", priority=-1) if self._runs_ahead else None
        )

    def __len__(self) -> int:
        return len(self._members)

    def join(self, state: PrefilledPrompt, request: Request) -> Member:
        """Add a prefilled prompt, without copying its KV.

        The prefill may still run on the GPU without blocking other sequences: the answer begins
        with the first step after it. The request's ``on_token`` and ``stop`` are called in the
        thread that steps.

        Raises:
            ValueError: the KV is not gathered on this host.
        """
        answer = state.begin_answer(self._parts, request)
        if not isinstance(answer.decoder.cache, DynamicCache):
            raise ValueError("batched decoding needs KV that is gathered on this host")
        if answer.ready is None and self._stream is not None:
            answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        self._members.append(member := self._member(answer))
        return member

    def leave(self, member: Member) -> None:
        """End an answer early, if it has not ended, and free its KV."""
        if member in self._members:
            self._members.remove(member)
            member.end()

    @torch.no_grad()
    def step(self) -> list[Member]:
        """Decode the next token of every sequence; if some have just joined, only the first tokens
        of these.

        First tokens come from a prefill's logits, the others from a forward pass over all
        sequences. On a GPU the latter may be delivered a step late. A sequence fails alone if its
        logits are NaN or infinite, its KV cannot grow, or one of its callbacks raises.

        Returns:
            The members that got a token or failed. Those that have ended are no longer in the
            batch.

        Raises:
            RuntimeError, ...: raised by the model's forward pass. No sequence got a token, and all
            can continue.
        """
        with torch.cuda.stream(self._stream):  # and on its GPU; None changes nothing
            self._take_in()
            fresh = [
                member for member in self._members if member.kv is not None and not member.tokens
            ]
            if fresh:
                choice = self._choose(
                    fresh, torch.stack([member.answer.logits for member in fresh])
                )
                chosen = fresh
                arriving = _fetch(choice)
            else:
                chosen, arriving = self._advance()
        for member, new in zip(chosen, arriving(), strict=True):
            if not member.has_ended:  # as with those that left meanwhile, or ran out of memory
                member.add(new)
        advanced = [member for member in self._members if member.has_ended or member in chosen]
        self._members = [member for member in self._members if not member.has_ended]
        return advanced

    def step_or_drop(self) -> None:
        """Decode as :meth:`step`; if it fails, the youngest sequence does: its memory may be what
        is missing."""
        try:
            self.step()
        except Exception as error:  # whose frames, and those of its causes, hold KV
            self._members.pop().end(RuntimeError(describe_error(error)))

    def _advance(self) -> tuple[list[Member], Arriving]:
        """Queue the next work on the device; return its sequences, and a function that waits for
        their tokens."""
        if self._given is not None and all(member.has_ended for member in self._given[0]):
            self._given = None
        self._given = self._given or self._give()
        if self._given is None:
            return [], list
        members, choice = self._given
        arriving = _fetch(choice)
        # If this raises, the arriving tokens are fetched again.
        self._given = (
            self._give(self._given) if self._runs_ahead and self._may_run_ahead() else None
        )
        return members, arriving

    def _may_run_ahead(self) -> bool:
        """Return whether the next step needs none of the arriving tokens on the CPU."""
        going = (member.answer for member in self._members if not member.has_ended)
        return not any(answer.sampling.is_constrained for answer in going)

    def _give(self, before: Given | None = None) -> Given | None:
        """Run the model on every sequence's newest token and choose the next; None if none is
        needed.

        Args:
            before: the step whose tokens the CPU does not know yet.
        """
        rows = {} if before is None else {member: row for row, member in enumerate(before[0])}
        going = [member for member in self._members if member.goes_on and self._has_room(member)]
        if not going:
            return None
        if going == list(rows):
            ids = before[1].tokens
        else:
            known = [member for member in going if member not in rows]
            ids = [member.tokens[-1] for member in known]
            if len(known) < len(going):
                places = rows | {member: len(rows) + i for i, member in enumerate(known)}
                device = self._parts.device
                newest = torch.cat([before[1].tokens, to_device(ids, device, torch.int64)])
                ids = newest[to_device([places[member] for member in going], device)]
        logits = self._runner.run(ids, [member.kv for member in going])
        try:
            arriving = [
                ids[row : row + 1] if member in rows else () for row, member in enumerate(going)
            ]
            return going, self._choose(going, logits, arriving)
        except Exception:
            for member in going:  # the same rows are written again
                member.kv.num_run -= 1
            raise

    def _has_room(self, member: Member, count: int = 1) -> bool:
        """Make room for a sequence's next rows, or mark it as failed."""
        try:
            member.kv.make_room(count)
        except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
            member.end(error)
        return not member.has_ended

    def _choose(self, members: Sequence[Member], logits: Tensor, arriving: Sequence = ()) -> Choice:
        """Choose the next token of each sequence from its row of logits ``[R, V]``.

        Args:
            arriving: of each the token before, int64 ``[1]``, if the CPU does not know it yet, else
                nothing.
        """
        answers = [member.answer for member in members]
        counts = [member.kv.num_run for member in members]
        places = [answer.prompt_len + count for answer, count in zip(answers, counts, strict=True)]
        given = logits.split(1)
        each = zip(answers, given, places, arriving or [()] * len(answers), strict=True)
        allowed = [answer.allowed(row, [place], before) for answer, row, place, before in each]
        if any(row is not before for row, before in zip(allowed, given, strict=True)):
            logits = torch.cat(allowed)
        choice, _ = choose_each(logits, [answer.sampling for answer in answers], places)
        for answer, row, token in zip(answers, given, choice.tokens.split(1), strict=True):
            answer.tell_of(row, token)
        return choice

    def _take_in(self) -> None:
        """Take the KV of finished prefills; wait for the first if nothing else can run."""
        for member in [
            member for member in self._members if member.kv is None and not member.has_ended
        ]:
            answer = member.answer
            ready = member.answer.ready
            if ready is not None and not ready.query():
                if any(other.kv is not None for other in self._members):
                    continue
                ready.synchronize()
            if self._stream is not None:
                answer.logits.record_stream(self._stream)
            try:
                member.kv = self._own(answer.decoder.cache.layers, answer.decoder.next_position)
            except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
                member.end(error)

    def _own(self, layers: Sequence[GrowingLayer], position: int) -> OwnKV:
        """Take over KV that was computed in another stream."""
        if self._stream is not None:  # its memory has to last as long as this stream uses it
            for tensor in (states for layer in layers for states in (layer.keys, layer.values)):
                tensor.record_stream(self._stream)
        return OwnKV(layers, position)


def _fetch(choice: Choice) -> Arriving:
    """Start to copy chosen tokens to the CPU; the returned function waits for them."""
    read = choice.fetch()
    return lambda: [
        [token if is_finite else NO_TOKEN] for token, is_finite in zip(*read(), strict=True)
    ]


def why_not_together(parts: ModelParts) -> str | None:
    """Return why answers of a model cannot be decoded in one batch, or None if they can."""
    if parts.tensor_parallel[1] > 1:
        return "a host's processes have a share of the model each, and take every step together"
    if parts.sizes.linear is not None:
        return "linear attention layers keep a state for every answer, and these are not batched"
    if parts.rope_by_length is not None:
        return (
            "the model's rotary frequencies depend on the length of a sequence "
            f"({parts.rope_by_length})"
        )
    return None
