"""Parallel drafting: target and draft on different hosts."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...config import SpeculativeConfig
from ...decode.answer import begin_answer
from ...errors import HostError
from ...model.parts import ModelParts
from ...prefilling.prefill_observer import PrefillObserver
from ...prefilling.prefiller import Prefiller, ReadRequest
from ...prefilling.result import PrefillResult
from ...request.request import Request
from ..drafters.draft import DraftTask
from ..strategies.table import STRATEGIES, make_observer
from .decode_loop import AnsweredRequest, DecodedAnswer, DecodeLoop
from .link import Pair
from .pace import Pace
from .pipeline import DraftReport, draft_beside, generate_beside_draft


class ParallelSpeculation(DecodeLoop):
    """Answers on the target's hosts, while the draft runs on another host.

    Args:
        pair: the target's end of the pair.
    """

    def __init__(self, target: ModelParts, config: SpeculativeConfig, pair: Pair):
        self._target = target
        self._config = config
        self._pair = pair
        self.hosts = pair.hosts

    def answer(self, request: Request, prefiller: Prefiller) -> AnsweredRequest:
        drawn = not request.sampling.is_greedy
        with self._pair.beginning(
            self._config, self._target.vocab_size, drawn, request.shared_with_draft
        ):
            read = prefiller.read(request)
        with closing(read):
            try:
                observer = None
                if read.inputs.visual is not None:
                    observer = make_observer(self._config, self._target)
                if observer is not None and self._config.ablation.concurrent_prefill:
                    # The draft can use its scores before the prefill ends.
                    observer.request_early(partial(self._pair.send_scores, waits=False))
                # It cannot be cancelled: the draft host would be lost with it.
                uncancellable = replace(read.request, may_cancel=False)
                state = prefiller.run(replace(read, request=uncancellable), observer)
                if not self._config.ablation.concurrent_prefill:
                    self._pair.allow_prefill()
                answered = self._decode(read.request, observer, state)
            except BaseException:
                self._pair.fail()
                raise
            return AnsweredRequest(read, state, answered)

    def _decode(
        self, request: Request, observer: PrefillObserver | None, state: PrefillResult
    ) -> DecodedAnswer:
        config = self._config
        pair = self._pair
        with self.hosts.collective_stage("decode"), request.timer.stage("decode"):
            if observer is not None:
                pair.send_scores(observer.result())
            answer = begin_answer(self._target, state, request, goes_back=True)
            pace = Pace(config.most_draft_tokens, config.ablation.keep_losing_draft)
            tokens, stats = generate_beside_draft(answer, pair, pace)
        figures = {**config.shared, **stats.summary(len(tokens))}
        return DecodedAnswer(tokens, answer.logprobs, figures)


class DraftHost(DecodeLoop):
    """Drafts for the target's hosts, on a separate host.

    Args:
        pair: the draft's end of the pair.
    """

    def __init__(self, draft: ModelParts, config: SpeculativeConfig, pair: Pair):
        self._model = draft
        self._config = config
        self._pair = pair
        self.hosts = pair.hosts

    def answer(self, request: Request, prefiller: Prefiller) -> AnsweredRequest:
        request = replace(request, sink=None)  # this host receives the answer's end
        drawn = not request.sampling.is_greedy
        with self._pair.beginning(
            self._config, self._model.vocab_size, drawn, request.shared_with_draft
        ):
            read = prefiller.read(request)
        request = read.request
        # If the target continues alone, this host waits for it after the request.
        with closing(read), self.hosts.working("draft"):
            try:
                tokens, report = self._draft_for(read)
            except Exception as error:
                link = self._pair.link
                # After a HostError the target has failed, and needs no message.
                if link is not None and not isinstance(error, HostError):
                    link.send_failure()
                self._pair.link = None
                raise
        request.timer.mark_first_token()
        for token in tokens:
            if request.on_token is not None:
                request.on_token(token)
        figures = {"role": "draft", "num_drafted": report.num_drafted}
        return AnsweredRequest(read, None, DecodedAnswer(tokens, figures=figures))

    @property
    def no_batches(self) -> str:
        return (
            "a draft host decodes no batches: it drafts for the target's hosts, one answer at a "
            "time"
        )

    def _draft_for(self, read: ReadRequest) -> tuple[list[int], DraftReport]:
        """Read the prompt and draft while the target prefills.

        If the draft needs the target's scores, or the end of its prefill, it awaits them first.

        Returns:
            The new tokens, and the report.
        """
        parts = self._model
        link = self._pair.link
        assert link is not None, "the request has begun"
        config = self._config
        inputs = read.inputs
        timer = read.request.timer
        is_scored = inputs.visual is not None and make_observer(config, parts) is not None
        if not config.ablation.concurrent_prefill:
            link.expect_verdict().wait()
        awaited = link.expect_verdict() if is_scored else None

        def scores() -> Tensor:
            assert awaited is not None, "the draft is scored"
            awaited.wait()
            return link.receive(inputs.num_visual_tokens, torch.float32)

        task = DraftTask(
            target=parts,
            draft=parts,
            inputs=inputs,
            state=None,
            scores=scores if is_scored else None,
            hosts=self.hosts,
            config=config,
            keep=config.keep_policy,
            sampling=read.request.sampling,
            vocab_size=link.shared_vocab,
            leave_last=True,
            awaited=awaited,
        )
        with timer.stage("draft"):
            draft = STRATEGIES[config.strategy].build(task)
        with timer.stage("decode"):
            last = int(inputs.input_ids[0, -1])
            is_auto = config.num_draft_tokens == "auto"
            return draft_beside(link, draft, last, stops_with_target=is_auto)
