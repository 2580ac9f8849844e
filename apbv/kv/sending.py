"""Sends KV from the memory of the process that holds it, and listens for requests."""

import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device.copies import side_stream
from ..errors import StorageError
from ..layout import intersect
from .facts import Run, rows_of
from .wire import Address, sever

# As socketserver declares it: of a stream it is the connection.
Request = socket.socket | tuple[bytes, socket.socket]

Layers = Sequence[tuple[Tensor, Tensor]]

_logger = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections that have not presented a secret yet
_ENDING_SECONDS = 5.0
_POLL_SECONDS = 0.05  # after which a listener that ends notices


@dataclass(frozen=True)
class Part:
    """The part of a share that a consumer has requested.

    Attributes:
        runs: its token numbers.
        kv_heads: its KV heads.
        layers: each layer's keys and values ``[H, T, D]`` in CPU memory, with contiguous rows: the
            share's own memory if possible, valid until the next are requested.
    """

    runs: list[Run]
    kv_heads: Run
    layers: Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Copy:
    """A layer on its way from the GPU to CPU memory."""

    keys: Tensor
    values: Tensor
    event: torch.cuda.Event

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values once they have arrived."""
        self.event.synchronize()
        return self.keys, self.values


class Share:
    """One process's share of a prompt's KV, on a GPU or in CPU memory.

    It must not be modified while it is exported. On a GPU it is read after the work queued so far
    in the current stream.

    Args:
        tokens: ascending runs of token numbers.
        kv_heads: the range of KV heads.
        layers: keys and values ``[1, H_kv, T, D]`` of every layer, rows in the order of ``tokens``.
    """

    def __init__(self, tokens: Sequence[range], kv_heads: range, layers: Layers):
        self.runs = tuple((run.start, run.stop) for run in tokens if len(run))
        self.kv_heads = kv_heads
        self._layers = [(keys[0], values[0]) for keys, values in layers]
        self._device = layers[0][0].device
        self._computed: torch.cuda.Event | None = None  # on a GPU
        if self._device.type == "cuda":
            self._computed = torch.cuda.current_stream(self._device).record_event()

    def part(self, tokens: range, kv_heads: range, layers: range) -> Part:
        """Return the requested part of this share, which may be empty.

        Raises:
            StorageError: layers are out of range.
        """
        if layers.stop > len(self._layers):
            raise StorageError(f"the KV has {len(self._layers)} layers, not {layers.stop}")
        common_heads = intersect(self.kv_heads, kv_heads)
        pieces = list(rows_of(self.runs, [tokens])) if common_heads else []
        runs = [(tokens.start + place.start, tokens.start + place.stop) for _, place in pieces]
        rows = slice(0, 0)
        if pieces:
            # The runs ascend, so a range of tokens maps to contiguous rows.
            first_rows, _ = pieces[0]
            last_rows, _ = pieces[-1]
            rows = slice(first_rows.start, last_rows.stop)
        first_head = self.kv_heads.start
        heads = slice(common_heads.start - first_head, common_heads.stop - first_head)
        states = []
        for keys, values in self._layers[layers.start : layers.stop]:
            states.append((keys[heads, rows], values[heads, rows]))
        computed = self._computed
        in_host_memory = _contiguous(states) if computed is None else self._copied(states, computed)
        return Part(runs, (common_heads.start, common_heads.stop), in_host_memory)

    def _copied(
        self, layers: Layers, computed: torch.cuda.Event
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy layers from the GPU, beside other GPU work, each while the previous one is sent."""
        stream = side_stream(self._device, "sending")
        stream.wait_event(computed)
        # Two pairs, for layers with even and with odd numbers.
        buffers: list[tuple[Tensor, Tensor]] = []

        def start(number: int) -> _Copy:
            keys, values = layers[number]
            if number < 2:
                buffers.append((_pinned_like(keys), _pinned_like(values)))
            key_buffer, value_buffer = buffers[number % 2]
            with torch.cuda.stream(stream):
                key_buffer.copy_(keys, non_blocking=True)
                value_buffer.copy_(values, non_blocking=True)
                return _Copy(key_buffer, value_buffer, stream.record_event())

        newest = None
        try:
            for number in range(len(layers)):
                previous = newest
                newest = start(number)
                if previous is not None:
                    yield previous.wait()
            if newest is not None:
                yield newest.wait()
        finally:  # neither the KV nor the buffers may be freed during a copy
            if newest is not None:
                newest.wait()


def _pinned_like(states: Tensor) -> Tensor:
    """Return an uninitialised tensor in page-locked memory."""
    return torch.empty(states.shape, dtype=states.dtype, pin_memory=True)


def _contiguous(layers: Layers) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values ``[H, T, D]`` with contiguous rows."""
    for keys, values in layers:
        yield _with_contiguous_rows(keys), _with_contiguous_rows(values)


def _with_contiguous_rows(states: Tensor) -> Tensor:
    """Return states ``[H, T, D]`` whose rows are contiguous, copied only if theirs are not."""
    _, row_stride, element_stride = states.stride()
    is_contiguous = row_stride == states.shape[2] and element_stride == 1
    return states if is_contiguous else states.contiguous()


class Listener(socketserver.ThreadingTCPServer):
    """Accepts connections, and serves each in its own thread.

    Connections are untrusted until they present a secret. If there are too many, each new one
    closes the oldest.

    Args:
        address: where to listen; port 0 takes any that is free.
        serve: called with each connection, which is closed when it returns, and with a function
            that marks it as trusted.
        idle_seconds: maximum idle time of a connection.

    Raises:
        OSError: it cannot listen there.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: Address,
        serve: Callable[[socket.socket, Callable[[], None]], None],
        idle_seconds: float,
    ):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._serve = serve
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread | None] = {}
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, socketserver.BaseRequestHandler)
        self._acceptor = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="kv-listener", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening, close all connections, and wait a few seconds for their threads."""
        self.shutdown()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            sever(connection)
        self._acceptor.join(_ENDING_SECONDS)
        for thread in connections.values():
            if thread is not None:
                thread.join(_ENDING_SECONDS)
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            _logger.warning("cannot accept a KV connection: %s", error)
            time.sleep(0.1)  # an error such as too many open files would come again at once
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._idle_seconds)
        with self._lock:
            self._connections[connection] = None
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                sever(oldest)
        return connection, address

    def finish_request(self, request: Request, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        connection = _connection(request)
        thread = threading.current_thread()
        thread.name = "kv-sender"
        with self._lock:
            self._connections[connection] = thread
        self._serve(connection, lambda: self._forget(self._strangers, connection))

    def shutdown_request(self, request: Request) -> None:
        """Close a connection."""
        connection = _connection(request)
        self._forget(self._strangers, connection)
        self._forget(self._connections, connection)
        super().shutdown_request(request)

    def handle_error(self, request: Request, client_address: Any) -> None:
        """Log a connection's error."""
        error = sys.exception()
        if isinstance(error, OSError):
            _logger.info("a KV connection was closed early: %s", error)
        else:
            _logger.exception("a KV request failed")

    def _forget(self, connections: dict, connection: socket.socket) -> None:
        with self._lock:
            connections.pop(connection, None)


def _connection(request: Request) -> socket.socket:
    assert isinstance(request, socket.socket)  # the server is one of streams
    return request
