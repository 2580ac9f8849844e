"""Decodes several answers at a time, one token of each in every forward pass.

The newest tokens of all answers are rows of one input, ``[1, R]``, each at its own rotary position, so that the
model's matrix products are of R rows. Attention takes every row to the KV of its own prompt, where that lies.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ..input.request import Request
from ..model.parts import ModelParts
from ..transfer import side_stream, to_device
from .answer import NO_TOKEN, Answer, finish_reason
from .batch_steps import BatchRunner, OwnKV
from .sampling import Choice, choose_each

# Their frequencies depend on how long a sequence is, and one set of them is kept for all.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class PrefilledPrompt(Protocol):
    """A prompt whose KV is there, such as :class:`apbv.PrefillResult`."""

    def begin_answer(self, parts: ModelParts, request: Request) -> Answer:
        """Return an answer to this prompt that has no tokens yet."""


class Member:
    """One of the answers that a batch decodes.

    Attributes:
        tokens: the answer so far, an end token included.
        finish_reason: ``"stop"`` or ``"length"`` once the answer is complete; None before, and where it was left.
        error: why the answer has failed; None if it has not.
        kv: the answer's KV; None before the prompt's is there, and after the answer's end.
    """

    def __init__(self, answer: Answer):
        self.tokens = answer.tokens
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.answer: Answer | None = answer
        self.kv: OwnKV | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no token follows: the answer is complete, has failed, or was left."""
        return self.answer is None

    @property
    def goes_on(self) -> bool:
        """Whether another token follows those that are chosen, as far as their number says."""
        return self.kv is not None and self.kv.num_run + 1 < self.answer.sampling.max_new_tokens

    def add(self, token: int) -> None:
        """Take the next token, which may end the answer, or :data:`~.answer.NO_TOKEN`, which makes it fail."""
        answer = self.answer
        try:
            answer.require_token(token)
            _, is_last = answer.cut([token])
            answer.add([token])
        except Exception as error:  # whatever it is, it affects no other answer
            self.end(error)
            return
        if is_last:
            self.finish_reason = finish_reason(self.tokens, answer.sampling, answer.eos_token_ids)
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """Let go of the KV; no token follows."""
        # The frames of an error's traceback hold the KV, and this member, which holds the error.
        self.error = None if error is None else error.with_traceback(None)
        self.answer = self.kv = None


# A step that the device was given: whose tokens it chooses, and the tokens.
Given = tuple[list[Member], Choice]


