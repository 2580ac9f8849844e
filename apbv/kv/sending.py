"""Sends KV from the memory of the process that holds it, and listens for requests."""

import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import intersect
from ..transfer import side_stream
from .facts import Run, StorageError, rows_of
from .wire import Address, sever

Layers = Sequence[tuple[Tensor, Tensor]]

_logger = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections that have not presented a secret yet
_ENDING_SECONDS = 5.0
_POLL_SECONDS = 0.05  # after which a listener that ends notices


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
        self._computed = None
        if self._device.type == "cuda":
            self._computed = torch.cuda.current_stream(self._device).record_event()

    def part(
        self, tokens: range, kv_heads: range, layers: range
    ) -> tuple[list[Run], Run, Iterator[tuple[Tensor, Tensor]]]:
        """Return the requested part of this share, which may be empty.

        Returns:
            The part's token numbers; its KV heads; and of each layer its keys and values
            ``[H, T, D]`` in CPU memory, with contiguous rows: the share's own memory if possible,
            valid until the next are requested.

        Raises:
            StorageError: layers are out of range.
        """
        if layers.stop > len(self._layers):
            raise StorageError(f"the KV has {len(self._layers)} layers, not {layers.stop}")
        heads = intersect(self.kv_heads, kv_heads)
        found = list(rows_of(self.runs, [tokens])) if heads else []
        runs = [(tokens.start + place.start, tokens.start + place.stop) for _, place in found]
        # The runs ascend, so a range of tokens maps to contiguous rows.
        rows = slice(found[0][0].start, found[-1][0].stop) if found else slice(0, 0)
        chosen = slice(heads.start - self.kv_heads.start, heads.stop - self.kv_heads.start), rows
        states = (
            (keys[chosen], values[chosen])
            for keys, values in self._layers[layers.start : layers.stop]
        )
        in_host_memory = _contiguous(states) if self._computed is None else self._copied(states)
        return runs, (heads.start, heads.stop), in_host_memory

    def _copied(self, layers: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy layers from the GPU, each while the previous one is being sent, next to other GPU
        work."""
        stream = side_stream(self._device, "sending")
        stream.wait_event(self._computed)
        buffers: list[list[Tensor]] = []

        def start(
            states: tuple[Tensor, Tensor], number: int
        ) -> tuple[list[Tensor], torch.cuda.Event]:
            if len(buffers) <= number % 2:
                buffers.append(
                    [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in states]
                )
            with torch.cuda.stream(stream):
                for buffer, each in zip(buffers[number % 2], states, strict=True):
                    buffer.copy_(each, non_blocking=True)
                return buffers[number % 2], stream.record_event()

        under_way = None
        try:
            for number, states in enumerate(layers):
                previous = under_way
                under_way = start(states, number)
                if previous is not None:
                    previous[1].synchronize()
                    yield tuple(previous[0])
            if under_way is not None:
                under_way[1].synchronize()
                yield tuple(under_way[0])
        finally:  # neither the KV nor the buffers may be freed before
            if under_way is not None:
                under_way[1].synchronize()


def _contiguous(layers: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values ``[H, T, D]`` with contiguous rows, copied only if theirs are not."""
    for layer in layers:
        yield tuple(x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in layer)


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

    allow_reuse_address = daemon_threads = True
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
        for thread in [self._acceptor, *filter(None, connections.values())]:
            thread.join(_ENDING_SECONDS)
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            _logger.warning("cannot accept a KV connection: %s", error)
            time.sleep(0.1)  # such as too many open files
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._idle_seconds)
        with self._lock:
            self._connections[connection] = self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                first = next(iter(self._strangers))
                del self._strangers[first]
                sever(first)
        return connection, address

    def finish_request(self, request: socket.socket, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        thread = threading.current_thread()
        thread.name = "kv-sender"
        with self._lock:
            self._connections[request] = thread
        self._serve(request, lambda: self._forget(self._strangers, request))

    def shutdown_request(self, request: socket.socket) -> None:
        """Close a connection."""
        self._forget(self._strangers, request)
        self._forget(self._connections, request)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket, client_address: Any) -> None:
        """Log a connection's error."""
        if isinstance(error := sys.exc_info()[1], OSError):
            _logger.info("a KV connection was closed early: %s", error)
        else:
            _logger.exception("a KV request failed")

    def _forget(self, connections: dict, connection: socket.socket) -> None:
        with self._lock:
            connections.pop(connection, None)
