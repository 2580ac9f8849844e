"""Receiving KV from all processes that hold it, each layer while the one before is being used."""

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .facts import Run, StorageError, cover_once, rows_of
from .ticket import Ticket
from .wire import (
    Address,
    Severed,
    connect,
    raise_error_of,
    read_message,
    receive_rows,
    send_message,
    sever,
    unreachable,
)

_BUFFERS = 3  # layers in memory at once: one being used, the others being received
_ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class Wanted:
    """The part of a prompt's KV that a consumer wants: token numbers, KV heads of the whole model, and layers."""

    tokens: range
    kv_heads: range
    layers: range


class Reception(ABC):
    """KV on its way: an iterator over the layers.

    Every layer is keys and values ``[H, T, D]`` in host memory, in buffers that are reused: they are valid until
    the next layer is asked for.

    Args:
        ticket: where the KV is.
        wanted: which part of it.
        reader: who reads, as the requests name him.
        timeout: seconds without any progress after which a wait ends.
    """

    def __init__(self, ticket: Ticket, wanted: Wanted, reader: dict[str, Any], timeout: float):
        self._ticket, self._wanted, self._timeout = ticket, wanted, timeout
        self._name = f"the KV of transfer {ticket.transfer}"
        ends = {name: [run.start, run.stop] for name, run in vars(wanted).items()}
        self._request = {"do": "fetch", "transfer": ticket.transfer, "token": ticket.token, **ends, **reader}
        shape = 2, len(wanted.kv_heads), len(wanted.tokens), ticket.head_dim
        count = min(_BUFFERS, len(wanted.layers))
        self._buffers = [torch.empty(shape, dtype=ticket.torch_dtype) for _ in range(count)]
        self._num_given, self._is_closed = 0, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next layer, and give the buffers of the one before back.

        Raises:
            StorageError: a source cannot be reached, refuses, has ended, or what it sent was damaged on the way.
        """
        number = self._num_given
        try:
            if number == len(self._wanted.layers):
                raise StopIteration
            if self._is_closed:
                raise StorageError(f"{self._name} is not being read any more")
            self._await_layer(number)
        except BaseException:
            self.close()
            raise
        keys, values = self._buffer(number)
        return keys, values

    @abstractmethod
    def _await_layer(self, number: int) -> None:
        """Wait until a layer is in its buffer; count it as given, which frees the one before.

        Raises:
            StorageError: it will never be there.
        """

    @abstractmethod
    def close(self) -> None:
        """End the reading; nothing that was read may be used any more."""

    def _buffer(self, number: int) -> Tensor:
        return self._buffers[number % len(self._buffers)]

    def _require_complete(self, held: Iterator[tuple[tuple[Run, ...], Run]]) -> None:
        """Raise StorageError unless the sources together hold every token that is wanted exactly once."""
        if not cover_once(held, self._wanted.kv_heads, self._wanted.tokens):
            raise StorageError(f"the sources of {self._name} do not hold every token exactly once")

    def _held_part(self, reply: dict[str, Any]) -> tuple[tuple[Run, ...], Run]:
        """Read which of the wanted tokens and KV heads a source has.

        Raises:
            StorageError: it has others, or does not say it as it must.
        """
        wanted = self._wanted
        try:
            runs = tuple((start, stop) for start, stop in reply["tokens"])
            first, last = reply["kv_heads"]
            edges = [wanted.tokens.start, *(edge for run in runs for edge in run), wanted.tokens.stop]
            if not runs:
                return (), (wanted.kv_heads.start,) * 2
            if edges == sorted(edges) and wanted.kv_heads.start <= first <= last <= wanted.kv_heads.stop:
                return runs, (first, last)
        except (KeyError, TypeError, ValueError):
            pass
        raise StorageError("a source of KV does not say which of it it has")

    def _broke_off(self, source: Address, place: str = "") -> StorageError:
        return StorageError(f"{source[0]}:{source[1]} broke off{place}: {self._name} is gone, or its process is")


class SocketReception(Reception):
    """Receives layers by TCP, with one thread for each source; arguments as of :class:`Reception`."""

    def __init__(self, ticket: Ticket, wanted: Wanted, reader: dict[str, Any], timeout: float):
        super().__init__(ticket, wanted, reader, timeout)
        self._changed = threading.Condition()
        self._held: dict[Address, tuple[tuple[Run, ...], Run]] = {}  # what each source said it has
        self._received = dict.fromkeys(ticket.sources, 0)  # layers
        self._error: StorageError | None = None
        self._connections: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=self._receive, args=(source,), name="kv-receiver", daemon=True)
            for source in self._received
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._connections:
                sever(connection)
        for thread in self._threads:
            thread.join(_ENDING_SECONDS)

    def _await_layer(self, number: int) -> None:
        with self._changed:
            self._num_given += 1
            self._changed.notify_all()
            while self._error is None and min(self._received.values()) <= number:
                if self._is_closed:
                    raise StorageError(f"{self._name} is not being read any more")
                if not self._changed.wait(2 * self._timeout):  # the threads know better what is missing
                    raise StorageError(f"no layer of {self._name} came for {2 * self._timeout:g} s")
            error = self._error
        if number == 0 and len(self._held) == len(self._received):  # else a source has failed
            self._require_complete(self._held.values())
        if error is not None:  # also one that comes of two sources that have sent the same rows
            raise error

    def _receive(self, source: Address) -> None:
        """Fetch what one source holds; runs in a thread of its own."""
        error = None
        try:
            with connect(source, self._timeout) as connection:
                with self._changed:
                    if self._is_closed:
                        return
                    self._connections.append(connection)
                self._receive_from(connection, source)
        except StorageError as refusal:
            error = refusal
        except Severed:
            layer = self._wanted.layers.start + self._received[source]
            place = f"in layer {layer} of {self._ticket.num_layers}" if source in self._held else "at once"
            error = self._broke_off(source, f" {place}")
        except OSError as failure:
            error = unreachable(source, failure)
        except Exception as failure:
            error = StorageError(f"{self._name} cannot be received: {failure!r}")
        with self._changed:
            if self._error is None and not self._is_closed:
                self._error = error
            self._changed.notify_all()

    def _receive_from(self, connection: socket.socket, source: Address) -> None:
        send_message(connection, self._request)
        runs, kv_heads = self._held_part(self._message(connection))
        with self._changed:
            self._held[source] = runs, kv_heads
        first = self._wanted.kv_heads.start
        heads = slice(kv_heads[0] - first, kv_heads[1] - first)
        places = [place for _, place in rows_of(runs, [self._wanted.tokens])]
        for number, index in enumerate(self._wanted.layers):
            if not self._may_receive(number):
                return
            if self._message(connection).get("layer") != index:
                raise StorageError(f"layer {index} of {self._name} did not come in its turn")
            # The order of sending: keys, values; of each head by head; and of a head run by run.
            states = (head for states in self._buffer(number) for head in states[heads])
            rows = (head[None, place] for head in states for place in places)
            checksum = receive_rows(connection, rows)
            if self._message(connection).get("crc32") != checksum:
                raise StorageError(f"layer {index} of {self._name} was damaged on its way: its checksum is wrong")
            with self._changed:
                self._received[source] += 1
                self._changed.notify_all()

    def _message(self, connection: socket.socket) -> dict[str, Any]:
        message = read_message(connection, self._timeout)
        raise_error_of(message)
        return message

    def _may_receive(self, number: int) -> bool:
        """Wait until the buffer for a layer is free; return False where nothing is wanted any more.

        The layer that was given last is still being used.
        """
        with self._changed:
            while not self._is_closed and number >= len(self._buffers) + max(0, self._num_given - 1):
                if not self._changed.wait(self._timeout):
                    raise StorageError(f"nobody has taken a layer of {self._name} for {self._timeout:g} s")
            return not self._is_closed
