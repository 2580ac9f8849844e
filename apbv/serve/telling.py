"""Text of an answer, token by token, on the host that decodes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..decode.text import AnswerText
from ..input.request import Request
from ..logprobs import TokenLogprobs
from .job import Piece
from .links import Output
from .order import Order
from .requests import FinishReason


class Telling:
    """Turns the tokens of one answer into text for its output, and finally gives the finish reason.

    Args:
        decode: token ids to text; called in the caller's thread.
        choice: the index of the request's answer.
    """

    def __init__(self, output: Output, order: Order, decode: Callable[..., str], choice: int = 0):
        self._output = output
        self._order = order
        self._decode = decode
        self._choice = choice
        self._text = AnswerText(
            self._to_text, order.stop_strings, order.stop_token_ids, order.sampling.min_tokens
        )
        self._told = 0
        self._logprobs: list[TokenLogprobs] = []
        # The text of an unfinished answer is needed only for streaming and for stop strings.
        self._reads_along = order.streams or self._text.may_stop

    def asked(self, request: Request) -> Request:
        """Return a request for this answer alone."""
        sampling = request.sampling
        own = replace(sampling, seed=(sampling.seed + self._choice) % 2**64)
        return replace(request, sampling=own, stop=self.stop, logprobs=self._logprobs)

    def stop(self, tokens: Sequence[int]) -> bool:
        """Process all tokens so far; return whether the answer must end here."""
        if tokens and not self._output.is_cancelled:
            text = self._text.update(tokens) if self._reads_along else ""
            # Streams also get tokens without text.
            has_news = text or (self._order.streams and len(tokens) > self._told)
            self._output.tell(
                self._choice, len(tokens), self._piece(text, tokens) if has_news else None
            )
        return self._output.is_cancelled or self._text.stopped

    def finish(
        self, tokens: Sequence[int], reason: FinishReason, speculation: dict[str, Any] | None = None
    ) -> bool:
        """End the answer, and with the last one the request; False if that is known to have ended
        before.

        Args:
            tokens: all tokens.
            reason: why there are no more, if no stop string is among them.
            speculation: the metrics of its draft; None: it had none.
        """
        if self._output.is_cancelled:
            return False
        if speculation is not None and self._choice == 0:  # the others have no draft
            self._output.note_draft(speculation.items())
        text = self._text.finish(tokens)
        reason = "stop" if self._text.stopped else reason
        return self._output.tell(self._choice, len(tokens), self._piece(text, tokens, reason))

    def _piece(self, text: str, tokens: Sequence[int], reason: FinishReason | None = None) -> Piece:
        new = slice(self._told, len(tokens))
        logprobs = [
            (
                self._spelt(token),
                told.logprob,
                [(self._spelt(other), value) for other, value in told.top],
            )
            for token, told in zip(tokens[new], self._logprobs[new], strict=False)
        ]
        self._told = len(tokens)
        return Piece(text, list(tokens[new]), self._choice, reason, logprobs)

    def _to_text(self, tokens: Sequence[int]) -> str:
        runs = groupby(tokens, self._order.shown_token_ids.__contains__)
        return "".join(
            self._decode(list(run), skip_special_tokens=not shown) for shown, run in runs
        )

    def _spelt(self, token: int) -> str:
        return self._decode([token], skip_special_tokens=False)
