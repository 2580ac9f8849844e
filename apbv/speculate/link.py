"""What target host 0 and the draft host tell each other, in two one-way channels.

Per round the draft sends its first token as soon as it has it, then the rest; the target sends one verdict, which
may come at any time and makes the draft stop. Channels are groups of their own, so that a lost draft host breaks
nothing else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hosts import Exchange, HostError, HostGroup
from .drafters import Proposal

TARGET, DRAFT = 0, 1  # ranks within both channels
GO_ON, CORRECTED, DONE, FAILED = range(4)
_BROKEN = -1


class Link:
    """One end of the two channels between host 0 of the target and the draft host.

    Args:
        to_target, to_draft: groups of these two.
    """

    def __init__(self, to_target: HostGroup, to_draft: HostGroup):
        self._to_target, self._to_draft = to_target, to_draft
        self._under_way: list[Exchange] = []
        self.most, self.vocab_size = 1, 0

    def shake_hands(self, is_ready: bool, most: int, vocab_size: int) -> bool:
        """Begin a request, or say that it cannot be begun; whether the other end is ready.

        Args:
            most: γ, tokens of a window.
            vocab_size: of the draft where tokens are drawn, so that their distributions travel, too; else 0. The
                target's end need not know it.
        """
        mine = torch.tensor([int(is_ready), vocab_size])
        is_draft = self._to_target.rank == DRAFT
        channels = (self._to_target, self._to_draft)
        outgoing, incoming = channels if is_draft else channels[::-1]
        sent = outgoing.start_broadcast(mine, DRAFT if is_draft else TARGET)
        ready, theirs = (
            incoming.start_broadcast(torch.zeros_like(mine), TARGET if is_draft else DRAFT).wait().tolist()
        )
        sent.wait()
        self.most, self.vocab_size = most, vocab_size if is_draft else theirs
        return bool(ready)

    # ---- the draft's end ----

    def send_first(self, token: int, row: Tensor | None = None) -> None:
        """The first token of a window, and what it was drawn from."""
        self._send(torch.tensor([token]))
        self._send_rows([] if row is None else [row], 1)

    def send_rest(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """The others; fewer than agreed on where the draft was stopped."""
        self._send(torch.tensor([len(tokens), *tokens, *[0] * (self.most - 1 - len(tokens))]))
        self._send_rows(rows, self.most - 1)

    def send_failure(self, first: bool) -> None:
        """The draft cannot go on: in place of a window's first token, or of the rest."""
        self._send(torch.tensor([_BROKEN] if first else [_BROKEN] * self.most))

    def expect_verdict(self) -> Exchange:
        """Ask for a round's verdict: (GO_ON | CORRECTED | DONE | FAILED, new tokens that stand, the next one)."""
        return self._to_draft.start_broadcast(torch.zeros(3, dtype=torch.int64), TARGET)

    def receive(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers that the target sends."""
        return self._to_draft.start_broadcast(torch.zeros(count, dtype=dtype), TARGET).wait()

    def _send(self, tensor: Tensor) -> None:
        self._under_way = [exchange for exchange in self._under_way if not _finished(exchange)]
        self._under_way.append(self._to_target.start_broadcast(tensor, DRAFT))

    def _send_rows(self, rows: Sequence[Tensor], count: int) -> None:
        if not self.vocab_size or not count:
            return
        padded = torch.zeros(count, self.vocab_size, dtype=torch.float64)
        for place, row in enumerate(rows):
            padded[place] = row
        self._send(padded)

    # ---- the target's end ----

    def receive_first(self) -> Proposal:
        """The first token of the window that is being drafted.

        Raises:
            HostError: the draft host failed, ended, or did not answer in time.
        """
        for exchange in self._under_way:
            exchange.wait()
        self._under_way = []
        (token,) = self._expect(torch.zeros(1, dtype=torch.int64)).wait().tolist()
        if token == _BROKEN:
            raise HostError("the draft host failed")
        rows = self._expect_rows(1)
        return Proposal([token], None if rows is None else rows.wait())

    def receive_rest(self) -> Proposal:
        """The other tokens of the window."""
        count, *tokens = self._expect(torch.zeros(self.most, dtype=torch.int64)).wait().tolist()
        if count == _BROKEN:
            raise HostError("the draft host failed")
        rows = self._expect_rows(self.most - 1)
        return Proposal(tokens[:count], None if rows is None else rows.wait()[:count])

    def skip(self, first: bool) -> None:
        """The rest of the window (with its ``first`` token: all of it) is of no use: receive it when it comes."""
        if first:
            self._under_way += [self._expect(torch.zeros(1, dtype=torch.int64)), self._expect_rows(1)]
        self._under_way += [
            self._expect(torch.zeros(self.most, dtype=torch.int64)),
            self._expect_rows(self.most - 1),
        ]
        self._under_way = [exchange for exchange in self._under_way if exchange is not None]

    def send_verdict(self, code: int, num_standing: int = 0, token: int = 0) -> None:
        self.send(torch.tensor([code, num_standing, token]))

    def send(self, tensor: Tensor) -> None:
        """Numbers for :meth:`receive`."""
        self._to_draft.start_broadcast(tensor, TARGET).wait()

    def _expect(self, tensor: Tensor) -> Exchange:
        return self._to_target.start_broadcast(tensor, DRAFT)

    def _expect_rows(self, count: int) -> Exchange | None:
        if not self.vocab_size or not count:
            return None
        return self._expect(torch.zeros(count, self.vocab_size, dtype=torch.float64))


def _finished(exchange: Exchange) -> bool:
    if exchange.has_ended():
        exchange.wait()
        return True
    return False
