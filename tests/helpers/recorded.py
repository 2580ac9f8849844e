"""CUDA graphs without a GPU: what is recorded is called again, and has to do the same at the same addresses."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from apbv.decode import graphs
from apbv.kernels import BufferTable
from apbv.model import attention
from apbv.model import parts as model_parts
from apbv.model.parts import ModelParts


class Operations(TorchDispatchMode):
    """Logs every operation: its numbers, and of every tensor its shape, its strides, and where it lies.

    A tensor that the same function has made lies wherever the allocator puts it: a graph has memory of its own.
    """

    def __init__(self):
        super().__init__()
        self.log, self._made = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for a number"
        result = func(*args, **(kwargs or {}))
        self.note(str(func), (args, kwargs), result)
        return result

    def note(self, name: str, arguments, result) -> None:
        leaves = tree_leaves(tree_map(_opened, arguments))
        self.log.append((name, *(self._described(each) for each in leaves)))
        used = {self._place(each) for each in leaves if isinstance(each, torch.Tensor)}
        self._made |= {self._place(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)} - used

    def _described(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        place = self._place(value)
        where = "own" if place in self._made else place
        return where, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype

    @staticmethod
    def _place(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()


class Repeater:
    """Stands in for GraphRecorder on a CPU; counts what is repeated."""

    def __init__(self, repeated: list[int], device: torch.device):
        self._repeated = repeated

    def record(self, function):
        recorded = []

        def replay():
            operations = Operations()

            def noted(operator):
                def call(*args, **kwargs):
                    with _disable_current_modes():
                        result = operator(*args, **kwargs)
                    operations.note(operator.__name__, (args, kwargs), result)
                    return result

                return call

            # On a GPU each of these is one kernel. On a CPU they read the number of keys, and look for NaN.
            names = "verify_attention", "merge_states", "batch_decode_attention"
            kernels = {name: noted(getattr(attention, name)) for name in names}
            with patch.multiple(attention, **kernels), operations:
                result = function()
            recorded.append(operations.log)
            assert operations.log == recorded[0], first_difference(recorded[0], operations.log)
            self._repeated.append(len(result))
            return result.clone()

        return replay


def _opened(value):
    """A table's tensors, which operators take as one argument."""
    return vars(value) if isinstance(value, BufferTable) else value


def first_difference(one: list, other: list) -> str:
    return next((f"{a} became {b}" for a, b in zip(one, other, strict=False) if a != b), "operations are missing")


@contextmanager
def recorded_on_a_cpu():
    """Let models on a CPU record their steps as on a GPU; yields the rows of logits of every repeated step."""
    repeated: list[int] = []

    with (
        patch.object(ModelParts, "wants_graphs", property(lambda parts: parts.decode.cuda_graphs == "auto")),
        patch.object(graphs, "why_not_captured", lambda parts, hosts: hosts and "the KV lies in shares"),
        patch.object(graphs, "GraphRecorder", partial(Repeater, repeated)),
        # Interpreted, a fused kernel is many operations, at addresses of the interpreter's own.
        patch.object(model_parts, "with_fused_kernels", lambda decoder, *_: decoder),
    ):
        yield repeated
