"""Consumer side of a KV transfer: reads the KV that a ticket names from the producers' memory.

Consumers are other engines' processes, so it needs only torch and the standard library.
"""

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from .receiving import Wanted, received
from .ticket import Ticket
from .wire import ask


class RemoteKV(AbstractContextManager):
    """A prompt's KV that another process computed and exports.

    A consumer with several processes has one in each of them; these are its readers. Use it as a context manager,
    or call :meth:`close`.

    Args:
        ticket: its ticket.
        timeout: seconds without any progress after which a wait ends in an error.
        num_readers: number of processes that will read and confirm; the KV is kept until all of them have.
    """

    def __init__(self, ticket: Ticket, timeout: float = 30.0, num_readers: int = 1):
        self.ticket, self._timeout = ticket, timeout
        self._reader = {"reader": secrets.token_hex(16), "num_readers": num_readers}
        self._reading = None

    def layers(
        self, tokens: range, kv_heads: range | None = None, layers: range | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over the layers in order, which begins to read when the first is requested.

        Each is keys and values ``[H, T, D]`` in CPU memory, valid until the next is requested, which is received
        meanwhile.

        Args:
            tokens: a range of token numbers.
            kv_heads: a range of KV heads; None: all.
            layers: a range of layers; None: all.

        Raises:
            ValueError: tokens, KV heads or layers are out of range.
            StorageError: from the iterator: the KV has ended, cannot be reached, or is damaged.
        """
        ticket = self.ticket
        sizes = {"tokens": ticket.num_tokens, "kv_heads": ticket.num_kv_heads, "layers": ticket.num_layers}
        asked = {"tokens": tokens, "kv_heads": kv_heads, "layers": layers}
        asked = {name: range(sizes[name]) if run is None else run for name, run in asked.items()}
        for name, run in asked.items():
            if run.step != 1 or not 0 <= run.start <= run.stop <= sizes[name]:
                raise ValueError(f"{name} {run} are not within the KV's {sizes[name]}")
        self.close()
        self._reading = received(Wanted(**asked, ticket=ticket, reader=self._reader, timeout=self._timeout))
        return self._reading

    def confirm(self) -> None:
        """Confirm that this reader has all it wanted. The KV ends once all readers have confirmed.

        Raises:
            StorageError: the producers cannot be reached, or the KV had already ended. Received data is still
                valid.
        """
        _tell(self.ticket, "done", self._timeout, self._reader)

    def close(self) -> None:
        """Stop receiving."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def __exit__(self, *error) -> None:
        self.close()


def drop(ticket: Ticket, timeout: float = 5.0) -> None:
    """Notify the producers that this KV will not be fetched, so that its memory is freed at once.

    Raises:
        StorageError: no producer answered within ``timeout`` seconds, or the KV had already ended.
    """
    _tell(ticket, "drop", timeout, {})


def _tell(ticket: Ticket, what: str, timeout: float, more: dict[str, Any]) -> None:
    request = {"do": what, "transfer": ticket.transfer, "token": ticket.token, **more}
    ask(ticket.sources[0], request, timeout)
