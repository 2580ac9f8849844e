"""This module turns a request into a prefilled prompt: it reads, encodes what is new, and prefills."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..input.model_inputs import POSITION_RULES, ModelInputs
from ..input.reading import PromptReader
from ..input.rendering import RenderedPrompt
from ..input.request import Request
from .forward import prefill
from .observer import PrefillObserver
from .result import PrefillResult
from .reuse import Prefix, Reuse, prefill_question


class RequestCancelled(RuntimeError):
    """A RequestCancelled says that ``stop`` ended a request before its prefill; the next one can follow."""


@dataclass(frozen=True)
class ReadRequest:
    """A ReadRequest is a request whose prompt has been read.

    Attributes:
        request: the request; the model has positions enough for prompt and answer.
        rendered: the prompt's text and its files.
        inputs: the model's inputs, with this host's pixels where they are needed.
        prefix: the stored KV of the tokens before the question; None where there is none.
    """

    request: Request
    rendered: RenderedPrompt
    inputs: ModelInputs
    prefix: Prefix | None


class Prefiller:
    """A Prefiller reads requests and prefills them with one model; every method is collective.

    Args:
        model: None on a draft host, which reads requests but prefills nothing.
        reader: reads prompts, for the model or, on a draft host, for the draft.
        reuse: stores embeddings or KV for later requests; None: nothing is stored.
        reads_all_frames: read pixels also where the target's embeddings are known, for a draft's vision tower.
        require_readable: refuses prompts that cannot be drafted for; raises ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel | None,
        reader: PromptReader,
        hosts: HostGroup,
        config: PrefillConfig,
        reuse: Reuse | None = None,
        reads_all_frames: bool = False,
        require_readable: Callable[[ModelInputs], None] = lambda inputs: None,
    ):
        self._model, self._reader, self._hosts, self._config = model, reader, hosts, config
        self._reuse, self._reads_all_frames = reuse, reads_all_frames
        self._require_readable = require_readable

    def read(self, request: Request) -> ReadRequest:
        """Read a request's prompt and files.

        Raises:
            RequestCancelled: ``stop`` was true.
            ValueError: the prompt or a file cannot be read, or the model has too few positions for the answer.
            HostError: another host failed.
        """
        reader, timer, max_positions = self._reader, request.timer, self._reader.parts.max_position_embeddings
        self._require_wanted(request)
        with self._hosts.local_stage("reading the prompt"):
            if request.positions not in POSITION_RULES:
                raise ValueError(
                    f"positions must be one of {', '.join(POSITION_RULES)}, not {request.positions!r}"
                )
            prompt = reader.read(request.question, self._hosts, timer)
            inputs, piece = prompt.inputs, prompt.piece
            if request.positions == "vllm":
                inputs = inputs.at_vllm_positions(reader.parts)
            inputs.require_room(max_positions, request.num_wanted)
            self._require_readable(inputs)
        prefix = None if self._reuse is None else self._reuse.find_prefix(inputs, self._hosts)
        if piece is not None and (self._reads_all_frames or not self._is_known(inputs, prefix)):
            with self._hosts.local_stage("reading the video"):
                with timer.stage("decode_video"):
                    pixels = piece.read()
                with timer.stage("preprocess"):
                    inputs = inputs.with_frames(reader.processor, piece, pixels)
        self._require_wanted(request)
        return ReadRequest(request.within(max_positions, inputs), prompt.rendered, inputs, prefix)

    def run(self, read: ReadRequest, observer: PrefillObserver | None = None) -> PrefillResult:
        """Prefill the prompt, or only its question where the KV before it is stored.

        Args:
            observer: watches the prefill of a whole prompt.

        Raises:
            ValueError, HostError: as :func:`apbv.prefill`.
        """
        inputs, timer, hosts = read.inputs, read.request.timer, self._hosts
        if read.prefix is not None:
            return prefill_question(self._reader.parts, inputs, read.prefix, timer)
        encoded = reused = None
        if self._reuse is not None:
            reused = "embeddings" if self._reuse.has_embeddings(inputs, hosts) else None
            with hosts.local_stage("encode"), timer.stage("encode"):
                encoded = self._reuse.embeddings(inputs, self._reader.parts)
        state = prefill(
            self._model,
            inputs,
            hosts=hosts,
            config=self._config,
            timer=timer,
            observer=observer,
            encoded=encoded,
        )
        if self._reuse is not None:
            self._reuse.store_prefix(state)
        return replace(state, reused=reused)

    def _is_known(self, inputs: ModelInputs, prefix: Prefix | None) -> bool:
        """Return whether the KV or the embeddings of the visual input are known; collective."""
        return prefix is not None or (self._reuse is not None and self._reuse.has_embeddings(inputs, self._hosts))

    def _require_wanted(self, request: Request) -> None:
        """Ask ``stop`` on the leader whether the request is still wanted.

        Raises:
            RequestCancelled: ``stop`` returned true; on every host.
        """
        if request.stop is None:
            return
        with self._hosts.local_stage("asking whether to go on"):
            is_over = self._hosts.is_leader and request.stop(())
        if self._hosts.broadcast_ints([is_over], 1)[0]:
            raise RequestCancelled("the request was cancelled before it was prefilled")
