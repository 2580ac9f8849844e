"""Launches of Triton kernels: their arguments have to be on the GPU; interpreted on what they
hold."""

import inspect
from contextlib import ExitStack
from threading import get_ident
from unittest.mock import patch

import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from .cuda import Cuda
from .tensors import GpuTensor, strip


class TritonLaunches:
    """Launches Triton's kernels on a machine.

    Attributes:
        cuda: knows the current device, to which Triton launches.
    """

    def __init__(self, cuda: Cuda):
        self.cuda = cuda
        self.machine = cuda.machine
        self._loaded: set[tuple] = set()

    def install(self, stack: ExitStack) -> None:
        """Put it in Triton's place until the stack is closed."""
        launcher_of = InterpretedFunction.__getitem__

        def launcher(function, grid):
            launch = launcher_of(function, grid) if self.machine.has_numbers else None
            return lambda *args, **kwargs: self._launch(function.fn, launch, grid, args, kwargs)

        stack.enter_context(patch.object(InterpretedFunction, "__getitem__", launcher))

    def _launch(self, function, launch, grid, args: tuple, kwargs: dict) -> None:
        machine = self.machine
        name = function.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        gpus = [x for x in tensors if isinstance(x, GpuTensor)]
        if not gpus:  # none of the machine's: a kernel that is tested on the CPU meanwhile
            launch(*args, **kwargs)
            return
        if len(gpus) < len(tensors):
            raise machine.refuse(f"{name}: an argument lies in host memory")
        if {x.device.index for x in gpus} != {self.cuda.current_device}:
            raise machine.refuse(f"{name}: its arguments are not on the current GPU")
        for tensor in gpus:
            # What a kernel writes is not known before it runs; what is received may not even be
            # read.
            machine.check_use(tensor.inner, False, name)
        args, kwargs = tree_map(strip, (args, kwargs))
        dtypes = tuple([x.dtype for x in tensors])
        variant = (name, _constants(function, kwargs), dtypes)
        graph = machine.capturing
        if graph is not None and graph.forbids(get_ident()):
            if variant not in self._loaded:
                graph.is_valid = False
                raise machine.refuse(
                    f"{name} is launched for the first time while a graph is captured"
                )
            if graph.thread == get_ident():
                graph.add_launch(launch, name, args, kwargs)
                return
        self._loaded.add(variant)
        if machine.has_numbers:
            with machine.interpreting, _disable_current_modes():
                launch(*args, **kwargs)
        machine.launched(
            "triton", name, [(x, False) for x in gpus], detail=grid, place=function.__module__
        )


def _constants(function, kwargs: dict) -> tuple[tuple[str, object], ...]:
    """Return the constants and options of a launch, for each of which Triton compiles a kernel."""
    parameters = inspect.signature(function).parameters
    constants = []
    for name, value in sorted(kwargs.items()):
        if name not in parameters or parameters[name].annotation is tl.constexpr:
            constants.append((name, value))
    return tuple(constants)
