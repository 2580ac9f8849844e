"""The decoding loops: autoregressive, or with sequential drafting on the same hosts.

A loop is chosen once, when the engine is built. For every request it reads the prompt, may observe
the prefill, and decodes the answer.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from torch import Tensor

from ...config import SpeculativeConfig
from ...decode.answer import Answer, begin_answer, generate_tokens
from ...decode.batch import Batch
from ...errors import InvalidRequestError
from ...hosts import HostGroup
from ...input.prompts.rendering import RenderedPrompt
from ...model.next_token import NextTokenModel
from ...model.parts import ModelParts
from ...prefilling.prefill_observer import PrefillObserver
from ...prefilling.prefiller import Prefiller, ReadRequest
from ...prefilling.reduction.choosing import Reduction
from ...prefilling.result import PrefillResult
from ...request.request import Request
from ..drafters.draft import Draft, DraftTask
from ..drafters.next_token import NextTokenDrafter
from ..strategies.table import STRATEGIES, draft_tree, make_observer
from .decode_loop import AnsweredRequest, DecodedAnswer, DecodeLoop, PrefilledRequest
from .pace import Pace
from .serial import SpeculationStats, generate_speculatively
from .speculative_batch import SpeculativeBatch

# Returns on host 0 a caption of a prompt's video or images, for drafts that read one.
Captioner = Callable[[RenderedPrompt], str]


class Autoregressive(DecodeLoop):
    """Autoregressive decoding, without a draft."""

    def __init__(self, parts: ModelParts, hosts: HostGroup):
        self._parts = parts
        self.hosts = hosts
        self.models = (parts,)

    def answer(self, request: Request, prefiller: Prefiller) -> AnsweredRequest:
        begun = self.begin(request, prefiller)
        answer = self.decode(begun.read.request, begun.state)
        return AnsweredRequest(begun.read, begun.state, answer)

    def begin(self, request: Request, prefiller: Prefiller) -> PrefilledRequest:
        with closing(prefiller.read(request)) as read:
            return PrefilledRequest(read, prefiller.run(read))

    def batch(self) -> Batch:
        return Batch(self._parts)

    def on_one_host(self, hosts: HostGroup) -> "Autoregressive":
        return Autoregressive(self._parts, hosts)

    def decode(self, request: Request, state: PrefillResult) -> DecodedAnswer:
        """Decode the answer to a prompt that was prefilled or loaded."""
        with self.hosts.collective_stage("decode"), state.timer.stage("decode"):
            answer = begin_answer(self._parts, state, request)
            return DecodedAnswer(generate_tokens(answer), answer.logprobs)


def _scores_of_whole_prompt(observer: PrefillObserver, reduction: Reduction) -> Tensor:
    """Return an observer's scores of the kept visual tokens as scores of all; collective."""
    return reduction.spread(observer.result())


