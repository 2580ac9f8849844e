"""Target hosts and a draft host: who is who, and how the two sides go through a request together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import SamplingConfig, SpeculativeConfig
from ..hosts import HostError, HostGroup
from ..input.model_inputs import ModelInputs
from ..model.parts import ModelParts
from ..stats import StageTimer
from ..warn import warn_caller
from .draft import Draft, Prompt
from .link import FAILED, GO_ON, Link
from .pipeline import DraftReport, draft_beside
from .strategies import STRATEGIES


@dataclass
class Pair:
    """This host's part in drafting beside the target.

    Attributes:
        hosts: who this host computes with: the target's hosts, or the draft host alone.
        is_draft: which of them it is.
        link: on host 0 of the target and on the draft host; None on others, and once the other end was lost.
    """

    hosts: HostGroup
    is_draft: bool
    link: Link | None
    _takes_part: bool | None = field(default=False, init=False)  # None: it has not been heard yet
    _has_scores: bool = field(default=False, init=False)  # of this request

    def open_link(self) -> Link | None:
        """The link, if there is somebody at its other end for this request; waits until that is known."""
        if self._takes_part is None:
            self._takes_part = self._hear()
            if not self._takes_part and self.link is not None and not self.is_draft:
                warn_caller("answering without the draft host, which cannot read this request")
        return self.link if self._takes_part else None

    @classmethod
    def of(cls, hosts: HostGroup, config: SpeculativeConfig) -> "Pair":
        """The last of at least 2 hosts drafts, the others are the target's; collective."""
        last = hosts.size - 1
        is_draft = hosts.rank == last
        targets = hosts.subgroup(range(last))
        # Drafting is no work that the target waits for: it can do without.
        to_target = hosts.subgroup([0, last], min(config.draft_timeout, hosts.timeout / 4), waits_for_work=False)
        # The draft waits while the target prefills; a target's host that ends is noticed at once.
        to_draft = hosts.subgroup([0, last], 10 * hosts.timeout)
        link = None if to_target is None else Link(to_target, to_draft)
        members = HostGroup.single(hosts.device) if is_draft else targets
        return cls(members, is_draft, link)

    @contextmanager
    def beginning(self, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> Iterator[None]:
        """Around reading a request: at its end each side tells the other whether it takes part.

        The draft then waits for the target's word; the target hears the draft's when it needs it.

        Args:
            vocab_size, drawn: see :meth:`Link.begin`.

        Raises:
            HostError: on the draft host, where the target's hosts cannot read the request or are gone.
        """
        if self.is_draft and self.link is None:
            raise HostError("the target's hosts go on without this draft host since an earlier request")
        try:
            yield
        except BaseException:
            self._tell(False, config, vocab_size, drawn)
            self._hear()
            raise
        self._tell(True, config, vocab_size, drawn)
        if self.is_draft and self.open_link() is None:
            raise HostError("the target's hosts cannot answer this request")

    def _tell(self, is_ready: bool, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> None:
        self._takes_part, self._has_scores = None if is_ready else False, False
        self._use(lambda link: link.begin(is_ready, config.most_draft_tokens, vocab_size, drawn))

    def _hear(self) -> bool:
        return bool(self._use(lambda link: link.other_is_ready()))

    def _use(self, exchange: Callable[[Link], object]):
        """Use the link; None where there is none, and where it is lost, which the target says once."""
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
        """From the target, where the draft waits for it: how much each visual token matters; once a request."""
        link = self.open_link()
        if link is not None and not self._has_scores:
            link.send_verdict(GO_ON)
            link.send(scores)
            self._has_scores = True

    def offer_scores(self, scores: Tensor) -> bool:
        """:meth:`send_scores`, unless it would have to wait for the draft to have read the request: then false."""
        if self._takes_part is None and self.link is not None and not self.link.has_heard():
            return False
        self.send_scores(scores)
        return True

    def fail(self) -> None:
        """The target cannot finish the request: tell the draft."""
        link = self.open_link()
        if link is not None and link.owes_account:
            self._use(lambda link: link.receive_json())
        elif link is not None and not link.is_settled:
            with suppress(HostError):
                link.send_verdict(FAILED)
            self.link = None
            if not self.is_draft:
                warn_caller("going on without the draft host after a request that failed")


class ReceivedScores:
    """Stands for what watched the prefill, on a host that did not prefill."""

    def __init__(self, link: Link, num_visual: int):
        self._link, self._num_visual = link, num_visual
        self._announcement = link.expect_verdict()

    def have_come(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._announcement.has_ended()

    def wait(self) -> None:
        """Until the target knows the scores: in its prefill, or at the end of that.

        Raises:
            HostError: the target's hosts failed.
        """
        code, *_ = self._announcement.wait().tolist()
        if code == FAILED:
            raise HostError("the target's hosts failed")

    def result(self) -> Tensor:
        """``[visual tokens]``; :meth:`wait`\ s, and raises as that does."""
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
    """The draft host's part of a request that both sides have begun.

    It reads the prompt and drafts while the target prefills, unless it cannot begin before the target's scores.

    Returns:
        The new tokens, what was done, and what the draft saw.
    """
    num_visual = int(draft.is_visual(inputs.input_ids[0]).sum())
    is_scored = num_visual and STRATEGIES[config.strategy].observer(config, draft) is not None
    observer = ReceivedScores(pair.link, num_visual) if is_scored else None
    vocab_size = pair.link.shared_vocab
    prompt = Prompt(
        draft, draft, inputs, None, observer, pair.hosts, config, sampling, vocab_size, leave_last=True
    )
    try:
        try:
            with timer.stage("draft"):
                made = STRATEGIES[config.strategy].build(prompt)
        except HostError:  # the target's: it need not be told
            raise
        except Exception:
            pair.link.send_failure(first=True)
            raise
        with timer.stage("decode"):
            last, is_auto = int(inputs.input_ids[0, -1]), config.num_draft_tokens == "auto"
            return draft_beside(pair.link, made, last, timer.stages.spans, stops_with_target=is_auto)
    except Exception:
        pair.link = None
        raise
