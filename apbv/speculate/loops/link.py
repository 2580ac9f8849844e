"""Two one-way channels between the target's host 0 and the draft host.

Per round the draft sends its first token as soon as it is drafted, then the rest; the target sends
one verdict, which may arrive at any time and stops the draft. Each channel is a process group, so
that a failed draft host breaks no other communication.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...config import SpeculativeConfig
from ...errors import HostError, InvalidConfigError
from ...hosts import HostGroup, Pending
from ...reporting import warn_caller
from ..drafters.drafters import Proposal

T = TypeVar("T")

DRAFT = 1  # the draft host's rank within both channels; the target's is 0
# Maximum length of a request's first window, which is drafted while the target prefills, in
# windows.
STARTUP_WINDOWS = 3
# Codes of verdicts. After ALONE the draft sends no more windows, but still receives verdicts.
GO_ON, CORRECTED, DONE, FAILED, ALONE = range(5)
# Sent by the draft instead of tokens.
_BROKEN = -1  # it failed for good
_GAVE_UP = -2  # it failed for this request
_NOTHING = -3  # no token in this place


class DraftGaveUp(Exception):
    """Raised if the draft sends no more drafts for this request; it still receives verdicts."""


@dataclass(frozen=True)
class _Beginning:
    """How this end has begun a request; for the attributes see :meth:`Link.begin`."""

    is_ready: bool
    most: int
    vocab_size: int
    drawn: bool
    settings: int


class Link:
    """One end of the two channels between host 0 of the target and the draft host.

    A window is two messages: its first token, and all others. The target expects both in every
    round; what it does not read is checked for failures before the next window.

    Attributes:
        most: the largest number of tokens of the current window; a request's first window may be
            longer.
        shared_vocab: the size of the smaller vocabulary of target and draft.
        drawn_vocab: the length of the distributions that are sent with drawn tokens; 0 where
            decoding is greedy.
        answer: what the other end has sent at the beginning: whether it can begin the request, the
            size of its vocabulary, and its settings.
        settings_differ: whether the other end has begun the request with other settings.
        is_settled: whether no request is under way, or the draft has been told that it has ended.
        owes_report: whether the draft has still to send its report of the ended request.

    Args:
        to_target, to_draft: the channels, each a group of these two hosts.
    """

    def __init__(self, to_target: HostGroup, to_draft: HostGroup):
        self._rank = to_target.rank
        if self._rank == DRAFT:
            self._incoming = to_draft
            self._outgoing = to_target
        else:
            self._incoming = to_target
            self._outgoing = to_draft
        self._sent: list[Pending] = []
        self._unread: deque[Pending] = deque()  # messages of the last window
        self._beginning: _Beginning | None = None  # of the current request
        self.most = 1
        self._usual_most = 1  # γ
        self._lacks_first = True  # of the current window, on the draft host
        self.shared_vocab = 0
        self.drawn_vocab = 0
        self.is_settled = True
        self.owes_report = False
        self.settings_differ = False

    def begin(
        self, is_ready: bool, most: int, vocab_size: int, drawn: bool, settings: int = 0
    ) -> None:
        """Send the other end whether this end can begin a request.

        :meth:`other_is_ready` returns its answer.

        Args:
            is_ready: whether this end can begin the request.
            most: γ, the tokens of a window.
            vocab_size: the vocabulary size of the model at this end.
            drawn: whether tokens are drawn, so that distributions over the shared vocabulary are
                sent, too.
            settings: a digest of the request's settings, 64 bits with a sign.
        """
        self._lacks_first = True
        self.settings_differ = False
        self._beginning = _Beginning(is_ready, most, vocab_size, drawn, settings)
        self.send(torch.tensor([int(is_ready), vocab_size, settings]))
        self.answer = self._expect(torch.zeros(3, dtype=torch.int64))

    def other_is_ready(self) -> bool:
        """Wait for the other end's answer.

        Returns:
            Whether it has begun the request, too, with the same settings.
        """
        here = self._beginning
        assert here is not None, "this end has begun the request"
        there_is_ready, there_vocab_size, there_settings = self.answer.wait().tolist()
        both_are_ready = here.is_ready and bool(there_is_ready)
        self.settings_differ = both_are_ready and here.settings != there_settings
        self.most = STARTUP_WINDOWS * here.most
        self._usual_most = here.most
        self.shared_vocab = min(here.vocab_size, there_vocab_size)
        self.drawn_vocab = self.shared_vocab if here.drawn else 0
        self.is_settled = not both_are_ready or self.settings_differ
        return bool(there_is_ready) and not self.settings_differ

    def send(self, tensor: Tensor) -> None:
        """Start to send a tensor to the other end, for :meth:`receive`."""
        self._sent = [exchange for exchange in self._sent if not exchange.ready()]
        self._sent.append(self._outgoing.start_broadcast(tensor, self._rank))

    def wait_until_received(self) -> None:
        """Wait until the other end has received everything.

        What is unsent when a process ends is lost.

        Raises:
            HostError: the other end has ended, or receives no more.
        """
        for exchange in self._sent:
            exchange.wait()
        self._sent = []

    def send_first(self, token: int, row: Tensor | None = None) -> None:
        """Send the first token of a window, and the distribution it was drawn from."""
        self._send_window([token], [] if row is None else [row], 1)
        self._lacks_first = False

    def send_rest(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Send the other tokens of a window; fewer than γ - 1 where the draft was stopped early."""
        self._send_window(tokens, rows, self.most - 1)
        self.most = self._usual_most
        self._lacks_first = True

    def send_failure(self, for_good: bool = True) -> None:
        """Send, in place of what the window lacks, that the draft cannot go on.

        Args:
            for_good: whether the draft ends; else it only sends no more windows for this request.
        """
        code = _BROKEN if for_good else _GAVE_UP
        if self._lacks_first:
            self.send_first(code)
        self.send_rest([code], [])

    def _send_window(self, tokens: Sequence[int], rows: Sequence[Tensor], count: int) -> None:
        """Send a message ``[count, 1 + V]``: each token before its distribution.

        Rows after the last token hold the code for nothing.
        """
        if count == 0:
            return
        message = torch.full((count, 1 + self.drawn_vocab), _NOTHING, dtype=torch.float64)
        message[: len(tokens), 0] = torch.tensor(tokens, dtype=torch.float64)
        if rows:
            message[: len(rows), 1:] = torch.stack([row.cpu() for row in rows])
        self.send(message)

    def expect_verdict(self) -> Pending:
        """Start to receive a verdict.

        It is its code, the number of verified new tokens, and the token after them. Waiting for it
        raises HostError where the target's hosts failed.
        """

        def checked(verdict: Tensor) -> Tensor:
            if verdict[0] == FAILED:
                raise HostError("the target's hosts failed")
            return verdict

        return self._expect(torch.zeros(3, dtype=torch.int64)).then(checked)

    def receive(self, count: int, dtype: torch.dtype) -> Tensor:
        """Receive ``count`` numbers from the other end."""
        return self._expect(torch.zeros(count, dtype=dtype)).wait()

    def send_json(self, value: Any) -> None:
        """Send a JSON value of any size, for :meth:`receive_json`."""
        encoded = json.dumps(value).encode()
        self.send(torch.tensor([[len(encoded)]], dtype=torch.float64))
        self.send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))

    def expect_window(self) -> None:
        """Start to receive the next window; errors are those of :meth:`receive_first`."""
        self._refuse_unread()
        self._expect_message(1)
        if self.most > 1:
            self._expect_message(self.most - 1)
        self.most = self._usual_most

    def _expect_message(self, count: int) -> None:
        """Start to receive a message of ``count`` tokens."""
        message = torch.zeros(count, 1 + self.drawn_vocab, dtype=torch.float64)
        self._unread.append(self._expect(message))

    def receive_first(self) -> Proposal:
        """Receive the first token of the next window, which is being drafted.

        Raises:
            HostError: the draft host failed, ended, or did not answer in time.
            DraftGaveUp: the draft sends no more windows for this request.
        """
        self.expect_window()
        return self.receive_rest()

    def receive_rest(self) -> Proposal:
        """Receive the other tokens of the window; errors are those of :meth:`receive_first`."""
        if not self._unread:
            return Proposal([])
        received = _refuse_failure(self._unread.popleft().wait())
        tokens = [token for token in received[:, 0].long().tolist() if token != _NOTHING]
        q = received[: len(tokens), 1:] if self.drawn_vocab else None
        return Proposal(tokens, q)

    def receive_json(self) -> Any:
        """Receive a value of :meth:`send_json`.

        Raises:
            HostError: as :meth:`receive_first`.
        """
        self.owes_report = False
        with suppress(DraftGaveUp):
            self._refuse_unread()
        header = self._expect(torch.zeros(1, 1, dtype=torch.float64)).wait()
        num_bytes = int(_refuse_failure(header))
        encoded = self.receive(num_bytes, torch.uint8)
        return json.loads(bytes(encoded.tolist()))

    def _refuse_unread(self) -> None:
        """Receive unread messages; raise if one reports a failure."""
        while self._unread:
            _refuse_failure(self._unread.popleft().wait())

    def send_verdict(self, code: int, num_verified: int = 0, token: int = 0) -> None:
        """Send a round's verdict, see :meth:`expect_verdict`; nothing follows DONE and FAILED."""
        self.send(torch.tensor([code, num_verified, token]))
        self.is_settled = code in (DONE, FAILED)
        self.owes_report = code == DONE

    def _expect(self, tensor: Tensor) -> Pending:
        return self._incoming.start_broadcast(tensor, 1 - self._rank)


