"""Receives KV from the processes that hold it, layer by layer."""

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .facts import StorageError, cover_once, rows_of
from .ticket import Ticket
from .wire import Address, Severed, ask_on, connect, read_message, receive_rows, sever, unreachable

_BUFFERS = 2  # layers in memory at once: one being used, the other being received


@dataclass(frozen=True)
class Wanted:
    """The part of a prompt's KV that a consumer wants.

    Attributes:
        tokens, kv_heads, layers: token numbers, KV heads of the whole model, and layers.
        ticket: the ticket of the KV.
        reader: the reader's name in requests.
        timeout: seconds without any progress after which a wait ends.
    """

    tokens: range
    kv_heads: range
    layers: range
    ticket: Ticket
    reader: dict[str, Any]
    timeout: float

    @property
    def name(self) -> str:
        """The KV's name in errors."""
        return f"the KV of transfer {self.ticket.transfer}"


class Source:
    """Connection to a process that holds KV and sends part of it.

    Attributes:
        runs, kv_heads: which of the wanted tokens and KV heads it has.

    Raises:
        StorageError: it cannot be reached, or rejects the request.
    """

    def __init__(self, address: Address, wanted: Wanted):
        self._wanted, self._address, self._connection = wanted, address, None
        with self._described("at once"):
            self._connection = connect(address, wanted.timeout)
            ends = {name: [run.start, run.stop] for name, run in vars(wanted).items() if isinstance(run, range)}
            known = {"do": "fetch", "transfer": wanted.ticket.transfer, "token": wanted.ticket.token}
            self._read_ranges(ask_on(self._connection, {**known, **ends, **wanted.reader}, wanted.timeout))

    def _read_ranges(self, reply: dict[str, Any]) -> None:
        """Read which of the wanted tokens and KV heads the source has."""
        tokens, kv_heads = self._wanted.tokens, self._wanted.kv_heads
        with suppress(KeyError, TypeError, ValueError):
            self.runs = tuple((start, stop) for start, stop in reply["tokens"])
            self.kv_heads = first, last = tuple(reply["kv_heads"]) if self.runs else (kv_heads.start,) * 2
            edges = [tokens.start, *(edge for run in self.runs for edge in run), tokens.stop]
            if edges == sorted(edges) and kv_heads.start <= first <= last <= kv_heads.stop:
                return
        raise StorageError("KV source sent invalid ranges")

    def receive(self, index: int, buffer: Tensor) -> None:
        """Receive the next layer, number ``index``, into keys and values ``[2, H, T, D]``.

        Raises:
            StorageError: it is not available, or was damaged in transfer.
        """
        wanted = self._wanted
        heads = slice(*(head - wanted.kv_heads.start for head in self.kv_heads))
        places = [place for _, place in rows_of(self.runs, [wanted.tokens])]
        with self._described(f"in layer {index} of {wanted.ticket.num_layers}"):
            if read_message(self._connection, wanted.timeout).get("layer") != index:
                raise StorageError(f"layer {index} of {wanted.name} arrived out of order")
            # The order of sending: keys, values; of each head by head; and of a head run by run.
            rows = (head[None, place] for states in buffer for head in states[heads] for place in places)
            checksum = receive_rows(self._connection, rows)
            if read_message(self._connection, wanted.timeout).get("crc32") != checksum:
                raise StorageError(f"layer {index} of {wanted.name} was damaged in transfer: wrong checksum")

    def close(self) -> None:
        """Close the connection, also for a thread that waits for it."""
        sever(self._connection)
        self._connection.close()

    @contextmanager
    def _described(self, place: str) -> Iterator[None]:
        """Turn a connection's errors into a StorageError."""
        try:
            yield
        except BaseException as error:
            if place == "at once" and self._connection is not None:
                self._connection.close()
            host, port = self._address
            if isinstance(error, Severed):
                gone = f"{self._wanted.name} is gone, or its process is"
                raise StorageError(f"{host}:{port} closed the connection {place}: {gone}") from error
            if isinstance(error, OSError):
                raise unreachable(self._address, error) from error
            raise


def received(wanted: Wanted) -> Iterator[tuple[Tensor, Tensor]]:
    """Receive layers from all sources in parallel, each layer while the previous one is in use.

    Every layer is keys and values ``[H, T, D]`` in CPU memory, valid until the next is asked for.

    Raises:
        StorageError: a source cannot be reached, rejects, has ended, or what it sent was damaged on the way.
    """
    addresses, layers = list(dict.fromkeys(wanted.ticket.sources)), list(wanted.layers)
    shape = 2, len(wanted.kv_heads), len(wanted.tokens), wanted.ticket.head_dim
    dtype = wanted.ticket.torch_dtype
    buffers = [torch.empty(shape, dtype=dtype) for _ in range(min(_BUFFERS, len(layers)))]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(addresses), thread_name_prefix="kv-receiver"))
        sources = []

        def opened(address: Address) -> None:
            source = Source(address, wanted)
            stack.callback(source.close)
            sources.append(source)

        def begin(number: int) -> list:
            buffer = buffers[number % len(buffers)]
            return [pool.submit(source.receive, layers[number], buffer) for source in sources]

        _all_of([pool.submit(opened, address) for address in addresses])
        held = ((source.runs, source.kv_heads) for source in sources)
        if not cover_once(held, wanted.kv_heads, wanted.tokens):
            raise StorageError(f"the sources of {wanted.name} do not cover every token exactly once")
        coming = begin(0) if layers else []
        for number in range(len(layers)):
            _all_of(coming)
            coming = begin(number + 1) if number + 1 < len(layers) else []
            yield tuple(buffers[number % len(buffers)])


def _all_of(futures: list) -> None:
    """Wait until all futures are done, or raise the first error."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
