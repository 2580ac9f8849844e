"""The worker's half of the connector: writes loaded KV into vLLM's paged cache.

A thread for each load receives layers, a few ahead. The engine's thread writes what has arrived
between two steps of the model, so that requests that are being decoded never wait for a network or
a disk.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Condition
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from .scheduling import reason_of
from .sources import Layers, Load, LoadMetadata

_NUM_THREADS = 16  # loads at a time; others wait their turn
_LAYERS_AHEAD = 2  # of a load, in memory and not written yet
_BUSY_SECONDS = 0.005  # for writing, in a step that also computes
_IDLE_SECONDS = 0.02  # for waiting and writing, in a step that computes nothing

logger = init_logger(f"vllm.{__name__}")


class Fetch:
    """Load in progress, whose layers arrive in the background.

    Args:
        changed: notified whenever something has arrived or was taken.
        num_layers: the number of layers.
        open_layers: called in the load's thread; returns an iterator over the layers, keys and
            values ``[H, T, D]``.

    Attributes:
        arrived: the layers that have arrived and were not taken, keys and values ``[T, H, D]``;
            after the last one None, or an error.
        began: when the load began, in seconds since the epoch.
        first, last: when the first and the newest layer had arrived, in seconds since the epoch;
            None before.
    """

    def __init__(self, changed: Condition, num_layers: int, open_layers: Callable[[], Layers]):
        self._changed = changed
        self._num_layers = num_layers
        self._open_layers = open_layers
        self._is_closed = False
        self.began = time.time()
        self.first: float | None = None
        self.last: float | None = None
        self.arrived: deque[tuple[Tensor, Tensor] | Exception | None] = deque()

    def run(self) -> None:
        """Receive all layers, in a thread of its own."""
        try:
            with closing(self._open_layers()) as layers:
                for number, (keys, values) in enumerate(layers, 1):
                    if not self._hand_over((_copy_by_token(keys), _copy_by_token(values))):
                        return
                    # Not after the loop: the iterator first confirms to the hosts, which takes a
                    # while.
                    if number == self._num_layers:
                        self._hand_over(None)
        except Exception as error:  # only this request fails, not the engine
            self._hand_over(error)

    def _hand_over(self, item: tuple[Tensor, Tensor] | Exception | None) -> bool:
        """Queue a layer, the end or an error once there is room.

        Returns:
            False if the load was cancelled.
        """
        with self._changed:
            if isinstance(item, tuple):
                self.last = time.time()
                if self.first is None:
                    self.first = self.last
            self._changed.wait_for(lambda: self._is_closed or len(self.arrived) < _LAYERS_AHEAD)
            self.arrived.append(item)
            self._changed.notify_all()
            return not self._is_closed

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the next layer that has arrived, or None after the last one.

        Raises:
            Exception: the load has failed.
        """
        with self._changed:
            item = self.arrived.popleft()
            self._changed.notify_all()
        if isinstance(item, Exception):
            raise item
        return item

    def timeline(self) -> str:
        """Describe the timing of a load whose layers are all in place now."""
        now = time.time()
        assert self.first is not None and self.last is not None, "all layers have arrived"
        return (
            f"fetch began at {self.began:.6f}; first layer {self.first - self.began:.6f}, all "
            f"{self.last - self.began:.6f}, in place {now - self.began:.6f} s"
        )

    def close(self) -> None:
        """Stop receiving."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _copy_by_token(states: Tensor) -> Tensor:
    """Copy states ``[H, T, D]`` to ``[T, H, D]``, as vLLM's cache takes them.

    The source overwrites its layer with the next one.
    """
    return states.transpose(0, 1).clone(memory_format=torch.contiguous_format)


class AttentionLayer(Protocol):
    """vLLM's attention layer.

    Attributes:
        kv_cache: its part of the paged cache.
        num_kv_heads: of this worker.
        impl: the backend, which writes to the cache.
    """

    kv_cache: Tensor
    num_kv_heads: int
    impl: Any


class PagedWriter:
    """Writes the layers of one request into its blocks, in order.

    Args:
        load: the tokens and blocks of the request.
        layers: vLLM's attention layers, in order.
        block_size: tokens of a block.
    """

    def __init__(self, load: Load, layers: list[AttentionLayer], block_size: int):
        self._layers = iter(layers)
        tokens = torch.arange(load.tokens.start, load.tokens.stop)
        blocks = torch.tensor(load.block_ids, dtype=torch.int64)
        self._slots = blocks[tokens // block_size] * block_size + tokens % block_size

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the next layer's keys and values, ``[T, H, D]``."""
        layer = next(self._layers)
        self._slots = self._slots.to(layer.kv_cache.device)
        keys = keys.to(layer.kv_cache.device)
        values = values.to(layer.kv_cache.device)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, self._slots)


