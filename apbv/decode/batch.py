"""Continuous batching: decodes several answers at a time, one token of each per forward pass.

The newest tokens of all answers are rows of one input, ``[1, R]``, each at its own rotary position,
so that the model's matrix products have R rows. Attention reads the KV of each row's own prompt in
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ..device.copies import side_stream, to_device
from ..errors import InvalidConfigError, without_frames
from ..kv.cache import GrowingLayer, growing_layers
from ..model.linear_attention import LinearStates
from ..model.parts import ModelParts
from ..pending import Pending
from ..request.result import FinishReason
from ..runner.answer_states import AnswerStates
from ..runner.batch_steps import BatchRunner, OwnKV
from .answer import NO_TOKEN, Answer, finish_reason
from .sampling import Choice, choose_each


class Member:
    """Sequence in a batch: one answer being decoded.

    Attributes:
        tokens: the answer so far, an end token included.
        logprobs: of each token, if they were asked for.
        has_ended: whether no token follows: the answer is complete, failed or was aborted.
        finish_reason: ``"stop"`` or ``"length"`` once the answer is complete; None before, and if
            it was aborted.
        error: why the answer failed; None if it did not.
        kv: the answer's KV; None before the prefill is done, and after the answer's end.
    """

    def __init__(self, answer: Answer):
        self.tokens = answer.tokens
        self.logprobs = answer.logprobs
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.has_ended = False
        self.kv: OwnKV | None = None
        self._answer: Answer | None = answer

    @property
    def answer(self) -> Answer:
        """The decoding state of the answer, until its end."""
        if self._answer is None:
            raise RuntimeError("the answer has ended")
        return self._answer

    @property
    def running_kv(self) -> OwnKV:
        """The KV of an answer that runs."""
        if self.kv is None:
            raise RuntimeError("the answer has no KV yet, or any more")
        return self.kv

    @property
    def may_go_on(self) -> bool:
        """Whether the answer may have another token behind the chosen ones."""
        # One was chosen from the prefill's logits, and one behind each that was run. The CPU may
        # not know the newest one yet.
        return self.kv is not None and self.kv.num_run + 1 < self.answer.max_new_tokens

    def add(self, new: Sequence[int]) -> None:
        """Append the next tokens, which may end the answer.

        :data:`~.answer.NO_TOKEN` makes it fail.
        """
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
        self.error = None if error is None else without_frames(error)
        self.has_ended = True
        self._answer = None
        self.kv = None


@dataclass(frozen=True)
class QueuedStep:
    """A step that was queued on the device, and whose tokens the CPU has not read yet.

    Attributes:
        members: its sequences.
        choice: the next token of each, in their order.
    """

    members: list[Member]
    choice: Choice

    def has_any(self) -> bool:
        """Return whether a sequence still needs its token."""
        return not all(member.has_ended for member in self.members)


# The new tokens of each sequence of a step.
ArrivingTokens = Pending[list[list[int]]]


class Batch:
    """Decoding batch of one host, which sequences join and leave between steps.

    One thread uses it. Another may prefill with the same model meanwhile, if
    :func:`apbv.model.attention.apbv_attention` is in force around both.

    On a GPU the batch has its own stream, which a prefill in another stream does not block. Each
    step is queued before the CPU has read the tokens of the last; results after an answer's end are
    ignored.

    Args:
        parts: the model.

    Attributes:
        runs_ahead: whether a step is queued before the last one's tokens are known on the CPU.

    Raises:
        InvalidConfigError: answers of this model cannot be batched; see
            :func:`model_batching_obstacle`.
    """

    _member: ClassVar[type[Member]] = Member

    def __init__(self, parts: ModelParts):
        if obstacle := model_batching_obstacle(parts):
            raise InvalidConfigError(f"cannot batch answers: {obstacle}")
        self._parts = parts
        self._runner = BatchRunner(parts)
        self._members: list[Member] = []
        self._queued: QueuedStep | None = None
        self.runs_ahead = parts.device.type == "cuda"
        # The few small kernels of a step take precedence over a prefill's waiting kernels.
        self._stream = (
            side_stream(parts.device, "decoding", priority=-1) if self.runs_ahead else None
        )

    def __len__(self) -> int:
        return len(self._members)

    def join(self, answer: Answer, draft: None = None) -> Member:
        """Add an answer that has no tokens yet, without copying its prompt's KV.

        The prefill may still run on the GPU without blocking other sequences: the answer begins
        with the first step after it. Its ``on_token`` and sink are called in the thread that
        steps.

        Args:
            answer: from :func:`~.answer.begin_answer`.
            draft: none here; :class:`apbv.speculate.loops.speculative_batch.SpeculativeBatch` takes
                one.

        Raises:
            InvalidConfigError: the KV is not gathered on this host, or the answer attends to a part
                of it.
        """
        if not isinstance(answer.decoder.cache, DynamicCache):
            raise InvalidConfigError("batched decoding needs KV that is gathered on this host")
        if answer.decoder.prunes:
            raise InvalidConfigError("an answer with decode_ratio cannot be batched")
        if answer.ready is None and self._stream is not None:
            answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        member = self._member(answer)
        self._members.append(member)
        return member

    def leave(self, member: Member) -> None:
        """End an answer early, if it has not ended, and free its KV."""
        if member in self._members:
            self._members.remove(member)
            member.end()

    @torch.no_grad()
    def step(self) -> list[Member]:
        """Decode the next token of every sequence.

        Sequences that have just joined get their first token in a step of their own.

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
                logits = torch.stack([member.answer.logits for member in fresh])
                choice = self._choose(fresh, logits)
                stepped = fresh
                arriving = _start_reading(choice)
            else:
                stepped, arriving = self._advance()
        for member, new_tokens in zip(stepped, arriving.wait(), strict=True):
            # Some may have left meanwhile, or run out of memory.
            if not member.has_ended:
                member.add(new_tokens)
        advanced = [member for member in self._members if member.has_ended or member in stepped]
        self._members = [member for member in self._members if not member.has_ended]
        return advanced

    def step_or_drop(self) -> None:
        """Decode a step; if it raises, fail only the youngest sequence.

        That one's memory may be what is missing.
        """
        try:
            self.step()
        except Exception as error:
            self._members.pop().end(error)

    def _advance(self) -> tuple[list[Member], ArrivingTokens]:
        """Queue the next work on the device.

        Returns:
            Its sequences, and their tokens.
        """
        if self._queued is not None and not self._queued.has_any():
            self._queued = None
        if self._queued is None:
            self._queued = self._queue_step()
        if self._queued is None:
            return [], Pending(lambda: [])
        step = self._queued
        arriving = _start_reading(step.choice)
        # If queueing raises, the step stays in place, and its tokens are read again.
        following = None
        if self.runs_ahead and self._may_run_ahead():
            following = self._queue_step(step)
        self._queued = following
        return step.members, arriving

    def _may_run_ahead(self) -> bool:
        """Return whether the next step needs none of the queued tokens on the CPU."""
        for member in self._members:
            if not member.has_ended and member.answer.sampling.is_constrained:
                return False
        return True

    def _queue_step(self, previous: QueuedStep | None = None) -> QueuedStep | None:
        """Run the model on every sequence's newest token and choose the next.

        None if no sequence needs one.

        Args:
            previous: the step whose tokens the CPU does not know yet.
        """
        members = []
        for member in self._members:
            if member.may_go_on and self._make_room_or_end(member):
                members.append(member)
        if not members:
            return None
        row_of: dict[Member, int] = {}
        if previous is not None:
            row_of = {member: row for row, member in enumerate(previous.members)}
        newest_tokens = self._newest_tokens(members, previous, row_of)
        logits = self._runner.run(newest_tokens, [member.running_kv for member in members])
        try:
            # Of each sequence the token before, where the CPU does not know it yet.
            unread = [
                newest_tokens[row : row + 1] if member in row_of else ()
                for row, member in enumerate(members)
            ]
            return QueuedStep(members, self._choose(members, logits, unread))
        except Exception:
            # The next attempt writes the same rows of KV.
            for member in members:
                member.running_kv.num_run -= 1
            raise

    def _newest_tokens(
        self, members: list[Member], previous: QueuedStep | None, row_of: dict[Member, int]
    ) -> Tensor | list[int]:
        """Return the newest token of every sequence, ``[R]``.

        It is on the device if the CPU does not know all of them.

        Args:
            members: the sequences.
            previous: the step whose tokens the CPU does not know yet.
            row_of: the rows of that step's sequences.
        """
        # All on the device, in order: as in most steps.
        if previous is not None and members == previous.members:
            return previous.choice.tokens
        # All on the CPU.
        known = [member for member in members if member not in row_of]
        tokens_of_known = [member.tokens[-1] for member in known]
        if previous is None or len(known) == len(members):
            return tokens_of_known
        # Some here, some there: the known ones come after the rows of the previous step.
        device = self._parts.device
        tokens = torch.cat(
            [previous.choice.tokens, to_device(tokens_of_known, device, torch.int64)]
        )
        rows = dict(row_of)
        for number, member in enumerate(known):
            rows[member] = len(row_of) + number
        return tokens[to_device([rows[member] for member in members], device)]

    def _make_room_or_end(self, member: Member, count: int = 1) -> bool:
        """Make room for a sequence's next rows; return false if there is none, which ends it."""
        try:
            member.running_kv.make_room(count)
        except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
            member.end(error)
        return not member.has_ended

    def _choose(
        self, members: Sequence[Member], logits: Tensor, unread_tokens: Sequence = ()
    ) -> Choice:
        """Choose the next token of each sequence from its row of logits ``[R, V]``.

        Args:
            unread_tokens: of each sequence the token before the one to choose, int64 ``[1]`` on
                the device, or ``()`` if it is among the sequence's tokens already. Empty: all are.
        """
        answers = [member.answer for member in members]
        indices = [member.answer.prompt_len + member.running_kv.num_run for member in members]
        logit_rows = logits.split(1)

        # Bias, penalties and grammars.
        allowed_rows = []
        for row, answer in enumerate(answers):
            unread = unread_tokens[row] if unread_tokens else ()
            allowed_rows.append(answer.allowed(logit_rows[row], [indices[row]], unread))
        # What nothing changes is returned as it is.
        is_changed = any(
            allowed is not unchanged
            for allowed, unchanged in zip(allowed_rows, logit_rows, strict=True)
        )
        if is_changed:
            logits = torch.cat(allowed_rows)

        choice, _ = choose_each(logits, [answer.sampling for answer in answers], indices)
        for answer, row, token in zip(answers, logit_rows, choice.tokens.split(1), strict=True):
            answer.tell_of(row, token)
        return choice

    def _take_in(self) -> None:
        """Take the KV of finished prefills; wait for the first if nothing else can run."""
        waiting = [member for member in self._members if member.kv is None and not member.has_ended]
        for member in waiting:
            answer = member.answer
            ready = answer.ready
            if ready is not None and not ready.query():
                if any(other.kv is not None for other in self._members):
                    continue
                ready.synchronize()
            if self._stream is not None:
                answer.logits.record_stream(self._stream)
            try:
                decoder = answer.decoder
                layers = growing_layers(decoder.require_cache())
                member.kv = self._own(layers, decoder.next_position, decoder.prompt_states)
            except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
                member.end(error)

    def _own(
        self,
        layers: Sequence[GrowingLayer],
        position: int,
        states: LinearStates | None,
        kind: type[OwnKV] | None = None,
    ) -> OwnKV:
        """Take over KV, and a hybrid's states, that were computed in another stream.

        Args:
            kind: the class of a draft's; None: :class:`OwnKV`.
        """
        if self._stream is not None:
            # Its memory has to last as long as this stream uses it.
            tensors = []
            for layer in layers:
                tensors += [layer.keys, layer.values]
            for of_layer in () if states is None else states.tensors:
                tensors += of_layer
            for tensor in tensors:
                tensor.record_stream(self._stream)
        kind = kind or OwnKV
        return kind(layers, position, None if states is None else AnswerStates(states))


def _start_reading(choice: Choice) -> ArrivingTokens:
    """Start to copy chosen tokens to the CPU.

    A row without a token to choose gives :data:`~.answer.NO_TOKEN`.
    """

    def as_new_tokens(read: list[list[int]]) -> list[list[int]]:
        tokens, are_finite = read
        return [
            [token if is_finite else NO_TOKEN]
            for token, is_finite in zip(tokens, are_finite, strict=True)
        ]

    return choice.fetch().then(as_new_tokens)


def model_batching_obstacle(parts: ModelParts) -> str | None:
    """Return why answers of a model cannot be decoded in one batch, or None if they can."""
    if parts.tensor_parallel[1] > 1:
        return "a host's processes have a share of the model each, and take every step together"
    if parts.rope_by_length is not None:
        return (
            "the model's rotary frequencies depend on the length of a sequence "
            f"({parts.rope_by_length})"
        )
    return None
