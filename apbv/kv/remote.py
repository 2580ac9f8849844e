"""Consumer side of a KV transfer: receives a ticket's KV from the producers, layer by layer.

Consumers are other engines' processes, so it needs only torch and the standard library.
"""

import secrets
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidRequestError, StorageError
from .facts import Run, cover_once, rows_of
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
        ticket: names the KV.
        timeout: seconds without any progress after which a wait ends in an error.
        num_readers: number of processes that will read and confirm; the KV is kept until all of
            them have.
    """

    def __init__(self, ticket: Ticket, timeout: float = 30.0, num_readers: int = 1):
        self.ticket = ticket
        self.timeout = timeout
        self._reader = secrets.token_hex(16)
        self._num_readers = num_readers
        self._layers: Generator[tuple[Tensor, Tensor], None, None] | None = None  # being received

    def layers(
        self, tokens: range, kv_heads: range | None = None, layers: range | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over the layers, in order.

        It begins to read when the first layer is requested. A layer is keys and values ``[H, T,
        D]`` in CPU memory, valid until the next is requested, which is received meanwhile, from all
        sources in parallel.

        Args:
            tokens: a range of token numbers.
            kv_heads: a range of KV heads; None: all.
            layers: a range of layers; None: all.

        Raises:
            InvalidRequestError: tokens, KV heads or layers are out of range.
            StorageError: from the iterator: the KV has ended, cannot be reached, or is damaged.
        """
        ticket = self.ticket
        if kv_heads is None:
            kv_heads = range(ticket.num_kv_heads)
        if layers is None:
            layers = range(ticket.num_layers)
        _require_within("tokens", tokens, ticket.num_tokens)
        _require_within("kv_heads", kv_heads, ticket.num_kv_heads)
        _require_within("layers", layers, ticket.num_layers)
        self.close()
        self._layers = self._received(tokens, kv_heads, layers)
        return self._layers

    def _received(
        self, tokens: range, kv_heads: range, layers: range
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Connect to all sources, and yield each layer while the next one is received."""
        addresses = list(dict.fromkeys(self.ticket.sources))
        shape = (2, len(kv_heads), len(tokens), self.ticket.head_dim)
        # One layer is being used, the other received.
        buffers = [torch.empty(shape, dtype=self.ticket.torch_dtype) for _ in layers[:2]]
        with ExitStack() as stack:
            pool = ThreadPoolExecutor(len(addresses), thread_name_prefix="kv-receiver")
            stack.enter_context(pool)

            # Connect.
            connecting = []
            for address in addresses:
                connecting.append(
                    pool.submit(Source, self, stack, address, tokens, kv_heads, layers)
                )
            sources = _results(connecting)
            shards = [(source.runs, source.kv_heads) for source in sources]
            if not cover_once(shards, kv_heads, tokens):
                raise StorageError(
                    f"the sources of {self.name} do not cover every token exactly once"
                )

            # Receive.
            def receive(number: int) -> list[Future]:
                buffer = buffers[number % len(buffers)]
                return [pool.submit(source.receive, layers[number], buffer) for source in sources]

            receiving = receive(0) if layers else []
            for number in range(len(layers)):
                _results(receiving)
                is_last = number + 1 == len(layers)
                receiving = [] if is_last else receive(number + 1)
                keys, values = buffers[number % len(buffers)]
                yield keys, values

    def confirm(self) -> None:
        """Confirm that this reader has everything; the KV ends once all readers have confirmed.

        Raises:
            StorageError: the producers cannot be reached, or the KV had already ended. Received
                data is still valid.
        """
        ask(self.ticket.sources[0], self.request("done"), self.timeout)

    def request(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Build a request of the transfer protocol (:mod:`.wire`).

        Args:
            fields: the operation's own fields.
        """
        return {
            "do": operation,
            "transfer": self.ticket.transfer,
            "token": self.ticket.token,
            "reader": self._reader,
            "num_readers": self._num_readers,
            **fields,
        }

    @property
    def name(self) -> str:
        """The KV's name in errors."""
        return f"the KV of transfer {self.ticket.transfer}"

    def close(self) -> None:
        """Stop receiving."""
        if self._layers is not None:
            self._layers.close()
            self._layers = None

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
        stack: closes the connection; a thread that waits for data then gets an error.
        address: where the process listens.
        tokens, kv_heads, layers: the requested part.

    Attributes:
        runs, kv_heads: the requested tokens and KV heads that it has.

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
        request = remote.request(
            "fetch",
            tokens=[tokens.start, tokens.stop],
            kv_heads=[kv_heads.start, kv_heads.stop],
            layers=[layers.start, layers.stop],
        )
        with self._described("at once"):  # where an error says that the connection was closed
            self._connection = stack.enter_context(connect(address, remote.timeout))
            stack.callback(sever, self._connection)
            reply = ask_on(self._connection, request, remote.timeout)
        self.runs, self.kv_heads = _ranges_in(reply, tokens, kv_heads)

    def receive(self, index: int, buffer: Tensor) -> None:
        """Receive the next layer, number ``index``, into keys and values ``[2, H, T, D]``.

        Raises:
            StorageError: it is not available, or was damaged in transfer.
        """
        name = self._remote.name
        timeout = self._remote.timeout
        with self._described(f"in layer {index} of {self._remote.ticket.num_layers}"):
            if read_message(self._connection, timeout).get("layer") != index:
                raise StorageError(f"layer {index} of {name} arrived out of order")
            checksum = receive_rows(self._connection, self._rows_in(buffer))
            if read_message(self._connection, timeout).get("crc32") != checksum:
                raise StorageError(
                    f"layer {index} of {name} was damaged in transfer: wrong checksum"
                )

    def _rows_in(self, buffer: Tensor) -> Iterator[Tensor]:
        """Yield this source's rows of keys and values ``[2, H, T, D]``, in the order of sending."""
        first, last = self.kv_heads
        heads = slice(first - self._first_head, last - self._first_head)
        places = [place for _, place in rows_of(self.runs, [self._tokens])]
        for states in buffer:  # keys, values
            for head in states[heads]:
                for place in places:
                    yield head[None, place]

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


def _ranges_in(
    reply: dict[str, Any], tokens: range, kv_heads: range
) -> tuple[tuple[Run, ...], Run]:
    """Read which of the requested tokens and KV heads a source has from its reply.

    Args:
        tokens, kv_heads: the requested ones.

    Returns:
        Ascending runs of tokens, and a range of KV heads, which is empty if there are no tokens.

    Raises:
        StorageError: they are malformed, or exceed the requested ones.
    """
    try:
        runs = tuple((start, stop) for start, stop in reply["tokens"])
        first = kv_heads.start
        last = kv_heads.start
        if runs:
            first, last = reply["kv_heads"]
        # Runs that ascend within the requested tokens have ascending ends.
        edges = [tokens.start]
        for run in runs:
            edges += run
        edges.append(tokens.stop)
        are_valid = edges == sorted(edges) and kv_heads.start <= first <= last <= kv_heads.stop
    except (KeyError, TypeError, ValueError):
        are_valid = False
    if not are_valid:
        raise StorageError("KV source sent invalid ranges")
    return runs, (first, last)


def _require_within(name: str, run: range, size: int) -> None:
    """Raise InvalidRequestError unless a range lies within the KV."""
    if run.step != 1 or not 0 <= run.start <= run.stop <= size:
        raise InvalidRequestError(f"{name} {run} are not within the KV's {size}")


def _results(futures: list[Future]) -> list[Any]:
    """Wait for all futures; return their results in any order, or raise the first error."""
    done = wait(futures, return_when=FIRST_EXCEPTION).done
    return [future.result() for future in done]
