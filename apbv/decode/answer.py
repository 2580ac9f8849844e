"""An answer that is being decoded, and autoregressive decoding."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..config import SamplingParams
from ..device.copies import fetch, to_device
from ..errors import ModelOutputError
from ..grammar.grammars import Grammar
from ..model.parts import ModelParts
from ..pending import Pending
from ..prefilling.result import PrefillResult
from ..request.logprobs import TokenLogprobs, log_probabilities
from ..request.request import Request
from ..request.result import FinishReason
from ..request.sink import AnswerSink
from ..runner.decoder import Decoder
from ..runner.dynamic_pruning import DynamicPruning
from .sampling import Choice, Penalties, biased, choose_each, forbid

NO_TOKEN = -1  # sent by host 0 to the others if NaN or infinite logits allow no token


@dataclass
class Answer:
    """Decoding state of one answer, the same on every host.

    It has the tokens so far, and what is needed to continue.

    Every decoding loop takes one and adds tokens to it.

    Attributes:
        decoder: runs the model; between two steps its KV covers all tokens so far except the last.
        logits: ``[V]``, from which the first token is chosen; on host 0 at least.
        prompt_len: n.
        sampling: sampling parameters, including the maximum number of tokens. A token's random
            number depends on the seed and on its index in the sequence.
        eos_token_ids: tokens that end the answer, and are its last, unless ``sampling`` says
            otherwise.
        on_token: called on every host with each token as soon as it is chosen.
        on_first_token: called on every host before the first of these calls.
        sink: receives the answer on host 0, and may end it there.
        prompt_ids: the prompt's token ids, for penalties; int64 ``[n]``.
        grammar: the compiled ``sampling.json_schema`` or ``grammar``, on host 0.
        ready: event that the GPU reaches after the prefill; None: the current stream's work comes
            first anyway.
        tokens: the answer so far.
        logprobs: of each token, on host 0, if ``sampling`` requests them; complete when the sink
            takes the answer.
    """

    decoder: Decoder
    logits: Tensor
    prompt_len: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    on_token: Callable[[int], None] | None = None
    on_first_token: Callable[[], None] | None = None
    sink: AnswerSink | None = None
    prompt_ids: Tensor | None = None
    grammar: Grammar | None = None
    ready: torch.cuda.Event | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # One for each call of `tell_of` that `cut` has not read yet.
    _pending_logprobs: deque[Pending[list]] = field(default_factory=deque, init=False)

    @property
    def next_index(self) -> int:
        """The index of the next token in the sequence, prompt included."""
        return self.prompt_len + len(self.tokens)

    @cached_property
    def max_new_tokens(self) -> int:
        """The maximum number of tokens, which ``sampling`` must have."""
        return self.sampling.require_max_new_tokens()

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be added."""
        return self.max_new_tokens - len(self.tokens)

    def cut(self, new: Sequence[int]) -> tuple[list[int], bool]:
        """Return the new tokens (at least one) up to the answer's end, and whether it ends there.

        It also records the log probabilities of these tokens. Call it on host 0.
        """
        num_before = len(self.tokens)
        # Of every new token, and perhaps of rejected ones after them.
        if self.sampling.logprobs is not None:
            arriving = self._pending_logprobs.popleft()
            self.logprobs += map(TokenLogprobs.unpack, arriving.wait())
            del self.logprobs[num_before + len(new) :]
        for count in range(1, len(new) + 1):
            if self._ends_with(new[:count]):
                del self.logprobs[num_before + count :]
                return list(new[:count]), True
        return list(new), False

    def _ends_with(self, new: Sequence[int]) -> bool:
        """Return whether the answer ends with the last of some new tokens."""
        if new[-1] in self.eos_token_ids and not self.sampling.ignore_eos:
            return True
        if len(new) >= self.num_left:
            return True
        return self.sink is not None and self.sink.take([*self.tokens, *new], self.logprobs)

    def add(self, new: Sequence[int]) -> None:
        """Append tokens, and call ``on_token`` with each."""
        if not self.tokens and self.on_first_token is not None:
            self.on_first_token()
        for token in new:
            self.tokens.append(token)
            if self.grammar is not None:
                self.grammar.take(token)
            if self.on_token is not None:
                self.on_token(token)

    def choose(self, logits: Tensor | None) -> tuple[int, bool]:
        """Return the next token, and whether the answer ends with it; on every host, collective.

        The leader chooses it, so that every host continues with the same token.

        Args:
            logits: ``[V]`` on host 0.

        Raises:
            ModelOutputError: the logits are NaN or infinite; on every host.
        """
        hosts = self.decoder.hosts
        if not hosts.is_leader:
            return self.agree(None)
        assert logits is not None  # the leader runs the model
        return self.agree(self.pick(logits, self.next_index).fetch(hosts.wait_for_device))

    def pick(self, logits: Tensor, index: int, drafted: Tensor | Sequence[int] = ()) -> Choice:
        """Choose the token of this index in the sequence from logits ``[V]``, on the device.

        Args:
            drafted: as of :meth:`allowed`.
        """
        choice, _ = choose_each(
            self.allowed(logits[None], [index], drafted), [self.sampling], [index]
        )
        self.tell_of(logits[None], choice.tokens)
        return choice

    def tell_of(self, logits: Tensor, tokens: Tensor | Sequence[int]) -> None:
        """Start to read the log probabilities of S tokens, for the next call of :meth:`cut`.

        That gets the first of these tokens. Call it on host 0.

        Args:
            logits: ``[S, V]``, as the model gave them.
        """
        if self.sampling.logprobs is not None:
            tokens_on_device = to_device(tokens, logits.device, torch.int64)
            top = log_probabilities(logits, tokens_on_device, self.sampling.logprobs)
            self._pending_logprobs.append(fetch(top))

    def allowed(
        self,
        logits: Tensor,
        indices: Sequence[int],
        drafted: Tensor | Sequence[int] = (),
        precede: Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[S, V]`` after bias, penalties and grammar.

        With a grammar, S is 1 and the index is that of the next token.

        Args:
            drafted, precede: tokens after those so far, as of
                :meth:`.sampling.Penalties.penalised`.
        """
        if self.sampling.logit_bias:
            logits = biased(logits, self.sampling.logit_bias)
        if self.penalties is not None:
            logits = self.penalties.penalised(logits, self.tokens, drafted, precede)
        if self.grammar is not None:
            logits = self.grammar.masked(logits)
        if self.sampling.min_tokens and self.eos_token_ids:
            may_end_at = self.prompt_len + self.sampling.min_tokens
            rows = [row for row, index in enumerate(indices) if index < may_end_at]
            if rows:
                logits = forbid(logits, rows, self.eos_token_ids)
        return logits

    @cached_property
    def penalties(self) -> Penalties | None:
        """Its penalties; None if there are none."""
        if not self.sampling.penalises:
            return None
        assert self.prompt_ids is not None  # whoever asks for penalties gives them
        return Penalties(self.sampling, self.prompt_ids, self.logits.shape[-1], self.logits.device)

    def agree(self, arriving: Pending[list[list[int]]] | None) -> tuple[int, bool]:
        """Return the token that host 0's device has chosen, as :meth:`choose` does; collective.

        Args:
            arriving: what :meth:`Choice.fetch` returned, on the leader.
        """
        chosen: list[int] | None = None
        if arriving is not None:
            tokens, are_finite = arriving.wait()
            if are_finite[0]:
                _, is_last = self.cut(tokens[:1])
                chosen = [tokens[0], int(is_last)]
            else:
                chosen = [NO_TOKEN, 1]
        token, has_ended = self.decoder.hosts.broadcast_ints(chosen, 2)
        self.require_token(token)
        return token, bool(has_ended)

    def require_token(self, token: int) -> None:
        """Reject :data:`NO_TOKEN`; called on every host with the token sent by host 0.

        Raises:
            ModelOutputError: the token is :data:`NO_TOKEN`.
        """
        if token == NO_TOKEN:
            raise ModelOutputError(
                f"the model gave NaN or infinite logits after {len(self.tokens)} tokens of its "
                "answer"
            )


def finish_reason(
    tokens: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> FinishReason:
    """Return why an answer ended: ``"length"`` at ``max_new_tokens``, else ``"stop"``."""
    at_end = tokens[-1] in eos_token_ids and not sampling.ignore_eos
    return "length" if len(tokens) == sampling.max_new_tokens and not at_end else "stop"


def decoder_behind(
    parts: ModelParts,
    prefill: PrefillResult,
    goes_back: bool = False,
    keeps_outputs: bool = False,
) -> Decoder:
    """Return the decoder of tokens that follow a prefilled prompt; see :class:`Decoder`."""
    pruning = None
    if prefill.decode_pruning is not None:
        is_visual = parts.is_visual(prefill.inputs.input_ids[0])
        pruning = DynamicPruning(prefill.decode_pruning, is_visual, parts.backend)
    return Decoder(parts, prefill.kv, prefill.next_position, pruning, goes_back, keeps_outputs)


def begin_answer(
    parts: ModelParts,
    prefill: PrefillResult,
    request: Request,
    goes_back: bool = False,
    keeps_outputs: bool = False,
) -> Answer:
    """Begin an answer to a prefilled prompt, without tokens.

    Args:
        goes_back: whether tokens may be rolled back and others follow them, as with drafts.
        keeps_outputs: whether the output of the last norm is kept, for a draft that reads it.
    """
    return Answer(
        decoder=decoder_behind(parts, prefill, goes_back, keeps_outputs),
        logits=prefill.logits[0],
        prompt_len=prefill.num_tokens,
        sampling=request.sampling,
        eos_token_ids=parts.eos_token_ids,
        on_token=request.on_token,
        on_first_token=prefill.timer.mark_first_token,
        sink=request.sink,
        prompt_ids=prefill.inputs.input_ids[0],
        grammar=None if request.grammar is None else request.grammar.copy(),
        ready=prefill.timer.prefilled.event,
    )


def generate_tokens(answer: Answer) -> list[int]:
    """Decode autoregressively until an end token (included), the maximum or ``stop``; collective.

    Returns:
        The answer's tokens.

    Raises:
        ModelOutputError: the model's logits are NaN or infinite; on every host.
    """
    token, has_ended = answer.choose(answer.logits)
    answer.add([token])
    if answer.decoder.runs_ahead and not answer.sampling.is_constrained:
        return answer.tokens if has_ended else _generate_ahead(answer)
    while not has_ended:
        rows = answer.decoder.advance([token])
        token, has_ended = answer.choose(None if rows is None else rows[-1])
        answer.add([token])
    return answer.tokens


def _next_logits(decoder: Decoder, tokens: Sequence[int] | Tensor) -> Tensor:
    """Run a token on this process, which runs the model; return the logits ``[V]`` after it."""
    rows = decoder.advance(tokens)
    assert rows is not None  # it runs here
    return rows[-1]


def _generate_ahead(answer: Answer) -> list[int]:
    """Decode the rest of an answer, queueing every step before the previous token is read.

    On host 0 alone; the others get its tokens in the loop of :func:`generate_tokens`. The GPU
    computes while the CPU processes a token and sends it to others. The extra step after an end
    token is rolled back.
    """
    decoder = answer.decoder
    choice = answer.pick(_next_logits(decoder, answer.tokens[-1:]), answer.next_index)
    while True:
        arriving = choice.fetch(decoder.hosts.wait_for_device)
        ahead = None
        if answer.num_left > 1:
            ahead = answer.pick(
                _next_logits(decoder, choice.tokens), answer.next_index + 1, choice.tokens
            )
        token, has_ended = answer.agree(arriving)
        answer.add([token])
        if has_ended:
            decoder.take_back(int(ahead is not None))
            return answer.tokens
        assert ahead is not None  # with no token left the answer has ended
        choice = ahead
