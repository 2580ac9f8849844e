"""A rehearsal: inside it this process has GPUs that are not there."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from .cuda import Cuda
from .machine import Dispatch, Machine
from .nccl import Nccl
from .tensors import GpuError, allow_gpu_tensors
from .triton_launches import TritonLaunches


@contextmanager
def rehearsal(has_numbers: bool = True) -> Iterator[Machine]:
    """Pretend that this process has GPUs, in this thread and in those that are started meanwhile.

    Args:
        has_numbers: whether tensors have numbers; else only shapes, for sizes that fit no memory.

    Raises:
        GpuError: at the end: something was refused, and the error hidden, or a fault that a GPU
            would not notice.
    """
    allow_gpu_tensors()
    machine = Machine(has_numbers)
    cuda = Cuda(machine)
    run_thread = threading.Thread.run

    def run(thread) -> None:
        with _dispatching(machine):
            run_thread(thread)

    with ExitStack() as stack:
        stack.callback(_forget_devices)
        cuda.install(stack)
        Nccl(machine).install(stack)
        TritonLaunches(cuda).install(stack)
        stack.enter_context(patch.object(threading.Thread, "run", run))
        stack.enter_context(_dispatching(machine))
        # Module.to() is to exchange the parameters themselves, and not only what they hold.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        _forget_devices()
        yield machine
    if machine.faults:
        counted = Counter(machine.faults)
        raise GpuError("\n".join(f"{text} ({count} times)" for text, count in counted.items()))


@contextmanager
def _dispatching(machine: Machine) -> Iterator[None]:
    """Hand this thread's operators to a machine."""
    # So that torch.tensor(..., device="cuda") makes a tensor on the CPU and copies it.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Dispatch(machine):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _forget_devices() -> None:
    """Clear what the project's functions remember of devices: the pretended ones are others than
    the real ones."""
    for name, module in list(sys.modules.items()):
        if name.startswith("apbv."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith(
                    "apbv."
                ):
                    value.cache_clear()
