"""A GPU that is not there: a rehearsal of the CUDA and NCCL paths on a CPU.

Inside :func:`rehearsal` tensors can lie on ``cuda:0``, ``cuda:1``, and so on. They hold their
numbers on the CPU, where every operator runs; Triton's kernels are interpreted. So the same answers
have to come out as on the CPU. Besides:

- What a GPU, its driver or NCCL refuses is refused by a :class:`GpuError`: operands on two devices,
  ``.numpy()``, host memory given to a kernel or to NCCL, a launch to another than the current
  device, …
- What goes wrong there in silence is found: a buffer used before its exchange was awaited, memory
  used by two streams of which none waits for the other, host memory read before its copy has come.
  The rehearsal fails at its end with every such fault.
- What the host does is kept in order (:class:`Events`): launches by name, waits for the GPU and
  copies by place in the code, exchanges by size.
- ``torch.cuda.CUDAGraph`` works, with the rules of capture: see :mod:`.graphs`.

It cannot tell how fast anything is, what a compiled kernel computes, or what NCCL does inside.
"""

from .events import Events
from .machine import Machine
from .nccl import GLOO, GLOO_AND_NCCL, assert_same_order, callers_group
from .rehearsal import rehearsal
from .tensors import GpuError, GpuTensor, to_gpu

__all__ = [
    "GLOO",
    "GLOO_AND_NCCL",
    "Events",
    "GpuError",
    "GpuTensor",
    "Machine",
    "assert_same_order",
]
__all__ += ["callers_group", "rehearsal", "to_gpu"]
