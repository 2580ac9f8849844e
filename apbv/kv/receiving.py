"""This module receives KV from all processes that hold it, each layer while the one before is being used."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .assembly import Run, cover_once, rows_of
from .manifest import StorageError
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
    """What a consumer wants of a prompt's KV: token numbers, KV heads of the whole model, and layers."""

    tokens: range
    kv_heads: range
    layers: range


class Reception:
    """A Reception is KV on its way: an iterator over the layers, filled by one thread for each source.

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
        self._request = fetch_request(ticket, wanted, reader)
        shape = 2, len(wanted.kv_heads), len(wanted.tokens), ticket.head_dim
        count = min(_BUFFERS, len(wanted.layers))
        self._buffers = [torch.empty(shape, dtype=ticket.torch_dtype) for _ in range(count)]
        self._changed = threading.Condition()
        self._held: dict[Address, tuple[tuple[Run, ...], Run]] = {}  # what each source said it has
        self._received = dict.fromkeys(ticket.sources, 0)  # layers
        self._num_given, self._error, self._is_closed = 0, None, False
        self._connections: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=self._receive, args=(source,), name="kv-receiver", daemon=True)
            for source in self._received
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next layer, and give the buffers of the one before back.

        Raises:
            StorageError: a source cannot be reached, refuses, has ended, or what it sent was damaged on the way.
        """
        number = self._num_given
        error = StopIteration() if number == len(self._wanted.layers) else self._wait_for(number)
        if error is None and number == 0:
            error = self._incomplete()
        if error is not None:
            self.close()
            raise error
        keys, values = self._buffers[number % len(self._buffers)]
        return keys, values

    def close(self) -> None:
        """End the connections and wait for the threads; nothing that was received may be used any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._connections:
                sever(connection)
        for thread in self._threads:
            thread.join(_ENDING_SECONDS)

    def _wait_for(self, number: int) -> StorageError | None:
        """Wait until a layer is here, and return why it will never be."""
        with self._changed:
            self._num_given += 1
            self._changed.notify_all()
            while self._error is None and min(self._received.values()) <= number:
                if self._is_closed:
                    return StorageError(f"{self._name} is not being read any more")
                if not self._changed.wait(2 * self._timeout):  # the threads know better what is missing
                    return StorageError(f"no layer of {self._name} came for {2 * self._timeout:g} s")
            return self._error

    @property
    def _name(self) -> str:
        return f"the KV of transfer {self._ticket.transfer}"

    def _incomplete(self) -> StorageError | None:
        """Return an error where the sources together do not hold every token that is wanted exactly once."""
        if cover_once(self._held.values(), self._wanted.kv_heads, self._wanted.tokens):
            return None
        return StorageError(f"the sources of {self._name} do not hold every token exactly once")

    def _receive(self, source: Address) -> None:
        """Fetch what one source holds; runs in a thread of its own."""
        try:
            with connect(source, self._timeout) as connection:
                with self._changed:
                    if self._is_closed:
                        return
                    self._connections.append(connection)
                self._receive_from(connection, source)
        except StorageError as error:
            self._fail(error)
        except Severed:
            host, port = source
            layer = self._wanted.layers.start + self._received[source]
            place = f"in layer {layer} of {self._ticket.num_layers}" if source in self._held else "at once"
            self._fail(StorageError(f"{host}:{port} broke off {place}: {self._name} is gone, or its process is"))
        except OSError as error:
            self._fail(unreachable(source, error))
        except Exception as error:
            self._fail(StorageError(f"{self._name} cannot be received: {error!r}"))

    def _receive_from(self, connection: socket.socket, source: Address) -> None:
        send_message(connection, self._request)
        reply = self._message(connection)
        runs, kv_heads = held_part(reply, self._wanted)
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
            buffer = self._buffers[number % len(self._buffers)]
            # The order of sending: keys, values; of each head by head; and of a head run by run.
            rows = (head[None, place] for states in buffer for head in states[heads] for place in places)
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

    def _fail(self, error: StorageError) -> None:
        with self._changed:
            if self._error is None and not self._is_closed:
                self._error = error
            self._changed.notify_all()


def fetch_request(ticket: Ticket, wanted: Wanted, reader: dict[str, Any]) -> dict[str, Any]:
    """Return the request for some of a ticket's KV."""
    ranges = {"tokens": wanted.tokens, "kv_heads": wanted.kv_heads, "layers": wanted.layers}
    ends = {name: [run.start, run.stop] for name, run in ranges.items()}
    return {"do": "fetch", "transfer": ticket.transfer, "token": ticket.token, **ends, **reader}


def held_part(reply: dict[str, Any], wanted: Wanted) -> tuple[tuple[Run, ...], Run]:
    """Read which of the wanted tokens and KV heads a source has.

    Raises:
        StorageError: it has others, or does not say it as it must.
    """
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
