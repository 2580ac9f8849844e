"""Where an answer goes while it is decoded, and whether it is wanted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .logprobs import TokenLogprobs


class AnswerSink(ABC):
    """Receives an answer on the host that decodes it, and may end it, or cancel its request.

    All hosts of a request have one, or none has.
    """

    @abstractmethod
    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Receive the answer so far; called after each step, and once for each of its tokens.

        Args:
            tokens: all tokens.
            logprobs: of at least these, where the sampling parameters ask for them; else none.

        Returns:
            Whether the answer ends here.
        """

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Return whether the request is not wanted any more.

        Asked before the first token, between chunks and layers.
        """


@dataclass(frozen=True)
class StopFunction(AnswerSink):
    """A sink that is only asked whether to stop, as by :meth:`apbv.Engine.generate`.

    Attributes:
        stop: called with all tokens so far, with none before the first.
    """

    stop: Callable[[Sequence[int]], bool]

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        return bool(self.stop(tokens))

    def is_cancelled(self) -> bool:
        return bool(self.stop(()))
