"""Links the target's host 0 and the draft host by two one-way channels.

Per round the draft sends its first token as soon as it is drafted, then the rest; the target sends one verdict,
which may arrive at any time and stops the draft. Each channel is a process group, so that a lost draft host breaks
no other communication.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..hosts import Exchange, HostError, HostGroup
from .drafters import Proposal

TARGET, DRAFT = 0, 1  # ranks within both channels
STARTUP_WINDOWS = 3  # the length in windows of what is drafted, at most, while the target prefills
# Codes of verdicts. After ALONE the draft sends no more windows, but still receives verdicts.
GO_ON, CORRECTED, DONE, FAILED, ALONE = range(5)
_BROKEN, _GAVE_UP, _NOTHING = -1, -2, -3  # sent by the draft in place of tokens; the first two where it failed


class DraftGaveUp(Exception):
    """The draft sends no more windows for this request; it still receives verdicts."""


class Link:
    """One end of the two channels between host 0 of the target and the draft host.

    Attributes:
        most: the largest number of tokens of the current window; a request's first window may be longer.
        shared_vocab: the size of the smaller vocabulary of target and draft.
        drawn_vocab: the length of the distributions that are sent with drawn tokens; 0 where decoding is greedy.
        is_settled: whether no request is under way, or the draft has been told that it has ended.
        owes_report: whether the draft has still to send its report of the ended request.

    Args:
        to_target, to_draft: the channels, each a group of these two hosts.
    """

    def __init__(self, to_target: HostGroup, to_draft: HostGroup):
        self._to_target, self._to_draft = to_target, to_draft
        self._sent: list[Exchange] = []
        self._skipped: list[Exchange] = []
        self.most = self._usual_most = 1
        self.shared_vocab = self.drawn_vocab = 0
        self.is_settled, self.owes_report = True, False
        self._bytes_before = 0

    def begin(self, is_ready: bool, most: int, vocab_size: int, drawn: bool) -> None:
        """Tell the other end whether this end can begin a request; :meth:`other_is_ready` returns its answer.

        Args:
            is_ready: whether this end can begin the request.
            most: γ, the tokens of a window.
            vocab_size: the vocabulary size of the model at this end.
            drawn: whether tokens are drawn, so that distributions over the shared vocabulary are sent, too.
        """
        is_draft = self._to_target.rank == DRAFT
        self._bytes_before = self._bytes_received()
        self.send(torch.tensor([int(is_ready), vocab_size]))
        incoming, source = (self._to_draft, TARGET) if is_draft else (self._to_target, DRAFT)
        self._answer = incoming.start_broadcast(torch.zeros(2, dtype=torch.int64), source)
        self._begun = is_ready, most, vocab_size, drawn

    def other_has_answered(self) -> bool:
        """Return whether :meth:`other_is_ready` would return, or raise, at once."""
        return self._answer.has_ended()

    def other_is_ready(self) -> bool:
        """Wait for the other end's answer, and return whether it has begun the request, too."""
        is_ready, most, vocab_size, drawn = self._begun
        ready, theirs = self._answer.wait().tolist()
        self.most, self._usual_most = STARTUP_WINDOWS * most, most
        self.shared_vocab = min(vocab_size, theirs)
        self.drawn_vocab = self.shared_vocab if drawn else 0
        self.is_settled = not (is_ready and ready)
        return bool(ready)

    @property
    def request_bytes(self) -> int:
        """The bytes received from the other end since the request began."""
        return self._bytes_received() - self._bytes_before

    def _bytes_received(self) -> int:
        return self._to_target.bytes_received + self._to_draft.bytes_received

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the other end, for :meth:`receive`, without waiting until it is received."""
        is_draft = self._to_target.rank == DRAFT
        channel, source = (self._to_target, DRAFT) if is_draft else (self._to_draft, TARGET)
        self._sent = [exchange for exchange in self._sent if not exchange.has_ended()]
        self._sent.append(channel.start_broadcast(tensor, source))

    def wait_until_received(self) -> None:
        """Wait until the other end has received all that was sent; what is unsent when a process ends is lost.

        Raises:
            HostError: the other end has ended, or receives no more.
        """
        for exchange in self._sent:
            exchange.wait()
        self._sent = []

    def send_first(self, token: int, row: Tensor | None = None) -> None:
        """Send the first token of a window, and the distribution it was drawn from."""
        self._send_window([token], [] if row is None else [row], 1)

    def send_rest(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Send the other tokens of a window; fewer than γ - 1 where the draft was stopped early."""
        self._send_window(tokens, rows, self.most - 1)
        self.most = self._usual_most

    def send_failure(self, first: bool, for_good: bool = True) -> None:
        """Send, in place of the window's missing tokens, that the draft cannot go on.

        Args:
            first: whether the window's first token is missing, too.
            for_good: whether the draft ends; else it only sends no more windows for this request.
        """
        code = _BROKEN if for_good else _GAVE_UP
        if first:
            self._send_window([code], [], 1)
        self._send_window([code], [], self.most - 1)

    def _send_window(self, tokens: Sequence[int], rows: Sequence[Tensor], count: int) -> None:
        """Send ``[count, 1 + V]``: each token before its distribution, and nothing behind the last."""
        if not count:
            return
        message = torch.full((count, 1 + self.drawn_vocab), _NOTHING, dtype=torch.float64)
        message[: len(tokens), 0] = torch.tensor(tokens, dtype=torch.float64)
        if rows:
            message[: len(rows), 1:] = torch.stack([row.cpu() for row in rows])
        self.send(message)

    def expect_verdict(self) -> Exchange:
        """Start to receive a verdict: its code, the number of verified new tokens, and the one after them."""
        return self._to_draft.start_broadcast(torch.zeros(3, dtype=torch.int64), TARGET)

    def receive(self, count: int, dtype: torch.dtype) -> Tensor:
        """Receive ``count`` numbers from the target."""
        return self._to_draft.start_broadcast(torch.zeros(count, dtype=dtype), TARGET).wait()

    def send_json(self, value: Any) -> None:
        """Send a JSON value of any size, for :meth:`receive_json`."""
        encoded = json.dumps(value).encode()
        self.send(torch.tensor([[len(encoded)]], dtype=torch.float64))
        self.send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))

    def receive_first(self) -> Proposal:
        """Receive the first token of the window that is being drafted.

        Raises:
            HostError: the draft host failed, ended, or did not answer in time.
            DraftGaveUp: the draft sends no more windows for this request.
        """
        self._receive_skipped()
        received = self._expect_window(1).wait()
        if received[0, 0] == _GAVE_UP:
            self.skip(first=False)
        return self._proposal(received)

    def receive_rest(self) -> Proposal:
        """Receive the other tokens of the window; errors are those of :meth:`receive_first`."""
        received = self._expect_window(self.most - 1)
        self.most = self._usual_most
        return Proposal([]) if received is None else self._proposal(received.wait())

    def _proposal(self, received: Tensor) -> Proposal:
        tokens = [token for token in _refuse_failure(received)[:, 0].long().tolist() if token != _NOTHING]
        return Proposal(tokens, received[: len(tokens), 1:] if self.drawn_vocab else None)

    def receive_json(self) -> Any:
        """Receive a value of :meth:`send_json`.

        Raises:
            HostError: as :meth:`receive_first`.
        """
        self.owes_report = False
        with suppress(DraftGaveUp):
            self._receive_skipped()
        length = int(_refuse_failure(self._expect(torch.zeros(1, 1, dtype=torch.float64)).wait()))
        return json.loads(bytes(self._expect(torch.zeros(length, dtype=torch.uint8)).wait().tolist()))

    def skip(self, first: bool) -> None:
        """Discard the rest of the window, or with ``first`` all of it, whenever it arrives."""
        expected = [self._expect_window(count) for count in ([1, self.most - 1] if first else [self.most - 1])]
        self._skipped += [exchange for exchange in expected if exchange is not None]
        self.most = self._usual_most

    def _receive_skipped(self) -> None:
        received, self._skipped = [exchange.wait() for exchange in self._skipped], []
        for tensor in received:
            _refuse_failure(tensor)

    def send_verdict(self, code: int, num_verified: int = 0, token: int = 0) -> None:
        """Send a round's verdict, see :meth:`expect_verdict`; nothing follows DONE and FAILED."""
        self.send(torch.tensor([code, num_verified, token]))
        self.is_settled, self.owes_report = code in (DONE, FAILED), code == DONE

    def _expect(self, tensor: Tensor) -> Exchange:
        return self._to_target.start_broadcast(tensor, DRAFT)

    def _expect_window(self, count: int) -> Exchange | None:
        return self._expect(torch.zeros(count, 1 + self.drawn_vocab, dtype=torch.float64)) if count else None


class ReceivedScores:
    """The scores of the target's prefill on a draft host, which does not prefill."""

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


def _refuse_failure(received: Tensor) -> Tensor:
    """Return a message of the draft, unless it says that the draft failed.

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