class SequentialSpeculation(DecodeLoop):
    """Sequential speculative decoding, with target and draft on the same hosts.

    Args:
        draft: the draft model; None for strategies without one.
        tokenize: turns text into token ids, without special tokens.
        captioner: see :class:`apbv.Engine`.
        next_token: the target's multi-token prediction layer; None if it does not draft.
    """

    def __init__(
        self,
        target: ModelParts,
        draft: ModelParts | None,
        hosts: HostGroup,
        config: SpeculativeConfig,
        tokenize: Callable[[str], list[int]],
        captioner: Captioner | None = None,
        next_token: NextTokenModel | None = None,
    ):
        self._target = target
        self._draft = draft
        self.hosts = hosts
        self._config = config
        self._tokenize = tokenize
        self._captioner = captioner
        self._next_token = next_token
        self._reads_outputs = STRATEGIES[config.strategy].facts.reads_outputs
        self.models = tuple(parts for parts in (target, draft) if parts is not None)
        self._tree = draft_tree(config, min(parts.vocab_size for parts in self.models))

    def answer(self, request: Request, prefiller: Prefiller) -> AnsweredRequest:
        begun = self.begin(request, prefiller)
        request = begun.read.request
        with self.hosts.collective_stage("decode"), request.timer.stage("decode"):
            answer = begin_answer(
                self._target,
                begun.state,
                request,
                goes_back=True,
                keeps_outputs=self._reads_outputs and self.hosts.is_leader,
            )
            stats = self._decode(begun.own_draft, answer)
        summary = stats.summary(len(answer.tokens))
        decoded = DecodedAnswer(answer.tokens, answer.logprobs, summary)
        return AnsweredRequest(begun.read, begun.state, self.answered(begun, decoded))

    def batch(self) -> SpeculativeBatch:
        return SpeculativeBatch(self._target, self._config)

    def begin(self, request: Request, prefiller: Prefiller) -> PrefilledRequest:
        config = self._config
        with closing(prefiller.read(request)) as read:
            request = read.request
            observer = make_observer(config, self._target)
            state = prefiller.run(read, observer)
            caption = None
            if config.needs_caption and read.inputs.visual is not None:
                with self.hosts.local_stage("captioning"), request.timer.stage("draft"):
                    if self.hosts.is_leader:
                        caption = self._caption(read.rendered)
            with self.hosts.collective_stage("draft"), request.timer.stage("draft"):
                draft = self._build(read, state, observer, caption)
            return PrefilledRequest(read, state, draft)

    def answered(self, begun: PrefilledRequest, decoded: DecodedAnswer) -> DecodedAnswer:
        figures = {
            **self._config.shared,
            **(decoded.figures or {}),
            "num_tree_nodes": None if self._tree is None else self._tree.num_drafted,
            "num_visual_tokens_drafted_from": begun.own_draft.num_visual,
        }
        return replace(decoded, figures=figures)

    def on_one_host(self, hosts: HostGroup) -> "SequentialSpeculation":
        return SequentialSpeculation(
            self._target,
            self._draft,
            hosts,
            self._config,
            self._tokenize,
            self._captioner,
            self._next_token,
        )

    def _build(
        self,
        read: ReadRequest,
        state: PrefillResult,
        observer: PrefillObserver | None,
        caption: str | None,
    ) -> Draft:
        """Build the draft.

        A draft that is the target itself reads the prompt as the target has read it, without pruned
        tokens; other drafts read the whole prompt.
        """
        config = self._config
        runs_target = STRATEGIES[config.strategy].facts.runs_target
        scores = None
        if observer is not None:
            scores = observer.result
            if state.reduction is not None and not runs_target:
                scores = partial(_scores_of_whole_prompt, observer, state.reduction)
        task = DraftTask(
            target=self._target,
            draft=self._draft,
            inputs=state.inputs if runs_target else read.inputs,
            state=state,
            scores=scores,
            hosts=self.hosts,
            decode_host=read.request.decode_host,
            config=config,
            keep=config.keep_policy,
            sampling=read.request.sampling,
            vocab_size=self._target.vocab_size,
            drafts_tree=self._tree is not None,
            tokenize=self._tokenize,
            caption=caption,
            next_token=self._next_token,
        )
        return STRATEGIES[config.strategy].build(task)

    def _decode(self, draft: Draft, answer: Answer) -> SpeculationStats:
        """Decode an answer; return the statistics of its draft."""
        config = self._config
        if draft.runs(self._target) or isinstance(draft.drafter, NextTokenDrafter):
            draft.model_drafter.target = answer.decoder
        pace = Pace(config.num_draft_tokens, config.ablation.keep_losing_draft)
        _, stats = generate_speculatively(answer, draft.drafter, pace, self._tree)
        return stats

    def _caption(self, rendered: RenderedPrompt) -> str:
        """Call the captioner.

        Raises:
            InvalidRequestError: it raises, or returns no text.
        """
        assert self._captioner is not None, "an ensemble with captions is refused without one"
        try:
            caption = self._captioner(rendered)
        except Exception as error:
            raise InvalidRequestError(
                f"the captioner failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(caption, str) or not caption.strip():
            raise InvalidRequestError(f"the captioner returned {caption!r} instead of a caption")
        return caption.strip()
