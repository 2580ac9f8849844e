"""What an engine asks of its decoding loop: the base class, and what it returns.

A loop is chosen once, when the engine is built (:mod:`.decode_loops`, :mod:`.beside`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...decode.batch import Batch
from ...errors import InvalidConfigError
from ...hosts import HostGroup
from ...model.parts import ModelParts
from ...prefilling.prefiller import Prefiller, ReadRequest
from ...prefilling.result import PrefillResult
from ...request.logprobs import TokenLogprobs
from ...request.request import Request
from ..drafters.draft import Draft


@dataclass(frozen=True)
class DecodedAnswer:
    """Tokens and metrics of a decoded request.

    Attributes:
        tokens: the answer's tokens, the end token included.
        logprobs: of each token, on the host that decoded it, if they were asked for.
        figures: the field ``speculation`` of ``launch/infer.py --json``; on a draft host its own
            metrics; None without speculation.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: dict[str, Any] | None = None


class PrefilledRequest(NamedTuple):
    """A request, its prefill, and its draft if it has one."""

    read: ReadRequest
    state: PrefillResult
    draft: Draft | None = None

    @property
    def own_draft(self) -> Draft:
        """The draft, where requests are drafted for."""
        assert self.draft is not None, "the decoding loop drafts"
        return self.draft


class AnsweredRequest(NamedTuple):
    """A request, its prefill (None on a draft host), and its answer."""

    read: ReadRequest
    state: PrefillResult | None
    answer: DecodedAnswer


class DecodeLoop(ABC):
    """A way to answer requests, one at a time or in batches.

    Attributes:
        hosts: the hosts that answer together: all but a draft host, or a draft host alone.
        models: the models that a batch runs, on which apbv's attention is then in force; none where
            there are no batches.
    """

    hosts: HostGroup
    models: tuple[ModelParts, ...] = ()

    @abstractmethod
    def answer(self, request: Request, prefiller: Prefiller) -> AnsweredRequest:
        """Read a request, prefill it and decode the answer; collective."""

    def begin(self, request: Request, prefiller: Prefiller) -> PrefilledRequest:
        """Read a request and prefill it, for an answer that a batch may decode; collective.

        Raises:
            InvalidConfigError: this loop decodes no batches.
        """
        raise InvalidConfigError(self.no_batches)

    def batch(self) -> Batch:
        """Return an empty batch for answers to requests that have begun.

        Raises:
            InvalidConfigError: this loop decodes no batches.
        """
        raise InvalidConfigError(self.no_batches)

    def answered(self, begun: PrefilledRequest, decoded: DecodedAnswer) -> DecodedAnswer:
        """Return an answer that a batch has decoded, with the figures of the whole request.

        Args:
            begun: the request, as :meth:`begin` returned it.
            decoded: its answer; ``figures`` are those of the batch.
        """
        return decoded

    def on_one_host(self, hosts: HostGroup) -> "DecodeLoop":
        """Return the same loop for one of its hosts, which then answers without the others.

        Raises:
            InvalidConfigError: this loop decodes no batches.
        """
        raise InvalidConfigError(self.no_batches)

    @property
    def no_batches(self) -> str:
        """Why there are no batches, where there are none."""
        return f"{type(self).__name__} answers one request at a time, on all of its hosts"