class Loading:
    """The worker's half of the connector, which writes what has arrived in every engine step."""

    def __init__(self, vllm_config: VllmConfig, group: KVCacheGroupSpec):
        modules = vllm_config.compilation_config.static_forward_context
        names = sorted(group.layer_names, key=extract_layer_index)
        self._layers: dict[int, AttentionLayer] = {
            extract_layer_index(name): modules[name] for name in names
        }
        self._num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        self._block_size = group.kv_cache_spec.block_size
        self._arrival = Condition()  # of a layer of any load
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="apbv-load")
        self._running: dict[str, tuple[Fetch, PagedWriter]] = {}
        self._results = KVConnectorTransferResults()

    def step(self, metadata: LoadMetadata) -> None:
        """Start the loads of the scheduler's metadata, and write arrived layers.

        A step that computes nothing waits a little for layers, so that the engine does not spin. A
        step that computes writes for a few milliseconds at most, or one layer of each load.
        """
        # End and begin loads.
        stopped = metadata.abandoned & self._running.keys()
        for request_id in metadata.refused | stopped:
            self._end(request_id, failed=True)
        for request_id, load in metadata.loads.items():
            self._begin(request_id, load)

        # Write layers until the time is over, a load has ended, or no layer is there to write.
        seconds = _IDLE_SECONDS if metadata.is_idle else _BUSY_SECONDS
        deadline = time.monotonic() + seconds
        while self._running:
            has_written = False
            for request_id in list(self._running):
                if self._write_next(request_id):
                    has_written = True
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0 or self._results.finished_recving:
                return
            if has_written:
                continue
            if not metadata.is_idle:
                return
            with self._arrival:
                self._arrival.wait_for(self._has_arrived, remaining_seconds)

    def _has_arrived(self) -> bool:
        """Return whether a layer, the end or an error of any load waits to be taken."""
        return any(fetch.arrived for fetch, _ in self._running.values())

    def take_results(self) -> KVConnectorTransferResults:
        """Return the loads that have ended since the last call."""
        results = self._results
        self._results = KVConnectorTransferResults()
        return results

    def close(self) -> None:
        """Stop all loads."""
        for fetch, _ in self._running.values():
            fetch.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request_id: str, load: Load) -> None:
        heads = self._local_heads()
        layers = range(min(self._layers), max(self._layers) + 1)  # this pipeline stage's

        def open_layers() -> Layers:
            return load.source.read(load.tokens, heads, layers)

        fetch = Fetch(self._arrival, len(layers), open_layers)
        writer = PagedWriter(load, list(self._layers.values()), self._block_size)
        self._running[request_id] = (fetch, writer)
        self._threads.submit(fetch.run)

    def _write_next(self, request_id: str) -> bool:
        """Write one layer of a request if it has arrived, or end the load after the last one.

        Returns:
            Whether anything had arrived.
        """
        fetch, writer = self._running[request_id]
        if not fetch.arrived:
            return False
        try:
            layer = fetch.take()
            if layer is not None:
                writer.write(*layer)
            else:
                logger.debug("request %s: %s", request_id, fetch.timeline())
                self._end(request_id)
        except Exception as error:  # only this request fails, not the engine
            logger.error("the KV of request %s cannot be loaded: %s", request_id, reason_of(error))
            self._end(request_id, failed=True)
        return True

    def _end(self, request_id: str, failed: bool = False) -> None:
        """Stop a load, if it runs, and report it to the scheduler."""
        if request_id in self._running:
            fetch, _ = self._running.pop(request_id)
            fetch.close()
        self._results.finished_recving.add(request_id)
        if failed:
            self._results.failed_recving.add(request_id)

    def _local_heads(self) -> range:
        """Return this tensor-parallel worker's KV heads.

        If there are fewer heads than workers, several workers have the same one.
        """
        rank = get_tensor_model_parallel_rank()
        size = get_tensor_model_parallel_world_size()
        first = rank * self._num_kv_heads // size
        any_layer = next(iter(self._layers.values()))
        return range(first, first + any_layer.num_kv_heads)
