"""This module pairs the target's hosts with a draft host, and takes both through a request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import SamplingConfig, SpeculativeConfig
from ..hosts import HostError, HostGroup
from ..input.model_inputs import ModelInputs
from ..model.attention import apbv_attention
from ..model.parts import ModelParts
from ..stats import StageTimer
from ..warn import warn_caller
from .draft import Draft, DraftTask
from .link import FAILED, GO_ON, Link
from .pipeline import DraftReport, draft_beside
from .strategies import STRATEGIES, keep_policy


@dataclass
class Pair:
    """A Pair is this host's end of the target's hosts and their draft host.

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
        # The draft waits while the target prefills; it notices at once if a host of the target ends.
        to_draft = hosts.subgroup([0, last], 10 * hosts.timeout, has_data=False)
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


class ReceivedScores:
    """A ReceivedScores takes the place of the prefill's observer on a draft host, which does not prefill."""

    def __init__(self, link: Link, num_visual: int):
        self._link, self._num_visual = link, num_visual
        self._announcement = link.expect_verdict()

    def have_come(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._announcement.has_ended()

    def wait(self) -> None:
        """Wait until the target knows the scores, in its prefill or at its end.

        Raises:
            HostError: the target's hosts failed.
        """
        code, *_ = self._announcement.wait().tolist()
        if code == FAILED:
            raise HostError("the target's hosts failed")

    def result(self) -> Tensor:
        """Wait for the scores, and return them, ``[visual tokens]``; errors are those of :meth:`wait`."""
        self.wait()
        return self._link.receive(self._num_visual, torch.float32)


def draft_request(
    pair: Pair,
    draft: ModelParts,
    inputs: ModelInputs,
    config: SpeculativeConfig,
    sampling: SamplingConfig,
    timer: StageTimer,
) -> tuple[list[int], DraftReport, Draft]:
    """Draft for a request that both sides have begun; on the draft host.

    The draft reads the prompt and drafts while the target prefills, unless it needs the target's scores first.

    Returns:
        The new tokens, the report, and the draft that drafted last.
    """
    num_visual = int(draft.is_visual(inputs.input_ids[0]).sum())
    is_scored = num_visual and STRATEGIES[config.strategy].observer(config, draft) is not None
    observer = ReceivedScores(pair.link, num_visual) if is_scored else None
    vocab_size = pair.link.shared_vocab
    task = DraftTask(
        target=draft,
        draft=draft,
        inputs=inputs,
        state=None,
        observer=observer,
        hosts=pair.hosts,
        config=config,
        keep=keep_policy(config),
        sampling=sampling,
        vocab_size=vocab_size,
        leave_last=True,
    )
    try:
        try:
            with timer.stage("draft"):
                made = STRATEGIES[config.strategy].build(task)
        except HostError:  # the target failed, and need not be told
            raise
        except Exception:
            pair.link.send_failure(first=True)
            raise
        with timer.stage("decode"), apbv_attention(draft.language_model):
            last, is_auto = int(inputs.input_ids[0, -1]), config.num_draft_tokens == "auto"
            return draft_beside(pair.link, made, last, timer.spans, stops_with_target=is_auto)
    except Exception:
        pair.link = None
        raise
