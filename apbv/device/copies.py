"""Numbers in ranges, asynchronous copies of a few numbers between CPU and GPU, and side streams."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..pending import Pending


def numbers_in(*ranges: range) -> Tensor:
    """Return the numbers in some ranges, one range after the other, int64 in CPU memory."""
    return torch.cat(
        [
            torch.empty(0, dtype=torch.long),
            *(torch.arange(each.start, each.stop) for each in ranges),
        ]
    )


@cache
def side_stream(device: torch.device, purpose: str, priority: int = 0) -> torch.cuda.Stream:
    """Return a GPU's stream for one purpose.

    PyTorch has a pool of 32 per priority and reuses them: a new stream for every video would soon
    be the one on which a graph is being captured.

    Args:
        priority: -1 comes before 0 where kernels wait for a processor.
    """
    return torch.cuda.Stream(device, priority)


def to_device(
    values: Tensor | Sequence, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy numbers from the CPU to a device; on a GPU the copy is queued after earlier work.

    A tensor that is already on the device is returned as it is. Without pinned memory a copy could
    wait for the GPU.

    Args:
        dtype: of the result; None: that of the tensor, or what torch makes of the values.
    """
    values = torch.as_tensor(values, dtype=dtype)
    if values.is_cuda or device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def fill(tensor: Tensor, values: Tensor | Sequence) -> None:
    """Overwrite a tensor in place with CPU numbers, without synchronization.

    This copies as :func:`to_device` does.
    """
    values = torch.as_tensor(values, dtype=tensor.dtype)
    tensor.copy_(
        values.pin_memory() if tensor.is_cuda and not values.is_cuda else values, non_blocking=True
    )


def fetch(numbers: Tensor, wait: Callable[[torch.cuda.Event], None] | None = None) -> Pending[list]:
    """Start a copy of numbers to the CPU, where they arrive as a list.

    Only that copy is waited for. GPU work queued in between continues while the caller already
    reads the numbers.

    Args:
        wait: waits until a GPU has come to an event, such as
            :meth:`apbv.HostGroup.wait_for_device`.
    """
    if not numbers.is_cuda:
        return Pending(numbers.tolist)
    copied = numbers.to("cpu", non_blocking=True)  # to pinned memory
    event = torch.cuda.current_stream(numbers.device).record_event()

    def read() -> list:
        event.synchronize() if wait is None else wait(event)
        return copied.tolist()

    return Pending(read, event.query)
