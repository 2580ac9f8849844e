"""Lets a consumer read KV out of the producers' memory by RDMA, with the library NIXL.

The connection to each source stays, for the ticket's secret, for who holds what, and to tell the end of reading.
The KV itself is read by NIXL's back end UCX, which takes InfiniBand or RoCE where there is such a network, also
between GPUs, and else shared memory or TCP. There is no checksum: the network's own protects what travels.

Needs the extra ``rdma``; import it only where RDMA is asked for.
"""

import base64
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from torch import Tensor

from .facts import Run, StorageError, rows_of
from .receiving import Reception, Wanted
from .sending import Part, Share
from .ticket import Ticket
from .wire import Address, connect, raise_error_of, read_message, send_message, unreachable

_POLL_SECONDS = 2e-4
_BACK_END = "UCX"


class Exposer:
    """Lets others read memory of this process, for as long as it is told to."""

    def __init__(self):
        self._agent, self._lock = _new_agent(), threading.Lock()

    @contextmanager
    def exposing(self, share: Share, part: Part) -> Iterator[dict[str, Any]]:
        """Register a part's memory until the end of the block, and give what a reader has to know of it."""
        layers = share.in_place(part)
        tensors = [states for layer in layers for states in layer if states.numel()]
        kind, device = _memory_of(layers[0][0]) if layers else ("DRAM", 0)
        regions = [(states.data_ptr(), _extent(states), device, "") for states in tensors]
        registered = None
        with self._lock:
            if regions:
                registered = self._agent.register_memory(regions, kind, backends=[_BACK_END])
            metadata = self._agent.get_agent_metadata()
        try:
            yield {
                "agent": base64.b64encode(metadata).decode(),
                "memory": [kind, device],
                "layers": [[_place(states) for states in layer] for layer in layers],
            }
        finally:
            with self._lock:
                if registered is not None:
                    self._agent.deregister_memory(registered, backends=[_BACK_END])


@dataclass(frozen=True)
class _Source:
    """A source whose memory may be read: what it holds of what is wanted, and where."""

    address: Address
    connection: socket.socket
    agent: str
    memory: tuple[str, int]
    runs: tuple[Run, ...]
    kv_heads: Run
    layers: list[
        list[tuple[int, int]]
    ]  # of every layer's keys and values the address, and bytes from head to head


class RdmaReception(Reception):
    """Reads layers out of the sources' memory; arguments as of :class:`apbv.kv.receiving.Reception`.

    Raises:
        StorageError: a source cannot be reached, refuses, or has no RDMA.
    """

    def __init__(self, ticket: Ticket, wanted: Wanted, reader: dict[str, Any], timeout: float):
        super().__init__(ticket, wanted, reader, timeout)
        self._agent, self._sources, self._handles, self._num_begun = _new_agent(), [], {}, 0
        regions = [(buffer.data_ptr(), buffer.nbytes, 0, "") for buffer in self._buffers if buffer.numel()]
        self._registered = self._agent.register_memory(regions, "DRAM", backends=[_BACK_END]) if regions else None
        try:
            for address in dict.fromkeys(ticket.sources):
                self._sources.append(self._open(address))
            self._require_complete((source.runs, source.kv_heads) for source in self._sources)
        except BaseException:
            self.close()
            raise

    def _await_layer(self, number: int) -> None:
        self._num_given += 1
        try:
            for source in self._sources:
                self._require_there(source)  # before more is read from memory that may be free
            while self._num_begun < min(number + len(self._buffers), len(self._wanted.layers)):
                self._begin(self._num_begun)
                self._num_begun += 1
            for source, handle in self._handles.pop(number):
                self._wait_for(source, handle)
            if self._num_given == len(self._wanted.layers):
                for source in self._sources:
                    self._require_kept(source)
        except StorageError:
            raise
        except Exception as error:  # NIXL has a class of its own for every kind
            raise StorageError(f"{self._name} cannot be read: {error}") from error

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for handles in self._handles.values():
            for _, handle in handles:
                handle.release()
        self._handles.clear()
        for source in self._sources:
            source.connection.close()
            self._agent.remove_remote_agent(source.agent)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered, backends=[_BACK_END])

    def _open(self, address: Address) -> _Source:
        connection = None
        try:
            connection = connect(address, self._timeout)
            send_message(connection, {**self._request, "rdma": True})
            reply = read_message(connection, self._timeout)
            raise_error_of(reply)
            runs, kv_heads = self._held_part(reply)
            window = reply["window"]
            kind, device = window["memory"]
            agent = self._agent.add_remote_agent(base64.b64decode(window["agent"]))
            return _Source(address, connection, agent, (kind, device), runs, kv_heads, window["layers"])
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):
                raise unreachable(address, error) from error
            if isinstance(error, (KeyError, TypeError, ValueError)) and not isinstance(error, StorageError):
                raise StorageError(f"{address[0]}:{address[1]} does not say where its KV can be read") from error
            raise

    def _begin(self, number: int) -> None:
        """Begin to read a layer from all sources."""
        buffer, size = self._buffer(number), self._ticket.torch_dtype.itemsize
        row_bytes, self._handles[number] = self._ticket.head_dim * size, []
        for source in self._sources:
            here, there = [], []
            for states, (start, stride) in zip(buffer, source.layers[number], strict=True):
                for head in range(*source.kv_heads):
                    own = states[head - self._wanted.kv_heads.start]
                    first = start + (head - source.kv_heads[0]) * stride
                    for rows, places in rows_of(source.runs, [self._wanted.tokens]):
                        count = (rows.stop - rows.start) * row_bytes
                        here.append((own.data_ptr() + places.start * row_bytes, count, 0))
                        there.append((first + rows.start * row_bytes, count, source.memory[1]))
            if not here:
                continue
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(here, "DRAM"),
                self._agent.get_xfer_descs(there, source.memory[0]),
                source.agent,
                backends=[_BACK_END],
            )
            self._handles[number].append((source, handle))
            self._agent.transfer(handle)

    def _require_there(self, source: _Source) -> None:
        if select.select([source.connection], [], [], 0)[0]:
            raise self._broke_off(source.address)

    def _require_kept(self, source: _Source) -> None:
        """Have a source say that its memory was kept until all of it has been read."""
        try:
            send_message(source.connection, {})
            raise_error_of(read_message(source.connection, self._timeout))
        except OSError as error:
            raise self._broke_off(source.address) from error

    def _wait_for(self, source: _Source, handle) -> None:
        deadline = time.monotonic() + self._timeout
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            host, port = source.address
            if state != "PROC":
                raise StorageError(f"the memory of {host}:{port} cannot be read: {state}")
            self._require_there(source)
            if time.monotonic() > deadline:
                raise StorageError(f"reading the memory of {host}:{port} took more than {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)
        handle.release()


def _new_agent() -> nixl_agent:
    config = nixl_agent_config(backends=[_BACK_END], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    return nixl_agent(f"apbv-{secrets.token_hex(8)}", config)


def _memory_of(tensor: Tensor) -> tuple[str, int]:
    return ("VRAM", tensor.device.index) if tensor.is_cuda else ("DRAM", 0)


def _extent(states: Tensor) -> int:
    """Count the bytes from the first number of ``[H, T, D]`` to behind its last."""
    num_heads, num_rows, dim = states.shape
    return ((num_heads - 1) * states.stride(0) + num_rows * dim) * states.element_size()


def _place(states: Tensor) -> list[int]:
    return [states.data_ptr(), states.stride(0) * states.element_size()]
