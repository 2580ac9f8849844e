"""Collectives over one process group, and over gloo for GPU tensors, staged through CPU memory.

Staging lets several hosts share a GPU, where NCCL rejects two processes. Data to send is copied to
CPU memory in the order of the GPU's work, while the caller continues. Threads then send and receive
it: one collective after the other, in the order in which they were started, which is the same on
every host. Waiting for a collective copies the received data to the device.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

from ..pending import Pending
from .failure_watch import POLL_SECONDS, FailureWatch, PendingCall
from .threads import in_thread

T = TypeVar("T")
Options = TypeVar("Options", AllgatherOptions, AllToAllOptions, BroadcastOptions)

_DRAINING_SECONDS = 1.0
_NAP_SECONDS = 1e-3

# Starts a collective with the data to send and a tensor to fill.
Begin = Callable[[Tensor, Tensor], dist.Work]


class Collectives:
    """Collectives of one torch.distributed group, with failure detection.

    Args:
        group: the group, of N processes. It need not be one that torch knows.
        watch: starts the collectives and waits for them.
    """

    def __init__(self, group: dist.ProcessGroup, watch: FailureWatch):
        self._group = group
        self._watch = watch
        self._last_exchanged: list[weakref.ref[Tensor]] = []

    def all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        """Start gathering one contiguous tensor of the same shape from every process.

        The result is ``[N, *shape]``.
        """
        result = tensor.new_empty(self._group.size(), *tensor.shape)
        gather = getattr(self._group, "all_gather_single", None) or self._group._allgather_base

        def begin(sent: Tensor, received: Tensor) -> dist.Work:
            return gather(received, sent, _asynchronous(AllgatherOptions()))

        return self._exchange(tensor.flatten(), result.flatten(), begin, lambda: result)

    def all_to_all(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Pending[list[Tensor]]:
        """Start sending tensor p to every process p, and receiving one of shape ``shapes[p]``.

        They are sent as bytes, because not every backend supports every dtype.
        """
        dtype, width = tensors[0].dtype, tensors[0].element_size()
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
        num_sent = [tensor.numel() * width for tensor in tensors]
        num_received = [math.prod(shape) * width for shape in shapes]
        result = packed.new_empty(sum(num_received))
        exchange = getattr(self._group, "all_to_all_single", None) or self._group.alltoall_base

        def begin(sent: Tensor, received: Tensor) -> dist.Work:
            return exchange(
                received, sent, num_received, num_sent, _asynchronous(AllToAllOptions())
            )

        def unpacked() -> list[Tensor]:
            parts = result.split(num_received)
            return [
                part.view(dtype).view(*shape) for part, shape in zip(parts, shapes, strict=True)
            ]

        return self._exchange(packed, result, begin, unpacked)

    def broadcast(self, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Start sending a tensor from one process to all, in place.

        The tensor must have the same shape and dtype on every process.
        """
        options = _asynchronous(BroadcastOptions())
        options.rootRank = source

        def begin(_: Tensor, received: Tensor) -> dist.Work:
            return self._group.broadcast([received], options)

        return self._exchange(tensor, tensor, begin, lambda: tensor)

    def _exchange(
        self, sent: Tensor, received: Tensor, begin: Begin, result: Callable[[], T]
    ) -> Pending[T]:
        # Objects that no caller keeps: once they are freed, gloo has released the data (see drain).
        parts = [sent.detach(), received.detach()]
        work = self._watch.start(lambda: begin(*parts))
        self._last_exchanged = [weakref.ref(part) for part in parts]

        def finish() -> T:
            if sent.is_cuda:  # the stream waits, not this thread
                self._watch.order(work)
            else:
                self._watch.wait(work)
            return result()

        return Pending(finish, work.is_completed)

    def drain(self) -> None:
        """Wait, for a second at most, until gloo has released the last collective's tensors.

        An exchange is complete a moment before gloo's thread drops its tensors, for which it needs
        the interpreter's lock. Where the interpreter has ended by then, that aborts the process.
        """
        deadline = time.monotonic() + _DRAINING_SECONDS
        while (
            any(part() is not None for part in self._last_exchanged) and time.monotonic() < deadline
        ):
            time.sleep(_NAP_SECONDS)


def _asynchronous(options: Options) -> Options:
    """Let NCCL compute beside the current stream, which waits for it later."""
    options.asyncOp = True
    return options


class LocalCollectives:
    """The collectives of a single process."""

    def all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        return Pending(lambda: tensor[None])

    def all_to_all(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Pending[list[Tensor]]:
        return Pending(lambda: list(tensors))

    def broadcast(self, tensor: Tensor, source: int) -> Pending[Tensor]:
        return Pending(lambda: tensor)

    def drain(self) -> None:
        """Do nothing: there is nobody to wait for."""


class StagedCollectives(Collectives):
    """The same collectives for tensors on any device, over a gloo group that nothing else uses."""

    _previous: Future | None = None  # the exchange that the next one has to wait for

    def _exchange(
        self, sent: Tensor, received: Tensor, begin: Begin, result: Callable[[], T]
    ) -> Pending[T]:
        watch = self._watch
        previous = self._previous

        # Copy to CPU memory.
        copy_event = None
        sent_here = _host_memory(sent).copy_(sent, non_blocking=True)
        received_here = sent_here if received is sent else _host_memory(received)
        if sent.is_cuda:
            copy_event = torch.cuda.current_stream(sent.device).record_event()

        # Exchange in a thread, after the previous exchange.
        def run_staged() -> None:
            if previous is not None:
                wait_for_futures([previous])
            if copy_event is not None:
                copy_event.synchronize()
            wait_in_thread(begin(sent_here, received_here), watch)

        watch.require_whole()
        pending = in_thread(run_staged)
        self._previous = pending

        # Copy to the device when waited for.
        def finish() -> T:
            watch.wait(PendingCall(pending))
            received.copy_(received_here, non_blocking=True)
            return result()

        return Pending(finish, pending.done)


def wait_in_thread(work: dist.Work, watch: FailureWatch) -> None:
    """Wait, in a separate thread, until a collective is complete or the group is broken.

    Raises:
        RuntimeError: it failed, or was given up.
    """
    while not watch.is_broken:
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
            return
        except RuntimeError:
            if work.is_completed():
                # Raises its error, unless it only ran out of time just before the work was done.
                work.wait()
                return
    raise RuntimeError("the group is broken")


def _host_memory(like: Tensor) -> Tensor:
    """Allocate CPU memory, pinned if it is for a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
