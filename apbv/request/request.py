"""A request: the question and the settings for its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import SamplingParams
from ..config.checks import Checked, function, one_of
from ..errors import InvalidRequestError
from ..grammar.grammars import Grammar
from ..input.prompts.model_inputs import POSITION_RULES, ModelInputs
from ..input.prompts.rendering import Question
from ..input.prompts.tokenized_prompt import TokenizedPrompt
from ..stats import StageTimer
from .sink import AnswerSink


@dataclass(frozen=True)
class Callbacks(Checked, error=InvalidRequestError):
    """The functions of :meth:`apbv.Engine.generate` that follow a request.

    Attributes:
        on_token: called on every host with each token as soon as it is decoded.
        on_stage: called on every host as a stage begins, with its name.
        on_progress: called on every host with a stage, how much of it is done, and of how much.
        stop: called on host 0 with all tokens so far; true ends the answer, or cancels the request.

    Raises:
        InvalidRequestError: one is not a function.
    """

    on_token: Callable[[int], None] | None = function()
    on_stage: Callable[[str], None] | None = function()
    on_progress: Callable[[str, int, int], None] | None = function()
    stop: Callable[[Sequence[int]], bool] | None = function()


@dataclass(frozen=True, kw_only=True)
class RequestSettings(Checked, error=InvalidRequestError):
    """How a request is answered, the same on every host: what can be sent of it to other hosts.

    Attributes:
        sampling: how the answer's tokens are chosen, and how many at most.
        positions: whose rule gives the rotary positions, one of
            :data:`~apbv.input.prompts.model_inputs.POSITION_RULES`.
        num_wanted: answer tokens for which positions must be left.
        decode_host: the host that gathers the prompt's KV and decodes the answer, if one does
            alone; it takes host 0's part in a :class:`Request` once the prompt is prefilled. Cached
            KV stays where it is.

    Raises:
        InvalidRequestError: there is no such rule of positions.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    positions: str = one_of(POSITION_RULES, "transformers")
    num_wanted: int = 1
    decode_host: int = 0

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RequestSettings":
        """Return the settings of which another host has sent the fields as JSON."""
        sampling = dict(record["sampling"])
        # JSON has lists alone.
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
        return cls(**{**record, "sampling": SamplingParams(**sampling)})


@dataclass(frozen=True)
class Request:
    """Request to the engine: a question that was checked, and how this host takes part.

    Attributes:
        question: what is asked.
        timer: the request's stage times.
        settings: how it is answered.
        on_token: called on every host with each token as soon as it is chosen.
        sink: receives the answer, and may end it or cancel the request; host 0's counts, or that of
            the decode host. None on all hosts, or on none.
        may_cancel: whether the sink may cancel before the first token; the same on all hosts.
        grammar: what the schema or grammar of ``sampling`` allows, before the first token; on host
            0.
        has_checked_grammar: whether that schema or grammar was found good
            (:meth:`apbv.grammar.grammars.Grammars.check`).
        prompt: the part of the question already read by this host's
            :class:`~apbv.input.prompts.prompt_reader.PromptReader`; None: nothing. Other hosts need
            not have it.
    """

    question: Question
    timer: StageTimer
    settings: RequestSettings = field(default_factory=RequestSettings)
    on_token: Callable[[int], None] | None = None
    sink: AnswerSink | None = None
    may_cancel: bool = True
    grammar: Grammar | None = None
    has_checked_grammar: bool = False
    prompt: TokenizedPrompt | None = None

    @property
    def sampling(self) -> SamplingParams:
        """How the answer's tokens are chosen."""
        return self.settings.sampling

    @property
    def decode_host(self) -> int:
        """The host that decodes the answer, if one does alone."""
        return self.settings.decode_host

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """What must be the same on every host, JSON-ready.

        Files and other texts are compared once they are read.
        """
        question = self.question
        return {
            "prompt": question.prompt,
            "num_frames": question.num_frames,
            "fps": question.fps,
            "audio_in_video": question.audio_in_video,
            "positions": self.settings.positions,
            "stop": None if self.sink is None else "given",
            "sampling": asdict(self.sampling),
        }

    @property
    def shared_with_draft(self) -> dict[str, Any]:
        """The settings that a draft host must have, too: it never asks whether to stop."""
        return {name: value for name, value in self.agreed_settings.items() if name != "stop"}

    @property
    def cancels(self) -> Callable[[], bool] | None:
        """The function that tells whether to cancel before the first token; None: it cannot."""
        if self.sink is None or not self.may_cancel:
            return None
        return self.sink.is_cancelled

    def with_sampling(self, sampling: SamplingParams) -> "Request":
        """Return the same request with other sampling parameters."""
        return replace(self, settings=replace(self.settings, sampling=sampling))

    def within(self, max_positions: int, inputs: ModelInputs) -> "Request":
        """Return the same request, its answer limited to the positions that its prompt leaves.

        An answer without a limit stays so.
        """
        if self.sampling.max_new_tokens is None:
            return self
        max_new_tokens = min(self.sampling.max_new_tokens, max_positions - inputs.next_position)
        min_tokens = min(self.sampling.min_tokens, max_new_tokens)
        sampling = replace(
            self.sampling,
            max_new_tokens=max_new_tokens,
            min_tokens=min_tokens,
        )
        return self.with_sampling(sampling)
