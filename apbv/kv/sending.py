"""Sends KV from the memory of the process that holds it, and listens for those who ask for it."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import intersect
from .facts import Run, StorageError, rows_of
from .wire import Address, sever

Layers = Sequence[tuple[Tensor, Tensor]]

_logger = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections that have shown no secret yet
_BACKLOG = 128
_ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """A Part of a process's KV that somebody asks for.

    Attributes:
        heads: which of the process's KV heads, counted from its first.
        rows: which of its rows.
        layers: which layers.
        runs: the token numbers of these rows.
        kv_heads: the numbers of these KV heads in the whole model.
    """

    heads: slice
    rows: slice
    layers: range
    runs: tuple[Run, ...]
    kv_heads: Run


class Share:
    """The KV of a prompt that one process holds, on a GPU or in host memory.

    Nothing may write to it as long as it is offered. On a GPU it is read behind what the current stream has been
    given so far.

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

    def part(self, tokens: range, kv_heads: range, layers: range) -> Part:
        """Return what of this share is asked for, which may be nothing.

        Raises:
            StorageError: there are no such layers.
        """
        if layers.stop > len(self._layers):
            raise StorageError(f"there are {len(self._layers)} layers, not {layers.stop}")
        heads = intersect(self.kv_heads, kv_heads)
        rows = [rows for rows, _ in rows_of(self.runs, [tokens])] if heads else []
        common = (intersect(range(*run), tokens) for run in self.runs) if heads else ()
        return Part(
            heads=slice(heads.start - self.kv_heads.start, heads.stop - self.kv_heads.start),
            # The runs ascend, so that what lies within a range of tokens lies in rows without a gap.
            rows=slice(rows[0].start, rows[-1].stop) if rows else slice(0, 0),
            layers=layers,
            runs=tuple((run.start, run.stop) for run in common if run),
            kv_heads=(heads.start, heads.stop),
        )

    def in_host_memory(self, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values ``[H, T, D]`` of each layer, whose rows lie one behind the other.

        They are the share's own memory where that is possible, and valid until the next are asked for.
        """
        return (
            self._copied(part) if self._computed is not None else (self._of(part, index) for index in part.layers)
        )

    def in_place(self, part: Part) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values ``[H, T, D]`` of each layer where they lie, once they have been computed."""
        if self._computed is not None:
            self._computed.synchronize()
        return [self._of(part, index) for index in part.layers]

    def _of(self, part: Part, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[H, T, D]`` such that each head's rows lie one behind the other."""
        found = (states[part.heads, part.rows] for states in self._layers[layer])
        return tuple(x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in found)

    def _copied(self, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy layers from the GPU, each while the one before is being sent, beside what else the GPU does."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._computed)
        buffers: list[list[Tensor]] = []

        def start(states: tuple[Tensor, Tensor], number: int) -> tuple[list[Tensor], torch.cuda.Event]:
            if len(buffers) <= number % 2:
                buffers.append([torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in states])
            with torch.cuda.stream(stream):
                for buffer, each in zip(buffers[number % 2], states, strict=True):
                    buffer.copy_(each, non_blocking=True)
                return buffers[number % 2], stream.record_event()

        under_way = None
        try:
            for number, index in enumerate(part.layers):
                states = tuple(each[part.heads, part.rows] for each in self._layers[index])
                previous, under_way = under_way, start(states, number)
                if previous is not None:
                    previous[1].synchronize()
                    yield tuple(previous[0])
            if under_way is not None:
                under_way[1].synchronize()
                yield tuple(under_way[0])
        finally:  # neither the KV nor the buffers may be freed before
            if under_way is not None:
                under_way[1].synchronize()


class Listener:
    """Takes connections, and serves each in a thread of its own.

    A connection is a stranger's until it is trusted. Where there are many of these, each newcomer ends the first.

    Args:
        address: where to listen; port 0 takes any that is free.
        serve: called with each connection, which is closed when it returns, and with what trusts it.
        idle_seconds: for how long a connection may neither give nor take anything.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        address: Address,
        serve: Callable[[socket.socket, Callable[[], None]], None],
        idle_seconds: float,
    ):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=_BACKLOG)
        self._serve, self._idle_seconds = serve, idle_seconds
        self._lock, self._is_closed = threading.Lock(), False
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, None] = {}  # who came first, first
        self._acceptor = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return self._socket.getsockname()[1]

    def close(self) -> None:
        """Listen no more, end all connections, and wait a few seconds for their threads."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.items())
        sever(self._socket)
        for _, connection in connections:
            sever(connection)
        for thread in [self._acceptor, *(thread for thread, _ in connections)]:
            thread.join(_ENDING_SECONDS)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _logger.warning("a connection for KV could not be taken: %s", error)
                time.sleep(0.1)  # such as too many open files
                continue
            thread = threading.Thread(target=self._run, args=(connection,), name="kv-sender", daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections[thread], self._strangers[thread] = connection, None
                if len(self._strangers) > MAX_STRANGERS:
                    first = next(iter(self._strangers))
                    del self._strangers[first]
                    sever(self._connections[first])
            try:
                thread.start()
            except RuntimeError as error:  # such as too many threads
                _logger.warning("a connection for KV could not be served: %s", error)
                self._forget(thread)
                connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._idle_seconds)
                self._serve(connection, self._trust)
        except OSError as error:
            _logger.info("a connection for KV ended early: %s", error)
        except Exception:
            _logger.exception("a request for KV failed")
        finally:
            self._forget(threading.current_thread())

    def _trust(self) -> None:
        """Let the connection that this thread serves stay, however many others come."""
        with self._lock:
            self._strangers.pop(threading.current_thread(), None)

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._strangers.pop(thread, None)
            del self._connections[thread]
