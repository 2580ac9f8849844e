"""How many bytes of tensors are in memory at once while something runs, whatever allocates them.

With tensors that have a shape but no storage (torch's FakeTensorMode) it counts prefills of any length in seconds.
"""

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def _tensors(tree) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


class LiveTensors(TorchDispatchMode):
    """Counts the storages that were made since this mode is on; of the thread that it is on in.

    Attributes:
        peak: the most bytes that were in memory at once.
    """

    def __init__(self):
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, torch.Size]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False  # what has no numbers has nothing that a branch is for, such as rows that see no key
        out = function(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), tensor.shape)
        self.peak = max(self.peak, self.now)
        return out

    @property
    def now(self) -> int:
        """The bytes that are in memory now."""
        return sum(num_bytes for _, num_bytes, _ in self._living())

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes with which the storages were made that are in memory now."""
        return [tuple(shape) for _, _, shape in self._living()]

    def _living(self):
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return self._made.values()