class Batch:
    """Decodes the answers of its members, which join and leave between steps. It runs on host 0 alone.

    One thread uses it. Another may prefill with the same model meanwhile, if
    :func:`apbv.model.attention.apbv_attention` is in force around both.

    On a GPU the batch has a stream of its own, which no prefill in another stream holds up. The GPU is given each
    step before the host has read the tokens of the last; what it computes after an answer's end is ignored.

    Args:
        parts: the model.

    Raises:
        ValueError: answers of this model cannot be decoded together; see :func:`why_not_together`.
    """

    def __init__(self, parts: ModelParts):
        if obstacle := why_not_together(parts):
            raise ValueError(f"cannot batch answers: {obstacle}")
        self._parts, self._runner = parts, BatchRunner(parts)
        self._members: list[Member] = []
        self._given: Given | None = None  # a step whose tokens nobody has read yet
        self._runs_ahead = parts.device.type == "cuda"
        # The few small kernels of a step come before those of a prefill that wait for a processor.
        self._stream = side_stream(parts.device, "decoding", priority=-1) if self._runs_ahead else None

    def __len__(self) -> int:
        return len(self._members)

    def join(self, state: PrefilledPrompt, request: Request) -> Member:
        """Take a prefilled prompt, whose KV is not copied.

        The prefill may be under way on the GPU, and holds nobody else up: the answer begins with the first step
        after it. The request's ``on_token`` and ``stop`` are called in the thread that steps.

        Raises:
            ValueError: the KV is not gathered on this host.
        """
        answer = state.begin_answer(self._parts, request)
        if not isinstance(answer.decoder.cache, DynamicCache):
            raise ValueError("batched decoding needs KV that is gathered on this host")
        if answer.ready is None and self._stream is not None:
            answer.ready = torch.cuda.current_stream(self._parts.device).record_event()
        self._members.append(member := Member(answer))
        return member

    def leave(self, member: Member) -> None:
        """End an answer early, if it has not ended, and free its KV."""
        if member in self._members:
            self._members.remove(member)
            member.end()

    @torch.no_grad()
    def step(self) -> list[Member]:
        """Give every member its next token; those that have just joined get their first, and then nobody else.

        First tokens come from the logits of a prefill, others from a pass of the model over all members. On a GPU
        the second may come a step late. A member whose logits are NaN or infinite, whose KV finds no memory to
        grow, or one of whose callbacks raises, fails by itself.

        Returns:
            The members that got a token or failed. Those that have ended are no longer in the batch.

        Raises:
            RuntimeError, ...: what the model's forward pass raises. No member got a token, and all may go on.
        """
        with torch.cuda.stream(self._stream):  # and on its GPU; nothing changes where it is None
            self._take_in()
            fresh = [member for member in self._members if member.kv is not None and not member.tokens]
            if fresh:
                choice = self._choose(fresh, torch.stack([member.answer.logits for member in fresh]))
                chosen, arriving = fresh, choice.fetch()
            else:
                chosen, arriving = self._advance()
        for member, token, is_finite in zip(chosen, *arriving(), strict=True):
            if not member.has_ended:  # as those have that left meanwhile, or found no memory
                member.add(token if is_finite else NO_TOKEN)
        advanced = [member for member in self._members if member.has_ended or member in chosen]
        self._members = [member for member in self._members if not member.has_ended]
        return advanced

    def _advance(self) -> tuple[list[Member], Callable[[], tuple[list[int], list[int]]]]:
        """Give the device what it has to do now; return whose tokens are chosen, and what waits for them."""
        if self._given is not None and all(member.has_ended for member in self._given[0]):
            self._given = None
        self._given = self._given or self._give()
        if self._given is None:
            return [], lambda: ([], [])
        members, choice = self._given
        arriving = choice.fetch()
        # Where this raises, the tokens that arrive are fetched again.
        looks_back = any(member.answer.sampling.looks_back for member in self._members if not member.has_ended)
        self._given = self._give(self._given) if self._runs_ahead and not looks_back else None
        return members, arriving

    def _give(self, before: Given | None = None) -> Given | None:
        """Run the model on every member's newest token, and choose the next; None if nobody needs one.

        Args:
            before: the step whose tokens the host does not know yet.
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
                rows |= {member: len(rows) + i for i, member in enumerate(known)}
                device = self._parts.device
                newest = torch.cat([before[1].tokens, to_device(ids, device, torch.int64)])
                ids = newest[to_device([rows[member] for member in going], device)]
        return going, self._choose(going, self._runner.run(ids, [member.kv for member in going]))

    def _has_room(self, member: Member) -> bool:
        """Have room for a member's next row, or let it fail."""
        try:
            member.kv.make_room()
        except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
            member.end(error)
        return not member.has_ended

    def _choose(self, members: Sequence[Member], logits: Tensor) -> Choice:
        """Choose the next token of each member by its row of logits ``[R, V]``."""
        answers, counts = [member.answer for member in members], [member.kv.num_run for member in members]
        places = [answer.prompt_len + count for answer, count in zip(answers, counts, strict=True)]
        given = logits.split(1)
        allowed = [answer.allowed(row, [place]) for answer, row, place in zip(answers, given, places, strict=True)]
        if any(row is not before for row, before in zip(allowed, given, strict=True)):
            logits = torch.cat(allowed)
        choice = choose_each(logits, [answer.sampling for answer in answers], places)
        for answer, row, token in zip(answers, given, choice.tokens.split(1), strict=True):
            answer.tell_of(row, token)
        return choice

    def _take_in(self) -> None:
        """Take the KV of those whose prefill is done; wait for the first where there is nobody else."""
        for member in [member for member in self._members if member.kv is None and not member.has_ended]:
            answer, ready = member.answer, member.answer.ready
            if ready is not None and not ready.query():
                if any(other.kv is not None for other in self._members):
                    continue
                ready.synchronize()
            layers = answer.decoder.cache.layers
            if self._stream is not None:  # their memory has to last as long as this stream uses it
                for tensor in (answer.logits, *(states for each in layers for states in (each.keys, each.values))):
                    tensor.record_stream(self._stream)
            try:
                member.kv = OwnKV(layers, answer.decoder.next_position)
            except RuntimeError as error:  # out of memory, which on a CPU has no class of its own
                member.end(error)


def why_not_together(parts: ModelParts) -> str | None:
    """Return what keeps answers of a model from being decoded in one batch, or None if nothing does."""
    if parts.tensor_parallel[1] > 1:
        return "a host's processes have a share of the model each, and take every step together"
    rope = getattr(parts.language_model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        return f"the model's rotary frequencies depend on the length of a sequence ({rope['rope_type']})"
    return None
