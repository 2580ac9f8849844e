"""This module defines the interface of the ways to answer, and the way without a draft.

A way is chosen once, when the engine is built. For every request it reads the prompt, may observe the prefill, and
decodes the answer.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..decode.answer import generate_tokens
from ..hosts import HostGroup
from ..input.request import Request
from ..model.attention import apbv_attention
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from ..prefilling.prefiller import ReadRequest
from ..prefilling.result import PrefillResult
from ..timeline import Span


@dataclass(frozen=True)
class Answered:
    """An Answered holds the tokens and the figures of a decoded request.

    Attributes:
        tokens: the answer's tokens, the end token included.
        figures: the field ``speculation`` of ``launch/infer.py --json``; on a draft host its own figures; None
            without speculation.
        kept: which of a video's tokens the draft saw, bool ``[T, h, w]``; None where that is not known.
        spans: the timeline of this host's decoding.
        draft_spans: the draft host's timeline, on host 0; None where there is no draft host.
    """

    tokens: list[int]
    figures: dict[str, Any] | None = None
    kept: Tensor | None = None
    spans: tuple[Span, ...] = ()
    draft_spans: list[Span] | None = None


@dataclass(frozen=True)
class AnswerSession:
    """An AnswerSession takes one request from its prefill to its answer.

    Attributes:
        observer: observes the prefill; None if the strategy needs no observer.
        answer: decodes the answer to a prefilled prompt, which is None on a draft host; collective.
    """

    observer: PrefillObserver | None
    answer: Callable[[PrefillResult | None], Answered]


class WayToAnswer(Protocol):
    """A WayToAnswer answers requests. All methods are collective over the hosts that answer.

    Attributes:
        hosts: the hosts that answer together: all but a draft host, or a draft host alone.
        prefills: whether this host takes part in the prefill.
    """

    hosts: HostGroup
    prefills: bool

    def read(self, request: Request, read: Callable[[Request], ReadRequest]) -> ReadRequest:
        """Read a request by calling ``read`` with it."""

    def session(self, read: ReadRequest) -> AbstractContextManager[AnswerSession]:
        """Open a session in which a request is prefilled and answered; a draft is told if that fails."""


class Autoregressive:
    """The Autoregressive way decodes one token after the other, without a draft."""

    prefills = True

    def __init__(self, parts: ModelParts, hosts: HostGroup):
        self._parts, self.hosts = parts, hosts

    def read(self, request: Request, read: Callable[[Request], ReadRequest]) -> ReadRequest:
        return read(request)

    @contextmanager
    def session(self, read: ReadRequest) -> Iterator[AnswerSession]:
        yield AnswerSession(None, partial(self.answer, read.request))

    def answer(self, request: Request, state: PrefillResult) -> Answered:
        """Decode the answer to a prompt that was prefilled or loaded."""
        stage, timed = self.hosts.collective_stage("decode"), state.timer.stage("decode")
        with stage, timed, apbv_attention(self._parts.language_model):
            return Answered(generate_tokens(state.begin_answer(self._parts, request)))
