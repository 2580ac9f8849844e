"""Lets a consumer read KV out of the producers' memory by RDMA, with the library NIXL.

The connection to each source stays, for the ticket's secret, for who holds what, and to tell the end of reading.
The KV itself is read by NIXL's backend UCX, which takes InfiniBand or RoCE where there is such a network, also
between GPUs, and else shared memory or TCP. There is no checksum: the network's own protects what travels.

Needs the extra ``rdma``; import it only where RDMA is asked for.
"""

import base64
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from torch import Tensor

from .facts import StorageError, rows_of
from .receiving import Source, Wanted
from .sending import Part, Share
from .wire import Address, Severed, ask_on

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


@contextmanager
def rdma_sources(buffers: Sequence[Tensor]) -> Iterator[Callable[[Address, Wanted], "RdmaSource"]]:
    """Open sources that read to these buffers; see :func:`apbv.kv.receiving.received`."""
    agent = _new_agent()
    regions = [(buffer.data_ptr(), buffer.nbytes, 0, "") for buffer in buffers if buffer.numel()]
    registered = agent.register_memory(regions, "DRAM", backends=[_BACK_END]) if regions else None
    try:
        yield partial(RdmaSource, agent)
    finally:
        if registered is not None:
            agent.deregister_memory(registered, backends=[_BACK_END])


class RdmaSource(Source):
    """A source whose memory is read.

    Args:
        agent: NIXL's.
        address, wanted: as of :class:`apbv.kv.receiving.Source`.
    """

    request: ClassVar[dict[str, Any]] = {"do": "fetch", "rdma": True}

    def __init__(self, agent: nixl_agent, address: Address, wanted: Wanted):
        self._agent = agent
        super().__init__(address, wanted)

    def begin(self, reply: dict[str, Any]) -> None:
        super().begin(reply)
        try:
            window = reply["window"]
            self._kind, self._device = window["memory"]
            self._layers = window["layers"]  # of every layer's keys and values the address, and bytes per head
            self._name = self._agent.add_remote_agent(base64.b64decode(window["agent"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError("KV source sent no valid memory description") from error

    def receive(self, index: int, buffer: Tensor) -> None:
        wanted = self.wanted
        with self.described(f"in layer {index} of {wanted.ticket.num_layers}"):
            handle, deadline = None, time.monotonic() + wanted.timeout
            try:
                handle = self._start(index, buffer)
                while handle and (state := self._agent.check_xfer_state(handle)) != "DONE":
                    if state != "PROC":
                        raise StorageError(f"{wanted.name} cannot be read: {state}")
                    self._require_there()
                    if time.monotonic() > deadline:
                        raise StorageError(f"reading {wanted.name} took more than {wanted.timeout:g} s")
                    time.sleep(_POLL_SECONDS)
            except (StorageError, OSError):
                raise
            except Exception as error:  # NIXL has a class of its own for every kind
                raise StorageError(f"{wanted.name} cannot be read: {error}") from error
            finally:
                if handle:
                    handle.release()
            if index == wanted.layers[-1]:  # have the source say that its memory was kept until now
                ask_on(self.connection, {}, wanted.timeout)

    def _start(self, index: int, buffer: Tensor) -> Any:
        """Begin to read a layer; return NIXL's handle, None if there is nothing to read."""
        self._require_there()  # before more is read from memory that may be free
        wanted, (kind, device) = self.wanted, (self._kind, self._device)
        row_bytes = wanted.ticket.head_dim * wanted.ticket.torch_dtype.itemsize
        here, there = [], []
        for states, (start, stride) in zip(buffer, self._layers[index - wanted.layers.start], strict=True):
            for head in range(*self.kv_heads):
                own = states[head - wanted.kv_heads.start].data_ptr()
                first = start + (head - self.kv_heads[0]) * stride
                for rows, places in rows_of(self.runs, [wanted.tokens]):
                    count = (rows.stop - rows.start) * row_bytes
                    here.append((own + places.start * row_bytes, count, 0))
                    there.append((first + rows.start * row_bytes, count, device))
        if not here:
            return None
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, "DRAM"),
            self._agent.get_xfer_descs(there, kind),
            self._name,
            backends=[_BACK_END],
        )
        self._agent.transfer(handle)
        return handle

    def _require_there(self) -> None:
        if select.select([self.connection], [], [], 0)[0]:
            raise Severed


def _new_agent() -> nixl_agent:
    config = nixl_agent_config(backends=[_BACK_END], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    return nixl_agent(f"apbv-{secrets.token_hex(8)}", config)


def _memory_of(tensor: Tensor) -> tuple[str, int]:
    return ("VRAM", tensor.device.index) if tensor.is_cuda else ("DRAM", 0)


def _extent(states: Tensor) -> int:
    """Count the bytes from the first number of ``[H, T, D]`` to the end of its last."""
    num_heads, num_rows, dim = states.shape
    return ((num_heads - 1) * states.stride(0) + num_rows * dim) * states.element_size()


def _place(states: Tensor) -> list[int]:
    return [states.data_ptr(), states.stride(0) * states.element_size()]
