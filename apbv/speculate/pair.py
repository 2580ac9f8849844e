"""Target hosts and a draft host: who is who, and how the two sides go through a request together."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import SamplingConfig, SpeculativeConfig
from ..hosts import HostError, HostGroup
from ..inputs import ModelInputs
from ..models import ModelParts
from ..stats import StageTimer
from .link import FAILED, GO_ON, Link
from .pipeline import DraftReport, draft_beside
from .strategies import STRATEGIES, Draft, Prompt


@dataclass
class Pair:
    """This host's part in drafting beside the target.

    Attributes:
        hosts: who this host computes with: the target's hosts, or the draft host alone.
        is_draft: which of them it is.
        link: on host 0 of the target and on the draft host; None on others, and once the other end was lost.
        takes_part: whether the other end is ready for the request at hand.
    """

    hosts: HostGroup
    is_draft: bool
    link: Link | None
    takes_part: bool = False

    @property
    def open_link(self) -> Link | None:
        """The link, if there is somebody at its other end for this request."""
        return self.link if self.takes_part else None

    @classmethod
    def of(cls, hosts: HostGroup, config: SpeculativeConfig) -> "Pair":
        """The last of at least 2 hosts drafts, the others are the target's; collective."""
        last = hosts.size - 1
        is_draft = hosts.rank == last
        targets = hosts.subgroup(range(last))
        to_target = hosts.subgroup([0, last], min(config.draft_timeout, hosts.timeout / 2))
        # The draft waits while the target prefills; a target's host that ends is noticed at once.
        to_draft = hosts.subgroup([0, last], 10 * hosts.timeout)
        link = None if to_target is None else Link(to_target, to_draft)
        members = HostGroup.single(hosts.device) if is_draft else targets
        return cls(members, is_draft, link)

    @contextmanager
    def beginning(self, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> Iterator[None]:
        """Around reading a request: at its end both sides know whether the other one takes part.

        Args:
            vocab_size, drawn: see :meth:`Link.shake_hands`.

        Raises:
            HostError: on the draft host, where the target's hosts cannot read the request or are gone.
        """
        if self.is_draft and self.link is None:
            raise HostError("the target's hosts go on without this draft host since an earlier request")
        try:
            yield
        except BaseException:
            self._shake_hands(False, config, vocab_size, drawn)
            raise
        if self._shake_hands(True, config, vocab_size, drawn) or self.link is None:
            return
        if self.is_draft:
            raise HostError("the target's hosts cannot answer this request")
        warnings.warn("answering without the draft host, which cannot read this request", stacklevel=3)

    def _shake_hands(self, is_ready: bool, config: SpeculativeConfig, vocab_size: int, drawn: bool) -> bool:
        if self.link is None:
            return False
        try:
            self.takes_part = self.link.shake_hands(is_ready, config.most_draft_tokens, vocab_size, drawn)
        except HostError as error:
            self.link, self.takes_part = None, False
            if not self.is_draft:
                warnings.warn(f"going on without the draft host: {error}", stacklevel=3)
        return self.takes_part

    def send_scores(self, scores: Tensor) -> None:
        """From the target, where the draft waits for it: how much each visual token matters."""
        if self.open_link is not None:
            self.link.send_verdict(GO_ON)
            self.link.send(scores)

    def fail(self) -> None:
        """The target cannot finish the request: tell the draft."""
        if self.open_link is not None and not self.link.is_settled:
            with suppress(HostError):
                self.link.send_verdict(FAILED)
            self.link = None


class ReceivedScores:
    """Stands for what watched the prefill, on a host that did not prefill."""

    def __init__(self, link: Link, num_visual: int):
        self._link, self._num_visual = link, num_visual
        self._announcement = link.expect_verdict()

    def have_come(self) -> bool:
        """Whether :meth:`result` need not wait."""
        return self._announcement.has_ended()

    def result(self) -> Tensor:
        """``[visual tokens]``; waits for the target's prefill.

        Raises:
            HostError: the target's hosts failed.
        """
        code, *_ = self._announcement.wait().tolist()
        if code == FAILED:
            raise HostError("the target's hosts failed")
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
            return draft_beside(pair.link, made, int(inputs.input_ids[0, -1]), timer.stages.spans)
    except Exception:
        pair.link = None
        raise
