"""This module answers with target and draft in turn on the same hosts."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial

import torch

from ..config import SpeculativeConfig
from ..hosts import HostGroup, in_thread
from ..input.model_inputs import ModelInputs
from ..input.rendering import RenderedPrompt
from ..input.request import Request
from ..model.attention import apbv_attention
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from ..prefilling.prefiller import ReadRequest
from ..prefilling.result import PrefillResult
from .draft import Draft, DraftTask
from .observers import over_whole_prompt
from .pace import Pace
from .preserve import kept_by_frame
from .serial import generate_speculatively
from .strategies import STRATEGIES, draft_tree, keep_policy, make_observer
from .tree_decoding import generate_by_tree
from .way import Answered, AnswerSession

# Returns on host 0 a caption of a prompt's video or images, for drafts that read one.
Captioner = Callable[[RenderedPrompt], str]


class TakingTurns:
    """A TakingTurns answers speculatively, where target and draft take turns on the same hosts.

    Args:
        draft: the draft model; None for strategies without one.
        tokenize: turns text into token ids, without special tokens.
        captioner: see :class:`apbv.Engine`.
    """

    prefills = True

    def __init__(
        self,
        target: ModelParts,
        draft: ModelParts | None,
        hosts: HostGroup,
        config: SpeculativeConfig,
        tokenize: Callable[[str], list[int]],
        captioner: Captioner | None = None,
    ):
        self._target, self._draft, self.hosts, self._config = target, draft, hosts, config
        self._tokenize, self._captioner = tokenize, captioner
        vocab_size = min(parts.vocab_size for parts in (target, draft) if parts is not None)
        self._tree = draft_tree(config, vocab_size)

    def read(self, request: Request, read: Callable[[Request], ReadRequest]) -> ReadRequest:
        return read(request)

    @contextmanager
    def session(self, read: ReadRequest) -> Iterator[AnswerSession]:
        observer = make_observer(self._config, self._target)
        captioning = None
        if self._needs_caption(read.inputs) and self.hosts.is_leader:
            captioning = in_thread(partial(self._run_captioner, read.rendered))
        yield AnswerSession(observer, partial(self._answer, read, observer, captioning))

    def _answer(
        self,
        read: ReadRequest,
        observer: PrefillObserver | None,
        captioning: Future | None,
        state: PrefillResult,
    ) -> Answered:
        config, request = self._config, read.request
        caption = self._wait_for_caption(captioning, request) if self._needs_caption(read.inputs) else None
        runs_target = STRATEGIES[config.strategy].runs_target
        with self.hosts.collective_stage("draft"), request.timer.stage("draft"):
            task = DraftTask(
                target=self._target,
                draft=self._draft,
                inputs=state.inputs if runs_target else read.inputs,
                state=state,
                observer=observer if runs_target else over_whole_prompt(observer, state.reduction),
                hosts=self.hosts,
                config=config,
                keep=keep_policy(config),
                sampling=request.sampling,
                vocab_size=self._target.vocab_size,
                drafts_tree=self._tree is not None,
                tokenize=self._tokenize,
                caption=caption,
            )
            draft = STRATEGIES[config.strategy].build(task)
        with self.hosts.collective_stage("decode"), request.timer.stage("decode"), self._attention_in_force():
            tokens, stats = self._decode(draft, state, request)
        figures = {
            **asdict(config),
            **stats.summary(len(tokens)),
            "num_tree_nodes": self._tree and self._tree.num_drafted,
            "num_visual_tokens_drafted_from": draft.num_visual,
        }
        kept = draft.kept
        if runs_target and kept is not None and state.inputs.num_tokens < read.inputs.num_tokens:
            kept = state.reduction.kept[kept]  # numbered among the tokens that are left of a reduced prompt
        kept = kept_by_frame(self._target, read.inputs, kept)
        return Answered(tokens, figures, kept, tuple(stats.record.spans))

    def _decode(self, draft: Draft, state: PrefillResult, request: Request):
        config = self._config
        answer = state.begin_answer(self._target, request)
        if draft.takes_target_kv and draft.drafter is not None:
            draft.drafter.take_target_kv(answer.decoder.newest_kv)
        if self._tree is None:
            pace = Pace(config.num_draft_tokens, config.keep_losing_draft)
            return generate_speculatively(answer, draft.drafter, pace)
        depth = "auto" if config.num_draft_tokens == "auto" else self._tree.depth
        return generate_by_tree(answer, draft.drafter, self._tree, Pace(depth, config.keep_losing_draft))

    def _attention_in_force(self) -> ExitStack:
        """Install apbv's attention in both models, for as long as the returned stack is open."""
        stack = ExitStack()
        for parts in (self._target, self._draft):
            if parts is not None:
                stack.enter_context(apbv_attention(parts.language_model))
        return stack

    def _needs_caption(self, inputs: ModelInputs) -> bool:
        return self._config.needs_caption and inputs.visual is not None

    def _run_captioner(self, rendered: RenderedPrompt) -> str:
        """Call the captioner with this host's GPU as the current one, which a new thread does not inherit."""
        device = self.hosts.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._captioner(rendered)

    def _wait_for_caption(self, captioning: Future | None, request: Request) -> str | None:
        """Wait for the captioner's caption on host 0, and return it; return None elsewhere."""
        with self.hosts.local_stage("captioning"), request.timer.stage("draft"):
            if captioning is None:
                return None
            try:
                caption = captioning.result()
            except Exception as error:
                raise ValueError(f"the captioner failed: {type(error).__name__}: {error}") from error
            if not isinstance(caption, str) or not caption.strip():
                raise ValueError(f"the captioner returned {caption!r} instead of a caption")
            return caption.strip()
