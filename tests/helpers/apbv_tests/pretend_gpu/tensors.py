"""Tensors that say they lie on a GPU, and hold their numbers on the CPU, or nowhere where they
would not fit."""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .machine import Machine

# Places in torch's table of device guards, by c10::DeviceType.
_CUDA = 1
_META = 14
_TABLE = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


class GpuError(RuntimeError):
    """A GpuError says what a GPU, its driver or NCCL would refuse."""


def allow_gpu_tensors() -> None:
    """Let torch handle tensors that say they are on a GPU, where there is none.

    Whatever changes the current device around an operator asks a table for the device's guard. The
    place of CUDA's is empty in a torch without CUDA, and else has one that asks the driver. The
    guard of the meta device does nothing, which is what is wanted here.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _TABLE)
    guards[_CUDA] = guards[_META]


class GpuTensor(Tensor):
    """A GpuTensor says that it lies on a GPU; every operator on it is run by its machine.

    Attributes:
        inner: where its numbers are.
        machine: the pretended machine.
    """

    inner: Tensor
    machine: "Machine"

    @staticmethod
    def __new__(cls, inner: Tensor, index: int, machine: "Machine"):
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        options = {
            "dtype": inner.dtype,
            "layout": inner.layout,
            "device": torch.device("cuda", index),
        }
        self = Tensor._make_wrapper_subclass(cls, inner.size(), **place, **options)
        self.inner = inner
        self.machine = machine
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        machine = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, GpuTensor)).machine
        return machine.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.machine.address(self.inner)

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self) -> list:
        return self.machine.read(self, "tolist").tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert a GPU's tensor to numpy: copy it to host memory first")

    def __repr__(self) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo):
        with _disable_current_modes():
            return GpuTensor(self.inner.clone(), self.device.index, self.machine)


def strip(value):
    """Return a tensor as where its numbers are, and anything else as it is."""
    return value.inner if isinstance(value, GpuTensor) else value


def to_gpu(model: nn.Module, machine: "Machine", index: int = 0) -> nn.Module:
    """Put a model's parameters and buffers on a GPU, in place, without counting it as copies."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = GpuTensor(tensor.detach(), index, machine)
    return model
