"""Answering with target and draft side by side, on different hosts."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

from ..config import SpeculativeConfig
from ..hosts import HostError, HostGroup
from ..input.request import Request
from ..model.attention import apbv_attention
from ..model.parts import ModelParts
from ..prefilling.prefiller import Prefiller, ReadRequest
from ..prefilling.result import PrefillResult
from ..prefilling.stages import Watcher
from ..warn import warn_caller
from .draft import Draft, DraftTask, kept_by_frame
from .link import FAILED, GO_ON, Link, ReceivedScores
from .pace import Pace
from .pipeline import DraftReport, draft_beside, generate_beside_draft
from .strategies import STRATEGIES, keep_policy, make_watcher
from .ways import Answered, Outcome


@dataclass
class Pair:
    """This host's end of the target's hosts and their draft host.

    Attributes:
        hosts: the hosts that this host computes with: the target's hosts, or the draft host alone.
        is_draft: whether this is the draft host.
        link: the link, on host 0 of the target and on the draft host; None on other hosts, and after the other end
            was lost.
    """

    hosts: HostGroup
    is_draft: bool
    link: Link | None
    _other_takes_part: bool | None = field(default=False, init=False)  # None: it has not answered yet
    _has_sent_scores: bool = field(default=False, init=False)  # of this request

    def open_link(self) -> Link | None:
        """Return the link if the other end takes part in this request, else None; wait until that is known."""
        if self._other_takes_part is None:
            self._other_takes_part = self._wait_for_other()
            if not self._other_takes_part and self.link is not None and not self.is_draft:
                warn_caller("answering without the draft host, which cannot read this request")
        return self.link if self._other_takes_part else None

    @classmethod
    def of(cls, hosts: HostGroup, config: SpeculativeConfig) -> "Pair":
        """Pair the last of at least 2 hosts, which drafts, with the others, which run the target; collective."""
        last = hosts.size - 1
        is_draft = hosts.rank == last
        targets = hosts.subgroup(range(last))
        # The target does not wait for a draft host that is busy: it can decode without it.
        patience = min(config.draft_timeout, hosts.timeout / 4)
        to_target = hosts.subgroup([0, last], patience, waits_for_work=False, has_data=False)
        # The draft waits while the target works, and a little longer, to hear of a target host that is silent.
        to_draft = hosts.subgroup([0, last], 1.25 * hosts.timeout, has_data=False)
        link = None if to_target is None else Link(to_target, to_draft)
        members = HostGroup.single(hosts.device) if is_draft else targets
        return cls(members, is_draft, link)

    @contextmanager
    def beginning(self, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> Iterator[None]:
        """Begin a request, which the body reads; after that each side tells the other whether it takes part.

        The draft then waits for the target's answer; the target reads the draft's when it needs the draft.

        Args:
            vocab_size, drawn: see :meth:`Link.begin`.

        Raises:
            HostError: on the draft host, if the target's hosts cannot read the request or have ended.
        """
        if self.is_draft and self.link is None:
            raise HostError("the target's hosts go on without this draft host since an earlier request")
        try:
            yield
        except BaseException:
            self._announce(False, config, vocab_size, drawn)
            self._wait_for_other()
            raise
        self._announce(True, config, vocab_size, drawn)
        if self.is_draft and self.open_link() is None:
            raise HostError("the target's hosts cannot answer this request")

    def _announce(self, is_ready: bool, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> None:
        self._other_takes_part, self._has_sent_scores = None if is_ready else False, False
        self._with_link(lambda link: link.begin(is_ready, config.most_draft_tokens, vocab_size, drawn))

    def _wait_for_other(self) -> bool:
        return bool(self._with_link(lambda link: link.other_is_ready()))

    def _with_link(self, exchange: Callable[[Link], object]):
        """Call a function with the link; return None where there is no link, or it is lost."""
        if self.link is None:
            return None
        try:
            return exchange(self.link)
        except HostError as error:
            self.link = None
            if not self.is_draft:
                warn_caller(f"going on without the draft host: {error}")
            return None

    def send_scores(self, scores: Tensor) -> None:
        """Send the draft the scores of all visual tokens, if it takes part; once per request, on the target."""
        link = self.open_link()
        if link is not None and not self._has_sent_scores:
            link.send_verdict(GO_ON)
            link.send(scores)
            self._has_sent_scores = True

    def offer_scores(self, scores: Tensor) -> bool:
        """Send the scores and return true; return false if the draft has not answered whether it takes part."""
        if self._other_takes_part is None and self.link is not None and not self.link.other_has_answered():
            return False
        self.send_scores(scores)
        return True

    def fail(self) -> None:
        """Tell the draft that the target cannot finish the request."""
        link = self.open_link()
        if link is not None and link.owes_report:
            self._with_link(lambda link: link.receive_json())
        elif link is not None and not link.is_settled:
            with suppress(HostError):
                link.send_verdict(FAILED)
            self.link = None
            if not self.is_draft:
                warn_caller("going on without the draft host after a request that failed")


class BesideDraft:
    """Answers on the target's hosts, while the draft runs on another host.

    Args:
        pair: the target's end of the pair.
    """

    prefills = True

    def __init__(self, target: ModelParts, config: SpeculativeConfig, pair: Pair):
        self._target, self._config, self._pair = target, config, pair
        self.hosts = pair.hosts

    def answer(self, request: Request, prefiller: Prefiller) -> Outcome:
        with self._pair.beginning(self._config, self._target.vocab_size, request.sampling.temperature > 0):
            read = prefiller.read(request)
        with closing(read):
            try:
                watcher = make_watcher(self._config, self._target) if read.inputs.visual is not None else None
                if watcher is not None:  # the draft can use its scores before the prefill ends
                    watcher.request_early(self._pair.offer_scores)
                # Which cannot be cancelled: the draft host would be lost with it.
                state = prefiller.run(replace(read, request=replace(read.request, may_cancel=False)), watcher)
                answered = self._decode(read.request, watcher, state)
            except BaseException:
                self._pair.fail()
                raise
            return Outcome(read, state, answered)

    def _decode(self, request: Request, watcher: Watcher | None, state: PrefillResult) -> Answered:
        config, pair = self._config, self._pair
        with self.hosts.collective_stage("decode"), request.timer.stage("decode"):
            if watcher is not None:
                pair.send_scores(watcher.result())
            answer = state.begin_answer(self._target, request)
            pace = Pace(config.most_draft_tokens, config.keep_losing_draft)
            with apbv_attention(self._target.language_model):
                tokens, stats = generate_beside_draft(answer, pair.open_link(), pace)
        if stats.lost_draft is None and pair.link is None and self.hosts.rank == 0:
            stats.lost_draft = "an earlier request lost it"
        if stats.lost_draft:
            pair.link = None
        figures = {**asdict(config), **stats.summary(len(tokens))}
        draft_spans = None if stats.of_draft is None else stats.of_draft.spans
        return Answered(tokens, figures, spans=tuple(stats.record.spans), draft_spans=draft_spans)


class DraftHost:
    """Drafts for the target's hosts, on a host of its own.

    Args:
        pair: the draft's end of the pair.
    """

    prefills = False

    def __init__(self, draft: ModelParts, config: SpeculativeConfig, pair: Pair):
        self._model, self._config, self._pair = draft, config, pair
        self.hosts = pair.hosts

    def answer(self, request: Request, prefiller: Prefiller) -> Outcome:
        request = replace(request, stop=None)  # this host is told where the answer ends
        with self._pair.beginning(self._config, self._model.vocab_size, request.sampling.temperature > 0):
            read = prefiller.read(request)
        request = read.request
        # Should the target go on alone, this host waits for it after the request.
        with closing(read), self.hosts.working("draft"):
            try:
                tokens, report, draft = self._draft_for(read)
            except Exception:
                self._pair.link = None
                raise
        request.timer.mark_first_token()
        for token in tokens:
            if request.on_token is not None:
                request.on_token(token)
        kept = kept_by_frame(self._model, read.inputs, draft.kept)
        return Outcome(read, None, Answered(tokens, {"role": "draft", "num_drafted": report.num_drafted}, kept))

    def _draft_for(self, read: ReadRequest) -> tuple[list[int], DraftReport, Draft]:
        """Read the prompt and draft while the target prefills, unless the target's scores are needed first.

        Returns:
            The new tokens, the report, and the draft that drafted last.
        """
        parts, link, config = self._model, self._pair.link, self._config
        inputs, timer = read.inputs, read.request.timer
        num_visual = int(parts.is_visual(inputs.input_ids[0]).sum())
        is_scored = num_visual and make_watcher(config, parts) is not None
        awaited = ReceivedScores(link, num_visual) if is_scored else None
        task = DraftTask(
            target=parts,
            draft=parts,
            inputs=inputs,
            state=None,
            scores=awaited and awaited.result,
            hosts=self.hosts,
            config=config,
            keep=keep_policy(config),
            sampling=read.request.sampling,
            vocab_size=link.shared_vocab,
            leave_last=True,
            awaited=awaited,
        )
        try:
            with timer.stage("draft"):
                made = STRATEGIES[config.strategy].build(task)
        except HostError:  # the target failed, and need not be told
            raise
        except Exception:
            link.send_failure(first=True)
            raise
        with timer.stage("decode"), apbv_attention(parts.language_model):
            last, is_auto = int(inputs.input_ids[0, -1]), config.num_draft_tokens == "auto"
            return draft_beside(link, made, last, timer.spans, stops_with_target=is_auto)


def beside_draft(
    target: ModelParts | None, draft: ModelParts | None, hosts: HostGroup, config: SpeculativeConfig
) -> BesideDraft | DraftHost:
    """Return this host's way to answer where ``config.draft_host`` is set; collective.

    Args:
        target: the target; None on the draft host.
        draft: the draft model, on the host that drafts; else None.
    """
    pair = Pair.of(hosts, config)
    return DraftHost(draft, config, pair) if pair.is_draft else BesideDraft(target, config, pair)
