"""Moves a few numbers between the host and a GPU without making either wait; hands out a GPU's side streams."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def side_stream(device: torch.device, purpose: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream that a GPU has for one purpose.

    PyTorch has 32 of a priority, and hands them out again and again: who took one for every video would soon share
    it with a graph that is being recorded.

    Args:
        priority: -1 comes before 0 where kernels wait for a processor.
    """
    return torch.cuda.Stream(device, priority)


def to_device(values: Tensor | Sequence, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers of the host to a device; a GPU gets them after the work that it already has to do.

    A tensor that lies on the device is returned as it is. Without pinned memory a copy could wait for the GPU.

    Args:
        dtype: of the result; None: that of the tensor, or what torch makes of the values.
    """
    values = torch.as_tensor(values, dtype=dtype)
    if values.is_cuda or device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def fill(tensor: Tensor, values: Tensor | Sequence) -> None:
    """Overwrite a tensor where it lies by numbers of the host, without a wait, as :func:`to_device` does."""
    values = torch.as_tensor(values, dtype=tensor.dtype)
    tensor.copy_(values.pin_memory() if tensor.is_cuda and not values.is_cuda else values, non_blocking=True)


def fetch(numbers: Tensor, wait: Callable[[torch.cuda.Event], None] | None = None) -> Callable[[], list]:
    """Start to copy numbers to the host; the returned function waits for that copy alone, and returns a list.

    What a GPU is given to do in between goes on while the caller already reads the numbers.

    Args:
        wait: waits until a GPU has come to an event, such as :meth:`apbv.HostGroup.wait_for_device`.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    copied = numbers.to("cpu", non_blocking=True)  # to pinned memory
    event = torch.cuda.current_stream(numbers.device).record_event()

    def read() -> list:
        event.synchronize() if wait is None else wait(event)
        return copied.tolist()

    return read
