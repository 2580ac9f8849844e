"""What target host 0 and the draft host tell each other, in two one-way channels.

Per round the draft sends its first token as soon as it has it, then the rest; the target sends one verdict, which
may come at any time and makes the draft stop. Channels are groups of their own, so that a lost draft host breaks
nothing else.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..hosts import Exchange, HostError, HostGroup
from .drafters import Proposal, packed, unpacked

TARGET, DRAFT = 0, 1  # ranks within both channels
STARTUP_WINDOWS = 3  # so many windows long may be what is drafted while the target prefills
GO_ON, CORRECTED, DONE, FAILED, ALONE = range(5)  # ALONE: no more windows; verdicts go on
_BROKEN, _GAVE_UP = -1, -2


class DraftGaveUp(Exception):
    """The draft writes nothing more for this request; it still follows it to its end."""


class Link:
    """One end of the two channels between host 0 of the target and the draft host.

    Attributes:
        most: how many tokens the window at hand may have; the first one of a request more than the others.
        is_settled: no request is under way, or the draft knows that it has ended.
        owes_account: it does, and has yet to give its account of it.

    Args:
        to_target, to_draft: groups of these two.
    """

    def __init__(self, to_target: HostGroup, to_draft: HostGroup):
        self._to_target, self._to_draft = to_target, to_draft
        self._sent: list[Exchange] = []
        self._skipped: list[Exchange] = []
        self.most = self._usual_most = 1
        self.shared_vocab = self.drawn_vocab = 0
        self.is_settled, self.owes_account = True, False
        self._bytes_before = 0

    def begin(self, is_ready: bool, most: int, vocab_size: int, drawn: bool) -> None:
        """Begin a request, or say that it cannot be begun; whether the other end can is :meth:`other_is_ready`.

        Args:
            most: γ, tokens of a window.
            vocab_size: of the model at this end.
            drawn: tokens are drawn, so that the distributions over the shared vocabulary travel, too.
        """
        is_draft = self._to_target.rank == DRAFT
        self._bytes_before = self._bytes_received()
        self._send(torch.tensor([int(is_ready), vocab_size]))
        incoming, source = (self._to_draft, TARGET) if is_draft else (self._to_target, DRAFT)
        self._answer = incoming.start_broadcast(torch.zeros(2, dtype=torch.int64), source)
        self._begun = is_ready, most, vocab_size, drawn

    def has_heard(self) -> bool:
        """Whether :meth:`other_is_ready` would return, or raise, at once."""
        return self._answer.has_ended()

    def other_is_ready(self) -> bool:
        """Whether the other end has begun the request, too; waits until it has said."""
        is_ready, most, vocab_size, drawn = self._begun
        ready, theirs = self._answer.wait().tolist()
        self.most, self._usual_most = STARTUP_WINDOWS * most, most
        self.shared_vocab = min(vocab_size, theirs)
        self.drawn_vocab = self.shared_vocab if drawn else 0
        self.is_settled = not (is_ready and ready)
        return bool(ready)

    @property
    def request_bytes(self) -> int:
        """What the other end sent here since the request began."""
        return self._bytes_received() - self._bytes_before

    def _bytes_received(self) -> int:
        return self._to_target.bytes_received + self._to_draft.bytes_received

    def _send(self, tensor: Tensor) -> None:
        """To the other end, without waiting for it to listen."""
        is_draft = self._to_target.rank == DRAFT
        channel, source = (self._to_target, DRAFT) if is_draft else (self._to_draft, TARGET)
        self._sent = [exchange for exchange in self._sent if not exchange.has_ended()]
        self._sent.append(channel.start_broadcast(tensor, source))

    def wait_until_received(self) -> None:
        """Wait until the other end has received all that was sent: a process that ends takes the rest along.

        Raises:
            HostError: the other end is gone, or does not listen any more.
        """
        for exchange in self._sent:
            exchange.wait()
        self._sent = []

    # ---- the draft's end ----

    def send_first(self, token: int, row: Tensor | None = None) -> None:
        """The first token of a window, and what it was drawn from."""
        self._send(torch.tensor([token]))
        self._send_rows([] if row is None else [row], 1)

    def send_rest(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """The others; fewer than agreed on where the draft was stopped."""
        self._send(torch.tensor(packed(tokens, self.most - 1)))
        self._send_rows(rows, self.most - 1)
        self.most = self._usual_most

    def send_failure(self, first: bool, for_good: bool = True) -> None:
        """The draft cannot go on: in place of a window, or of what is missing of it.

        Args:
            for_good: it leaves; else it only writes nothing more for this request.
        """
        code = _BROKEN if for_good else _GAVE_UP
        if first:
            self._send(torch.tensor([code]))
            self._send_rows([], 1)
        self._send(torch.tensor([code] * self.most))
        self._send_rows([], self.most - 1)

    def expect_verdict(self) -> Exchange:
        """Ask for a round's verdict: its code (:data:`GO_ON` and so on), new tokens that stand, the next one."""
        return self._to_draft.start_broadcast(torch.zeros(3, dtype=torch.int64), TARGET)

    def receive(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers that the target sends."""
        return self._to_draft.start_broadcast(torch.zeros(count, dtype=dtype), TARGET).wait()

    def send_json(self, value: Any) -> None:
        """Something of any size for :meth:`receive_json`."""
        encoded = json.dumps(value).encode()
        self._send(torch.tensor([len(encoded)]))
        self._send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))

    def _send_rows(self, rows: Sequence[Tensor], count: int) -> None:
        if not self.drawn_vocab or not count:
            return
        padded = torch.zeros(count, self.drawn_vocab, dtype=torch.float64)
        for place, row in enumerate(rows):
            padded[place] = row
        self._send(padded)

    # ---- the target's end ----

    def receive_first(self) -> Proposal:
        """The first token of the window that is being drafted.

        Raises:
            HostError: the draft host failed, ended, or did not answer in time.
            DraftGaveUp: nothing more will come.
        """
        self._receive_skipped()
        received, rows = self._expect(torch.zeros(1, dtype=torch.int64)).wait(), self._expect_rows(1)
        if received[0] == _GAVE_UP:
            self.skip(first=False)
        (token,) = _refuse_failure(received).tolist()
        return Proposal([token], None if rows is None else rows.wait())

    def receive_rest(self) -> Proposal:
        """The other tokens of the window; raises as :meth:`receive_first`."""
        received = self._expect(torch.zeros(self.most, dtype=torch.int64)).wait()
        rows = self._expect_rows(self.most - 1)
        self.most = self._usual_most
        tokens = unpacked(_refuse_failure(received).tolist())
        return Proposal(tokens, None if rows is None else rows.wait()[: len(tokens)])

    def receive_json(self) -> Any:
        """What :meth:`send_json` sent.

        Raises:
            HostError: as :meth:`receive_first`.
        """
        self.owes_account = False
        with suppress(DraftGaveUp):
            self._receive_skipped()
        (length,) = _refuse_failure(self._expect(torch.zeros(1, dtype=torch.int64)).wait()).tolist()
        return json.loads(bytes(self._expect(torch.zeros(length, dtype=torch.uint8)).wait().tolist()))

    def skip(self, first: bool) -> None:
        """The rest of the window (with its ``first`` token: all of it) is of no use: receive it when it comes."""
        expected = [self._expect(torch.zeros(1, dtype=torch.int64)), self._expect_rows(1)] if first else []
        expected += [self._expect(torch.zeros(self.most, dtype=torch.int64)), self._expect_rows(self.most - 1)]
        self._skipped += [exchange for exchange in expected if exchange is not None]
        self.most = self._usual_most

    def _receive_skipped(self) -> None:
        received, self._skipped = [exchange.wait() for exchange in self._skipped], []
        for tensor in received:
            _refuse_failure(tensor)

    def send_verdict(self, code: int, num_standing: int = 0, token: int = 0) -> None:
        """What became of a round; nothing follows DONE and FAILED."""
        self._send(torch.tensor([code, num_standing, token]))
        self.is_settled, self.owes_account = code in (DONE, FAILED), code == DONE

    def send(self, tensor: Tensor) -> None:
        """Numbers for :meth:`receive`."""
        self._send(tensor)

    def _expect(self, tensor: Tensor) -> Exchange:
        return self._to_target.start_broadcast(tensor, DRAFT)

    def _expect_rows(self, count: int) -> Exchange | None:
        if not self.drawn_vocab or not count:
            return None
        return self._expect(torch.zeros(count, self.drawn_vocab, dtype=torch.float64))


def _refuse_failure(received: Tensor) -> Tensor:
    """What the draft sent, unless that is that it failed."""
    if received.dtype == torch.int64 and received[0] == _BROKEN:
        raise HostError("the draft host failed")
    if received.dtype == torch.int64 and received[0] == _GAVE_UP:
        raise DraftGaveUp
    return received
