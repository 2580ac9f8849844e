"""Exchanges of data that the process group cannot reach, such as a GPU's over gloo: by way of host memory.

So several hosts can share a GPU, where NCCL refuses two processes. What is sent is copied to host memory in the
order of the GPU's work, while the caller goes on. A thread sends it once it is there, and receives: one exchange
after the other, in the order in which they were started, which is the same on every host. Who waits for an
exchange has what was received copied to its device.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Parcel, gather_into, swap_into
from .exchange import ENDING_SECONDS, Exchange
from .failure_watch import POLL_SECONDS, FailureWatch
from .pending import PendingCall


class StagedCollectives:
    """The exchanges of :class:`.collectives.Collectives`, for tensors on any device over a group for host memory.

    Args:
        group: a gloo group that nothing else uses.
        watch: waits for the exchanges.
    """

    def __init__(self, group: dist.ProcessGroup, watch: FailureWatch):
        self._group, self._watch = group, watch
        self._courier = Courier()

    def all_gather(self, tensor: Tensor) -> Exchange:
        """Start gathering one contiguous tensor of the same shape from every process, to ``[N, *shape]``."""
        sent = _HostCopy(tensor)
        received = _buffer((dist.get_world_size(self._group), *tensor.shape), tensor)
        return self._exchange(sent, partial(gather_into, self._group, received, sent.buffer), received)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:
        """Start sending tensor p to every process p and receiving one of shape ``shapes[p]`` from it."""
        parcel = Parcel(tensors, shapes)
        sent = _HostCopy(parcel.sent)
        received = _buffer((parcel.num_received,), parcel.sent)
        begin = partial(swap_into, self._group, received, sent.buffer, parcel)
        return self._exchange(sent, begin, received, parcel.unpacked)

    def broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor from one process to all, in place; shape and dtype are the same everywhere."""
        is_source = dist.get_rank(self._group) == source
        copy = _HostCopy(tensor, is_empty=not is_source)

        def received(values: Tensor) -> Tensor:
            return tensor if is_source else tensor.copy_(values)

        begin = partial(dist.broadcast, copy.buffer, group=self._group, group_src=source, async_op=True)
        return self._exchange(copy, begin, copy.buffer, received)

    def _exchange(
        self,
        sent: "_HostCopy",
        begin: Callable[[], dist.Work],
        buffer: Tensor,
        finish: Callable[[Tensor], Any] = lambda values: values,
    ) -> Exchange:
        """Have the thread exchange host memory.

        Args:
            sent: what is sent.
            begin: starts the exchange.
            buffer: what it fills.
            finish: makes the result of what the buffer holds, on the device.
        """
        watch, courier, device = self._watch, self._courier, sent.device

        def carry() -> None:
            sent.wait()
            courier.wait(begin())

        watch.require_whole()
        carried = courier.send(carry)

        def arrived() -> Any:
            watch.wait(PendingCall(carried))
            return finish(buffer.to(device, non_blocking=True))

        return Exchange(arrived, carried.done)


class _HostCopy:
    """A copy of a tensor in host memory, which holds the tensor's values only after :meth:`wait`."""

    def __init__(self, tensor: Tensor, is_empty: bool = False):
        self.device, self.buffer = tensor.device, _buffer(tensor.shape, tensor)
        self._copied: torch.cuda.Event | None = None
        if not is_empty:
            self.buffer.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _buffer(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return host memory, which a GPU can copy from and to by itself if it is for one."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Courier:
    """Makes calls in a thread, one after the other, until it is garbage; its thread begins with the first call."""

    def __init__(self):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, call: Callable[[], Any]) -> Future:
        """Have a call made behind those before, and return its future."""
        if self._thread is None:
            self._thread = threading.Thread(target=_deliver, args=(self._calls,), name="courier", daemon=True)
            self._thread.start()
            # At exit, too: a thread that is inside gloo when the interpreter ends aborts the process.
            weakref.finalize(self, _end, self._thread, self._calls, self._ended)
        future: Future = Future()
        self._calls.put((call, future))
        return future

    def wait(self, work: dist.Work) -> None:
        """Wait, in the thread, until an exchange is complete, or nobody wants to know any more.

        Raises:
            RuntimeError: it failed, or was given up.
        """
        while True:
            try:
                work.wait(timedelta(seconds=POLL_SECONDS))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its error, unless it only ran out of time just before the work was done
                    return
                if self._ended.is_set():
                    raise


def _deliver(calls: queue.SimpleQueue) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future


def _end(thread: threading.Thread, calls: queue.SimpleQueue, ended: threading.Event) -> None:
    ended.set()
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(ENDING_SECONDS)
