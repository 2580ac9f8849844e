"""Consumer side of a KV transfer: receives the KV that a ticket names from the producers' memory,
layer by layer.

Consumers are other engines' processes, so it needs only torch and the standard library.
"""

import secrets
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .facts import StorageError, cover_once, rows_of
from .ticket import Ticket
from .wire import (
    Address,
    Severed,
    ask,
    ask_on,
    connect,
    read_message,
    receive_rows,
    sever,
    unreachable,
)


class RemoteKV(AbstractContextManager):
    """A prompt's KV that another process computed and exports.

    A consumer with several processes has one in each of them; these are its readers. Use it as a
    context manager, or call :meth:`close`.

    Args:
        ticket: its ticket.
        timeout: seconds without any progress after which a wait ends in an error.
        num_readers: number of processes that will read and confirm; the KV is kept until all of
            them have.
    """

    def __init__(self, ticket: Ticket, timeout: float = 30.0, num_readers: int = 1):
        self.ticket = ticket
        self.timeout = timeout
        self._reader = {"reader": secrets.token_hex(16), "num_readers": num_readers}
        self._reading = None

    def layers(
        self, tokens: range, kv_heads: range | None = None, layers: range | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over the layers in order, which begins to read when the first is
        requested.

        Each is keys and values ``[H, T, D]`` in CPU memory, valid until the next is requested,
        which is received meanwhile, from all sources in parallel.

        Args:
            tokens: a range of token numbers.
            kv_heads: a range of KV heads; None: all.
            layers: a range of layers; None: all.

        Raises:
            ValueError: tokens, KV heads or layers are out of range.
            StorageError: from the iterator: the KV has ended, cannot be reached, or is damaged.
        """
        ticket = self.ticket
        sizes = {
            "tokens": ticket.num_tokens,
            "kv_heads": ticket.num_kv_heads,
            "layers": ticket.num_layers,
        }
        asked = {"tokens": tokens, "kv_heads": kv_heads, "layers": layers}
        asked = {name: range(sizes[name]) if run is None else run for name, run in asked.items()}
        for name, run in asked.items():
            if run.step != 1 or not 0 <= run.start <= run.stop <= sizes[name]:
                raise ValueError(f"{name} {run} are not within the KV's {sizes[name]}")
        self.close()
        self._reading = self._received(**asked)
        return self._reading

    def _received(
        self, tokens: range, kv_heads: range, layers: range
    ) -> Iterator[tuple[Tensor, Tensor]]:
        addresses = list(dict.fromkeys(self.ticket.sources))
        shape = 2, len(kv_heads), len(tokens), self.ticket.head_dim
        # One layer is being used, the other received.
        buffers = [torch.empty(shape, dtype=self.ticket.torch_dtype) for _ in layers[:2]]
        with ExitStack() as stack:
            pool = stack.enter_context(
                ThreadPoolExecutor(len(addresses), thread_name_prefix="kv-receiver")
            )
            begun = [
                pool.submit(Source, self, stack, each, tokens, kv_heads, layers)
                for each in addresses
            ]
            sources = _all_of(begun)
            if not cover_once(
                ((source.runs, source.kv_heads) for source in sources), kv_heads, tokens
            ):
                raise StorageError(
                    f"the sources of {self.name} do not cover every token exactly once"
                )

            def begin(number: int) -> list[Future]:
                buffer = buffers[number % len(buffers)]
                return [pool.submit(source.receive, layers[number], buffer) for source in sources]

            coming = begin(0) if layers else []
            for number in range(len(layers)):
                _all_of(coming)
                coming = begin(number + 1) if number + 1 < len(layers) else []
                yield tuple(buffers[number % len(buffers)])

    def confirm(self) -> None:
        """Confirm that this reader has all it wanted. The KV ends once all readers have confirmed.

        Raises:
            StorageError: the producers cannot be reached, or the KV had already ended. Received
                data is still valid.
        """
        ask(self.ticket.sources[0], self.request("done"), self.timeout)

    def request(self, what: str, **more: Any) -> dict[str, Any]:
        """Build a request (see :mod:`.wire`)."""
        return {
            "do": what,
            "transfer": self.ticket.transfer,
            "token": self.ticket.token,
            **self._reader,
            **more,
        }

    @property
    def name(self) -> str:
        """The KV's name in errors."""
        return f"the KV of transfer {self.ticket.transfer}"

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
    ask(ticket.sources[0], RemoteKV(ticket).request("drop"), timeout)


class Source:
    """Connection to a process that holds KV and sends part of it.

    Args:
        remote: the KV.
        stack: closes the connection, also for a thread that waits for it.
        tokens, kv_heads, layers: the part that is wanted.

    Attributes:
        runs, kv_heads: which of the wanted tokens and KV heads it has.

    Raises:
        StorageError: it cannot be reached, or rejects the request.
    """

    def __init__(
        self,
        remote: RemoteKV,
        stack: ExitStack,
        address: Address,
        tokens: range,
        kv_heads: range,
        layers: range,
    ):
        self._remote = remote
        self._address = address
        self._tokens = tokens
        self._first_head = kv_heads.start
        wanted = {"tokens": tokens, "kv_heads": kv_heads, "layers": layers}
        ends = {name: [run.start, run.stop] for name, run in wanted.items()}
        with self._described("at once"):
            self._connection = stack.enter_context(connect(address, remote.timeout))
            stack.callback(sever, self._connection)
            reply = ask_on(self._connection, remote.request("fetch", **ends), remote.timeout)
        with suppress(KeyError, TypeError, ValueError):
            self.runs = tuple((start, stop) for start, stop in reply["tokens"])
            self.kv_heads = first, last = (
                tuple(reply["kv_heads"]) if self.runs else (kv_heads.start,) * 2
            )
            edges = [tokens.start, *(edge for run in self.runs for edge in run), tokens.stop]
            if edges == sorted(edges) and kv_heads.start <= first <= last <= kv_heads.stop:
                return
        raise StorageError("KV source sent invalid ranges")

    def receive(self, index: int, buffer: Tensor) -> None:
        """Receive the next layer, number ``index``, into keys and values ``[2, H, T, D]``.

        Raises:
            StorageError: it is not available, or was damaged in transfer.
        """
        name = self._remote.name
        timeout = self._remote.timeout
        heads = slice(*(head - self._first_head for head in self.kv_heads))
        places = [place for _, place in rows_of(self.runs, [self._tokens])]
        with self._described(f"in layer {index} of {self._remote.ticket.num_layers}"):
            if read_message(self._connection, timeout).get("layer") != index:
                raise StorageError(f"layer {index} of {name} arrived out of order")
            # The order of sending: keys, values; of each head by head; and of a head run by run.
            rows = (
                head[None, place] for states in buffer for head in states[heads] for place in places
            )
            checksum = receive_rows(self._connection, rows)
            if read_message(self._connection, timeout).get("crc32") != checksum:
                raise StorageError(
                    f"layer {index} of {name} was damaged in transfer: wrong checksum"
                )

    @contextmanager
    def _described(self, place: str) -> Iterator[None]:
        """Turn a connection's errors into a StorageError."""
        host, port = self._address
        try:
            yield
        except Severed as error:
            gone = f"{self._remote.name} is gone, or its process is"
            raise StorageError(f"{host}:{port} closed the connection {place}: {gone}") from error
        except OSError as error:
            raise unreachable(self._address, error) from error


def _all_of(futures: list[Future]) -> list[Any]:
    """Wait until all futures are done, and return their results in any order, or raise the first
    error."""
    return [future.result() for future in wait(futures, return_when=FIRST_EXCEPTION).done]