def _refuse_failure(received: Tensor) -> Tensor:
    """Return a message of the draft, or raise if it reports a failure.

    Raises:
        HostError: the draft host failed.
        DraftGaveUp: the draft sends no more windows for this request.
    """
    code = received.flatten()[0]
    if code == _BROKEN:
        raise HostError("the draft host failed")
    if code == _GAVE_UP:
        raise DraftGaveUp
    return received


@dataclass
class Pair:
    """This host's connection between the target's hosts and their draft host.

    Attributes:
        hosts: the hosts that this host computes with: the target's hosts, or the draft host alone.
        is_draft: whether this is the draft host.
        link: the link, on host 0 of the target and on the draft host; None on other hosts, and
            after the other end was lost.
        lost: why it was lost.
    """

    hosts: HostGroup
    is_draft: bool
    link: Link | None
    lost: str | None = None
    # In this request; None: the other end has not answered yet.
    _other_takes_part: bool | None = field(default=False, init=False)
    _has_sent_scores: bool = field(default=False, init=False)

    @classmethod
    def of(cls, hosts: HostGroup, config: SpeculativeConfig) -> "Pair":
        """Pair the last of at least 2 hosts, which drafts, with the target's hosts; collective."""
        last = hosts.size - 1
        is_draft = hosts.rank == last
        targets = hosts.subgroup(range(last))
        # The target does not wait for a draft host that is busy: it can decode without it.
        patience = min(config.draft_timeout, hosts.timeout / 4)
        to_target = hosts.subgroup([0, last], patience, waits_for_work=False, has_data=False)
        # The draft waits while the target works, and a little longer, to hear of a target host that
        # is silent.
        to_draft = hosts.subgroup([0, last], 1.25 * hosts.timeout, has_data=False)
        link = None
        if to_target is not None and to_draft is not None:
            link = Link(to_target, to_draft)
        if is_draft:
            return cls(HostGroup.single(hosts.device), is_draft, link)
        assert targets is not None, "all hosts but the last run the target"
        return cls(targets, is_draft, link)

    @contextmanager
    def beginning(
        self,
        config: SpeculativeConfig,
        vocab_size: int,
        drawn: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[None]:
        """Begin a request, which the body reads.

        Then the two sides exchange whether they take part.

        The draft then waits for the target's answer; the target reads the draft's when it needs the
        draft.

        Args:
            vocab_size, drawn: see :meth:`Link.begin`.
            settings: of the request; both sides must have the same.

        Raises:
            InvalidConfigError: on the draft host, if its settings differ from the target's.
            HostError: on the draft host, if the target's hosts cannot read the request or have
                ended.
        """
        if self.is_draft and self.link is None:
            raise HostError("this draft host was dropped in an earlier request")
        is_ready = False
        try:
            yield
            is_ready = True
        finally:
            self._other_takes_part = None if is_ready else False
            self._has_sent_scores = False
            digest = hashlib.sha256(json.dumps(settings).encode()).digest()
            settings_number = int.from_bytes(digest[:8], "little", signed=True)
            self._with_link(
                lambda link: link.begin(
                    is_ready, config.most_draft_tokens, vocab_size, drawn, settings_number
                )
            )
            if not is_ready:
                self._with_link(lambda link: link.other_is_ready())
        if self.is_draft and self.open_link() is None:
            raise HostError(self.lost or "the target's hosts cannot answer this request")

    def open_link(self) -> Link | None:
        """Return the link if the other end takes part in this request, else None.

        Waits until that is known.

        Raises:
            InvalidConfigError: the other end has other settings for this request; raised there,
                too.
        """
        if self._other_takes_part is None:
            self._other_takes_part = bool(self._with_link(lambda link: link.other_is_ready()))
            if self.link is not None and self.link.settings_differ:
                raise InvalidConfigError(
                    "the draft host has other settings for this request than the target's hosts: "
                    "pass the same prompt, frames and sampling parameters on every host"
                )
            if not self._other_takes_part and self.link is not None and not self.is_draft:
                warn_caller("answering without the draft host, which cannot read this request")
        return self.link if self._other_takes_part else None

    def with_other(self, exchange: Callable[[Link], T]) -> T | None:
        """Call a function with the link; return None if the other end takes no part, or is lost."""
        if self.open_link() is None:
            return None
        return self._with_link(exchange)

    def _with_link(self, exchange: Callable[[Link], T]) -> T | None:
        """Call a function with the link; return None if the other end is lost."""
        if self.link is None:
            return None
        try:
            return exchange(self.link)
        except HostError as error:
            self._lose(self.link, str(error), f"going on without the draft host: {error}")
            return None

    def _lose(self, link: Link, why: str, warning: str) -> None:
        """Give up the link for good; warn where the target runs."""
        if not link.is_settled:
            with suppress(HostError):  # a slow draft may still receive this
                link.send_verdict(FAILED)
        self.link = None
        self.lost = why
        if not self.is_draft:
            warn_caller(warning)

    def allow_prefill(self) -> None:
        """Let a draft that prefills after the target begin, if it takes part; on the target."""
        self.with_other(lambda link: link.send_verdict(GO_ON))

    def send_scores(self, scores: Tensor, waits: bool = True) -> bool:
        """Send the draft the scores of all visual tokens, if it takes part; on the target.

        They are sent once per request.

        Returns:
            False if the draft has not answered whether it takes part, and this does not wait for
            that.
        """
        undecided = self.link if self._other_takes_part is None else None
        if undecided is not None and not waits and not undecided.answer.ready():
            return False
        link = self.open_link()
        if link is not None and not self._has_sent_scores:
            link.send_verdict(GO_ON)
            link.send(scores)
            self._has_sent_scores = True
        return True

    def fail(self) -> None:
        """Notify the draft that the target cannot finish the request."""
        link = self.open_link()
        if link is not None and link.owes_report:
            self._with_link(lambda link: link.receive_json())
        elif link is not None and not link.is_settled:
            self._lose(
                link,
                "an earlier request failed",
                "going on without the draft host after a request that failed",
            )
