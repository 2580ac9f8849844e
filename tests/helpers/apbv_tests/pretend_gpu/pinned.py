"""Host memory that copies run to and from while the host goes on."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from .streams import Moment


class PinnedMemory:
    """Which host memory is pinned, and which of it a GPU may still be reading."""

    def __init__(self) -> None:
        self._pinned: dict[int, StorageWeakRef] = {}
        self._read: list[tuple[StorageWeakRef, Moment]] = []

    def add(self, tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._pinned = {key: ref for key, ref in self._pinned.items() if not ref.expired()}
        self._pinned[reference.cdata] = reference
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        reference = self._pinned.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def is_read_until(self, tensor: Tensor, moment: Moment) -> None:
        """Remember that a copy to a GPU reads pinned memory until the GPU has come to a moment."""
        self._read.append((StorageWeakRef(tensor.untyped_storage()), moment))

    def run_on_host(self, machine, func, name: str, args: tuple, kwargs: dict):
        """Run an operator on host memory; pinned memory may not be written while a GPU reads it."""
        if kwargs.get("pin_memory"):
            return self.add(func(*args, **{**kwargs, "pin_memory": False}))
        if self._read:
            arguments = zip(func._schema.arguments, args, strict=False)
            written = [
                value
                for a, value in arguments
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for tensor in tree_leaves(written):
                if isinstance(tensor, Tensor) and self._is_being_read(tensor, machine.streams):
                    machine.find(
                        f"{name} writes pinned memory that a copy to the GPU may still read"
                    )
        return func(*args, **kwargs)

    def _is_being_read(self, tensor: Tensor, streams) -> bool:
        self._read = [
            (ref, at)
            for ref, at in self._read
            if not ref.expired() and not streams.host_is_behind(at)
        ]
        storage = tensor.untyped_storage()._cdata
        return any(ref.cdata == storage for ref, _ in self._read)
