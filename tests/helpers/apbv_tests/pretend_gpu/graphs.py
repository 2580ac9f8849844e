"""CUDA graphs: ``torch.cuda.CUDAGraph``, with the rules of capture.

In a rehearsal the usual code works: ``torch.cuda.CUDAGraph``, ``torch.cuda.graph``,
``torch.cuda.graph_pool_handle`` and ``torch.cuda.is_current_stream_capturing``. What differs from
code that runs outside of a graph is checked:

- While a graph is captured nothing runs. Results made meanwhile hold NaN (integers 0) until the
  first replay, and buffers from outside keep what they hold.
- The host may not wait, copy from or to host memory, begin an exchange, or launch a Triton kernel
  that has not run before (it would be compiled and loaded). In the default mode, ``"global"``,
  other threads may neither.
- :meth:`Graph.replay` runs the same kernels on the same memory: what was a tensor in host memory, a
  number in Python, or an address at capture is what it was then. Memory from outside that has been
  freed since is a fault.
- A replay is one launch, an event ``"replay"``; its kernels are events ``"in_graph"``.

::

    with rehearsal() as gpu:
        step = GraphedStep(...)   # captures by torch.cuda.graph
        gpu.reset()
        step.replay()
        assert gpu.events.num_launches == 1 and not gpu.events.waits
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class _Outside:
    """A tensor that a graph uses and does not own: a graph keeps an address, and no memory
    alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple  # the offset, the shape and the strides

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outside":
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, layout)

    def tensor(self) -> Tensor | None:
        """Return it, if its memory has not been freed."""
        gone = self.storage.expired()
        storage = None if gone else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)


# One kernel of a graph: a call, and the tensors that its results go to.
_Node = namedtuple("_Node", "name kind call args kwargs out")


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``; :class:`.cuda.Cuda` gives it its machine.

    Attributes:
        thread, stream: which ones capture.
        is_valid: whether it can be replayed: nothing forbidden happened during capture.
    """

    machine = None

    def __init__(self, keep_graph: bool = False):
        self._nodes: list[_Node] = []
        self._own: set[int] = set()
        self._has_ended = False
        self._mode = "global"
        self._pool = (id(self), 0)
        self.thread = 0
        self.stream = 0
        self.is_valid = True

    def forbids(self, thread: int) -> bool:
        """Tell whether its capture forbids what is unsafe in this thread."""
        return thread == self.thread if self._mode != "global" else True

    def capture_begin(self, pool=None, capture_error_mode: str = "global", **options) -> None:
        machine = self.machine
        if machine.streams.current == 0:
            raise machine.refuse("a graph cannot be captured in the default stream")
        if machine.capturing is not None:
            raise machine.refuse("another graph is being captured")
        self._pool, self._mode, self.thread = pool or self._pool, capture_error_mode, get_ident()
        self.stream = machine.streams.current
        machine.captured_in.add(self.stream)
        machine.capturing = self
        machine.captured_pools.append(self._pool)

    def capture_end(self) -> None:
        self.machine.capturing = None
        if not self.is_valid:  # then PyTorch 2.11 does not tell its allocator
            raise self.machine.refuse(
                "the graph is invalid: something was forbidden while it was captured"
            )
        self.machine.captured_pools.remove(self._pool)
        self._has_ended = True

    def add(self, call, name: str, args: tuple, kwargs: dict, is_view: bool, writes: bool):
        """Add a call to the graph, and return what its results will be in."""
        # An operator that writes an argument returns it.
        out = kwargs.get("out", args[0]) if writes else call(*args, **kwargs)
        if is_view:
            return out
        if not writes:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    self._own.add(tensor.untyped_storage()._cdata)
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        if "empty" not in name:
            self._nodes.append(
                _Node(name, "kernel", call, *self._let_go((args, kwargs)), None if writes else out)
            )
        return out

    def add_launch(self, launch: Callable, name: str, args: tuple, kwargs: dict) -> None:
        """Add a launch of a Triton kernel to the graph."""
        self._nodes.append(_Node(name, "triton", launch, *self._let_go((args, kwargs)), None))

    @torch.no_grad()
    def replay(self) -> None:
        """Run the graph's kernels again, on what their memory holds now."""
        machine = self.machine
        if not self._has_ended:
            raise machine.refuse("a graph is replayed whose capture has not ended")
        machine.forbid_in_capture("replays another graph")
        machine.note("replay", "graph")
        captured = machine.streams.priority_of(self.stream)
        now = machine.streams.priority_of(machine.streams.current)
        if captured != now:  # its kernels keep the priority that they were captured with
            machine.find(
                f"a graph captured at priority {captured} is replayed in a stream of priority {now}"
            )
        with _disable_current_modes():
            for node in self._nodes:
                machine.note("in_graph", node.name, detail=node.kind)
                if not machine.has_numbers:
                    continue
                args, kwargs = tree_map(self._find, (node.args, node.kwargs))
                self._note_uses(node, args, kwargs)
                if node.kind == "triton":
                    with machine.interpreting:
                        node.call(*args, **kwargs)
                    continue
                result = node.call(*args, **kwargs)
                if node.out is not None:
                    for target, value in zip(
                        tree_leaves(node.out), tree_leaves(result), strict=True
                    ):
                        if isinstance(target, Tensor):
                            target.copy_(value)

    def _let_go(self, arguments: tuple) -> tuple:
        """Keep of tensors from outside only where they lie."""

        def one(value):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._own:
                return _Outside.of(value) if value.dim() or value.device.type != "cpu" else value
            return value

        return tree_map(one, arguments)

    def _find(self, value):
        if not isinstance(value, _Outside):
            return value
        tensor = value.tensor()
        if tensor is None:
            raise self.machine.refuse("a graph uses memory that was freed after capture")
        return tensor

    def _note_uses(self, node: _Node, args: tuple, kwargs: dict) -> None:
        """Check the use of the memory by the current stream, as that of any kernel."""
        machine = self.machine
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(node.out) if isinstance(x, Tensor)]
        writes = outs if node.out is not None else tensors[:1]
        for tensor in tensors:
            machine.check_use(tensor, any(tensor is x for x in writes), node.name)
        machine.launch(tensors, writes, node.name)
