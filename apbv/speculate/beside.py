"""This module answers with target and draft side by side, on different hosts or in two threads of one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from ..config import SpeculativeConfig
from ..hosts import HostGroup
from ..input.request import Request
from ..model.attention import apbv_attention
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from ..prefilling.prefiller import ReadRequest
from ..prefilling.result import PrefillResult
from .pace import Pace
from .pair import Pair, draft_request
from .pipeline import PipelineStats, generate_beside_draft
from .preserve import kept_by_frame
from .strategies import make_observer
from .threads import DraftThread
from .way import Answered, AnswerSession


class BesideDraft:
    """A BesideDraft answers on the target's hosts, while the draft runs on another host or in another thread.

    Args:
        pair: the target's end of the pair.
        thread: the draft in another thread of this host; None where the draft has a host of its own.
    """

    prefills = True

    def __init__(
        self, target: ModelParts, config: SpeculativeConfig, pair: Pair, thread: DraftThread | None = None
    ):
        self._target, self._config, self._pair, self._thread = target, config, pair, thread
        self.hosts = pair.hosts

    def read(self, request: Request, read: Callable[[Request], ReadRequest]) -> ReadRequest:
        agreed = self._config, self._target.vocab_size, request.sampling.temperature > 0
        if self._thread is None:
            with self._pair.beginning(*agreed):
                return read(request)
        done = read(request)
        try:
            self._thread.start(done.inputs, done.request.sampling)
            self._pair = self._thread.pair
            with self._pair.beginning(*agreed):
                return done
        except BaseException:
            done.close()
            raise

    @contextmanager
    def session(self, read: ReadRequest) -> Iterator[AnswerSession]:
        observer = make_observer(self._config, self._target)
        if observer is not None and read.inputs.visual is not None:
            observer.request_early(self._pair.offer_scores)  # the draft can use them before the prefill ends
        try:
            yield AnswerSession(observer, partial(self._answer, read, observer))
        except BaseException:
            self._pair.fail()
            raise
        if self._thread is not None:
            self._thread.finish()

    def _answer(self, read: ReadRequest, observer: PrefillObserver | None, state: PrefillResult) -> Answered:
        config, pair, request = self._config, self._pair, read.request
        with self.hosts.collective_stage("decode"), request.timer.stage("decode"):
            if observer is not None and read.inputs.visual is not None:
                pair.send_scores(observer.result())
            answer = state.begin_answer(self._target, request)
            pace = Pace(config.most_draft_tokens, config.keep_losing_draft)
            with apbv_attention(self._target.language_model):
                tokens, stats = generate_beside_draft(answer, pair.open_link(), pace)
        self._note_lost_draft(stats)
        figures = {**asdict(config), **stats.summary(len(tokens))}
        draft_spans = None if stats.of_draft is None else stats.of_draft.spans
        return Answered(tokens, figures, spans=tuple(stats.record.spans), draft_spans=draft_spans)

    def _note_lost_draft(self, stats: PipelineStats) -> None:
        if stats.lost_draft is None and self._pair.link is None and self.hosts.rank == 0:
            stats.lost_draft = "an earlier request lost it"
        if stats.lost_draft:
            self._pair.link = None


class DraftHost:
    """A DraftHost drafts for the target's hosts, on a host of its own.

    Args:
        pair: the draft's end of the pair.
    """

    prefills = False

    def __init__(self, draft: ModelParts, config: SpeculativeConfig, pair: Pair):
        self._draft, self._config, self._pair = draft, config, pair
        self.hosts = pair.hosts

    def read(self, request: Request, read: Callable[[Request], ReadRequest]) -> ReadRequest:
        with self._pair.beginning(self._config, self._draft.vocab_size, request.sampling.temperature > 0):
            return read(request)

    @contextmanager
    def session(self, read: ReadRequest) -> Iterator[AnswerSession]:
        yield AnswerSession(None, partial(self._answer, read))

    def _answer(self, read: ReadRequest, state: None) -> Answered:
        request = read.request
        # Should the target go on alone, this host waits for it after the request.
        with self.hosts.working("draft"):
            tokens, report, draft = draft_request(
                self._pair, self._draft, read.inputs, self._config, request.sampling, request.timer
            )
        request.timer.mark_first_token()
        for token in tokens:
            if request.on_token is not None:
                request.on_token(token)
        kept = kept_by_frame(self._draft, read.inputs, draft.kept)
        return Answered(tokens, {"role": "draft", "num_drafted": report.num_drafted}, kept)


def beside_draft(
    target: ModelParts | None, draft: ModelParts | None, hosts: HostGroup, config: SpeculativeConfig
) -> BesideDraft | DraftHost:
    """Return this host's way to answer where ``config.draft_host`` is set; collective.

    Args:
        target: the target; None on the draft host.
        draft: the draft model, on the host that drafts; else None.
    """
    if hosts.size == 1:
        thread = DraftThread(draft, hosts, config)
        return BesideDraft(target, config, thread.pair, thread)
    pair = Pair.of(hosts, config)
    return DraftHost(draft, config, pair) if pair.is_draft else BesideDraft(target, config, pair)
