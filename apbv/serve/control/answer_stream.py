"""Text of an answer, token by token, on the host that decodes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...decode.text import AnswerText, text_showing
from ...request.logprobs import TokenLogprobs
from ...request.request import Request
from ...request.result import FinishReason
from ...request.sink import AnswerSink
from .job import Piece
from .output import AnswerOutput
from .work_order import WorkOrder


class AnswerStream(AnswerSink):
    """Turns the tokens of one answer into text for its output, and finally gives the finish reason.

    Args:
        decode: token ids to text; called in the caller's thread.
        choice: the index of the request's answer.
    """

    def __init__(
        self, output: AnswerOutput, order: WorkOrder, decode: Callable[..., str], choice: int = 0
    ):
        self._output = output
        self._reply = order.reply
        self._decode = decode
        self._choice = choice
        self._text = AnswerText(
            self._to_text,
            self._reply.stop_strings,
            self._reply.stop_token_ids,
            order.settings.sampling.min_tokens,
        )
        self._num_sent = 0  # tokens
        # The text of an unfinished answer is needed only for streaming and for stop strings.
        self._reads_along = self._reply.streams or self._text.may_stop

    def request_for_answer(self, request: Request) -> Request:
        """Return a request for this answer alone, which goes here."""
        seed = (request.sampling.seed + self._choice) % 2**64
        request = request.with_sampling(replace(request.sampling, seed=seed))
        return replace(request, sink=self)

    def is_cancelled(self) -> bool:
        return self._output.is_cancelled

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Send the output what is new of all tokens so far; return whether the answer ends here."""
        if not self._output.is_cancelled:
            text = self._text.update(tokens) if self._reads_along else ""
            # Streams also get tokens without text.
            has_tokens = self._reply.streams and len(tokens) > self._num_sent
            piece = None
            if text or has_tokens:
                piece = self._piece(text, tokens, logprobs)
            self._output.add_tokens(self._choice, len(tokens), piece)
        return self._output.is_cancelled or self._text.stopped

    def finish(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        reason: FinishReason,
        speculation: dict[str, Any] | None = None,
    ) -> bool:
        """End the answer, and with the last one the request.

        False if that is known to have ended before.

        Args:
            tokens: all tokens.
            logprobs: of each, where they were asked for.
            reason: why there are no more, if no stop string is among them.
            speculation: the metrics of its draft; None: it had none.
        """
        if self._output.is_cancelled:
            return False
        if speculation is not None and self._choice == 0:  # the others have no draft
            self._output.note_draft(speculation)
        text = self._text.finish(tokens)
        if self._text.stopped:
            reason = "stop"
        piece = self._piece(text, tokens, logprobs, reason)
        return self._output.add_tokens(self._choice, len(tokens), piece)

    def _piece(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        reason: FinishReason | None = None,
    ) -> Piece:
        """Return the next piece, with the tokens that have not been sent."""
        new_tokens = list(tokens[self._num_sent :])
        new_logprobs = logprobs[self._num_sent : len(tokens)]
        self._num_sent = len(tokens)
        described = []
        # There are none unless they are requested.
        for token, of_token in zip(new_tokens, new_logprobs, strict=False):
            alternatives = [(self._spelling(other), logprob) for other, logprob in of_token.top]
            described.append((self._spelling(token), of_token.logprob, alternatives))
        return Piece(text, new_tokens, self._choice, reason, described)

    def _to_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with only those special ones that are part of it."""
        return text_showing(self._decode, tokens, self._reply.shown_token_ids)

    def _spelling(self, token: int) -> str:
        return self._decode([token], skip_special_tokens=False)
