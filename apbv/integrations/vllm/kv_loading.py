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
_AHEAD = 2  # layers of a load in memory that are not written yet
_BUSY_SECONDS = 0.005  # for writing, in a step that also computes
_IDLE_SECONDS = 0.02  # for waiting and writing, in a step that computes nothing

logger = init_logger(f"vllm.{__name__}")


class Fetch:
    """Load in progress, whose layers arrive in the background.

    Attributes:
        arrived: what has arrived and was not taken: layers, ``[T, H, D]``; at last None, or an
            error.
        began: when it was asked for, in seconds since the epoch.
        first, last: when the first and the last layer had arrived.
    """

    def __init__(self, news: Condition, num_layers: int, layers: Callable[[], Layers]):
        self._news = news
        self._num_layers = num_layers
        self._layers = layers
        self._is_closed = False
        self.began = time.time()
        self.first = self.last = None
        self.arrived: deque[tuple[Tensor, Tensor] | Exception | None] = deque()

    def run(self) -> None:
        """Receive all layers, in a thread of its own."""
        try:
            with closing(self._layers()) as layers:
                for number, layer in enumerate(layers, 1):
                    # By token, as vLLM's cache takes them; a copy, because the next layer takes
                    # their place.
                    by_token = (states.transpose(0, 1) for states in layer)
                    keys, values = (
                        states.clone(memory_format=torch.contiguous_format) for states in by_token
                    )
                    if not self._hand_over((keys, values)):
                        return
                    if number == self._num_layers:  # now: notifying the hosts may take a while
                        self._hand_over(None)
        except Exception as error:  # only this request fails, not the engine
            self._hand_over(error)

    def _hand_over(self, item: tuple[Tensor, Tensor] | Exception | None) -> bool:
        """Queue arrived data when there is room, unless the load was cancelled."""
        with self._news:
            if isinstance(item, tuple):
                self.last = time.time()
                self.first = self.first or self.last
            self._news.wait_for(lambda: self._is_closed or len(self.arrived) < _AHEAD)
            self.arrived.append(item)
            self._news.notify_all()
            return not self._is_closed

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the next layer that has arrived, or None after the last one.

        Raises:
            Exception: the load has failed.
        """
        with self._news:
            item = self.arrived.popleft()
            self._news.notify_all()
        if isinstance(item, Exception):
            raise item
        return item

    def timeline(self) -> str:
        """Return the timing of the load, once everything is in place."""
        first, last, now = (moment - self.began for moment in (self.first, self.last, time.time()))
        return (
            f"fetch began at {self.began:.6f}; first layer {first:.6f}, all {last:.6f}, in place "
            f"{now:.6f} s"
        )

    def close(self) -> None:
        """Stop receiving."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()


class PagedWriter:
    """Writes the layers of one request into its blocks, in order."""

    def __init__(self, load: Load, layers: list[torch.nn.Module], block_size: int):
        self._layers = iter(layers)
        tokens = torch.arange(load.tokens.start, load.tokens.stop)
        blocks = torch.tensor(load.block_ids, dtype=torch.int64)
        self._slots = blocks[tokens // block_size] * block_size + tokens % block_size

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the next layer's keys and values, ``[T, H, D]``."""
        layer = next(self._layers)
        self._slots = self._slots.to(layer.kv_cache.device)
        keys, values = (states.to(layer.kv_cache.device) for states in (keys, values))
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, self._slots)


class Loading:
    """The worker's half of the connector, which writes what has arrived in every engine step."""

    def __init__(self, vllm_config: VllmConfig, group: KVCacheGroupSpec):
        modules = vllm_config.compilation_config.static_forward_context
        names = sorted(group.layer_names, key=extract_layer_index)
        self._layers = {extract_layer_index(name): modules[name] for name in names}
        self._num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        self._block_size = group.kv_cache_spec.block_size
        self._news = Condition()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="apbv-load")
        self._running: dict[str, tuple[Fetch, PagedWriter]] = {}
        self._results = KVConnectorTransferResults()

    def step(self, metadata: LoadMetadata) -> None:
        """Start the loads of the scheduler's metadata, and write arrived layers.

        A step that computes nothing else waits for news a little, so that the engine does not spin;
        one that does writes for a few milliseconds at most, or one layer of each load.
        """
        for request_id in metadata.refused | (metadata.abandoned & self._running.keys()):
            self._end(request_id, failed=True)
        for request_id, load in metadata.loads.items():
            self._begin(request_id, load)
        deadline = time.monotonic() + (_IDLE_SECONDS if metadata.is_idle else _BUSY_SECONDS)
        while self._running:
            wrote = [self._write_next(request_id) for request_id in list(self._running)]
            left = deadline - time.monotonic()
            if (
                left <= 0
                or self._results.finished_recving
                or (not metadata.is_idle and not any(wrote))
            ):
                return
            if not any(wrote):
                with self._news:
                    self._news.wait_for(
                        lambda: any(fetch.arrived for fetch, _ in self._running.values()), left
                    )

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
        heads, layers = self._own_heads(), range(min(self._layers), max(self._layers) + 1)
        fetch = Fetch(self._news, len(layers), lambda: load.source.read(load.tokens, heads, layers))
        self._running[request_id] = (
            fetch,
            PagedWriter(load, list(self._layers.values()), self._block_size),
        )
        self._threads.submit(fetch.run)

    def _write_next(self, request_id: str) -> bool:
        """Write one layer of a request if it has arrived; return whether it had."""
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
        if request_id in self._running:
            self._running.pop(request_id)[0].close()
        self._results.finished_recving.add(request_id)
        if failed:
            self._results.failed_recving.add(request_id)

    def _own_heads(self) -> range:
        """Return this tensor-parallel worker's KV heads.

        Several workers share one where there are too few.
        """
        rank = get_tensor_model_parallel_rank()
        size = get_tensor_model_parallel_world_size()
        first = rank * self._num_kv_heads // size
        return range(first, first + next(iter(self._layers.values())).num_kv_heads)
