"""The pretended machine: it runs every operator on GPU tensors, refuses what a GPU refuses, and
keeps the rest."""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from . import stand_ins
from .events import Event, Events, place_in_project
from .graphs import Graph
from .pinned import PinnedMemory
from .streams import Streams, Transfers
from .tensors import GpuError, GpuTensor, strip

# Operators without a kernel, beside those whose results alias an argument.
_NO_KERNEL = {
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", 
    "is_same_size", "sym_size", "sym_stride", "sym_numel", "lift_fresh", "record_stream",
    "_fused_sdp_choice",
}  # fmt: skip
# Operators whose result's shape depends on numbers, which the host has to know.
_SHAPED_BY_DATA = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal",
}  # fmt: skip
_INDEXING = {"index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_"}


class Machine:
    """A pretended machine with GPUs.

    Attributes:
        events: what the host asked of it.
        faults: what is wrong with that: what was refused, and what a GPU would have done wrong in
            silence.
        has_numbers: whether tensors have numbers; else they have only shapes, and every number read
            is 0, or 1.
        num_gpus: how many GPUs there are.
        streams, transfers, pinned: who may use which memory when.
        capturing: the graph that is being captured, if any.
        captured_in: the streams in which graphs were captured.
        captured_pools: the pools that the allocator takes for those of graphs being captured.
        interpreting: held while Triton interprets a kernel, which it can do one at a time.
    """

    def __init__(self, has_numbers: bool):
        self.has_numbers = has_numbers
        self.num_gpus = 8
        self.events = Events()
        self.faults = []
        self.streams, self.transfers, self.pinned = Streams(), Transfers(), PinnedMemory()
        self.capturing: Graph | None = None
        self.captured_in: set[int] = set()
        self.captured_pools: list[tuple] = []
        self.interpreting = threading.Lock()
        self._lock = threading.RLock()
        self._addresses: dict[int, int] = {}

    def reset(self) -> None:
        """Forget what has happened, but not what is under way."""
        self.events = Events()
        self.faults = []

    def mark(self, name: str, value: object = None) -> None:
        """Leave a mark among the events."""
        self.note("mark", name, detail=value)

    def note(
        self, kind: str, name: str, nbytes: int = 0, detail=None, group: str = "", place: str = ""
    ) -> None:
        if kind not in ("kernel", "triton", "in_graph", "mark"):
            place = place_in_project()
        self.events.append(Event(kind, name, nbytes, place, detail, group))

    def find(self, fault: str) -> None:
        self.faults.append(f"{fault}, at {place_in_project() or 'a place outside the project'}")

    def refuse(self, fault: str) -> GpuError:
        """Note a fault, which code may catch and hide, and return the error that a GPU's user
        gets."""
        self.find(fault)
        return GpuError(fault)

    def wait(self, what: str, moment=None) -> None:
        """Let the host wait for what is in the current stream, or for a moment of any stream."""
        self.forbid_in_capture(f"waits for the GPU ({what})")
        self.note("wait", what)
        self.streams.host_waits(self.streams.moment() if moment is None else moment)

    def forbid_in_capture(self, what: str) -> None:
        """Refuse what may not happen while a graph is captured, which then cannot be used."""
        graph = self.capturing
        if graph is not None and graph.forbids(threading.get_ident()):
            graph.is_valid = False
            raise self.refuse(f"the host {what} while a graph is captured")

    def read(self, tensor: GpuTensor, how: str) -> Tensor:
        """Return a GPU tensor's numbers to the host, which waits for them."""
        self.check_use(tensor.inner, False, how)
        self.wait(how)
        return self._numbers_of(tensor)

    def _numbers_of(self, tensor: GpuTensor) -> Tensor:
        """Return where a tensor's numbers are; without numbers zeros, or ones for integers and
        truth values."""
        if self.has_numbers:
            return tensor.inner
        return torch.full(tensor.shape, 0 if tensor.is_floating_point() else 1, dtype=tensor.dtype)

    def address(self, inner: Tensor) -> int:
        if inner.device.type != "meta":
            return inner.data_ptr()
        storage = inner.untyped_storage()._cdata
        start = self._addresses.setdefault(storage, (len(self._addresses) + 1) << 44)
        return start + inner.storage_offset() * inner.element_size()

    def check_use(self, inner: Tensor, is_written: bool, user: str) -> None:
        """Find what is wrong with a use of what an exchange may be using."""
        for fault in self.transfers.faults(inner, is_written, user):
            self.find(fault)

    def launch(self, reads: list[Tensor], writes: list[Tensor], user: str) -> None:
        """Put a kernel into the current stream, and find what is wrong with that."""
        graph = self.capturing
        if (
            graph is not None
            and graph.stream == self.streams.current
            and graph.thread != threading.get_ident()
        ):
            self.find(
                f"{user} goes into a graph that another thread captures in stream {graph.stream}"
            )
        for fault in self.streams.launch(reads, writes, user):
            self.find(fault)
        for fault in self.streams.freed_too_soon():
            self.find(fault)

    def run(self, func, args: tuple, kwargs: dict):
        """Run an operator of torch."""
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            return self.exchange(func, name, args, kwargs)
        with self._lock:
            return self._run(func, name, args, kwargs)

    def exchange(self, func, name: str, args: tuple, kwargs: dict):
        """Begin a collective; the module of NCCL's rules puts its own in this place."""
        raise self.refuse(f"{name}: there is no process group in this rehearsal")

    def _run(self, func, name: str, args: tuple, kwargs: dict):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        gpus = [x for x in tensors if isinstance(x, GpuTensor)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not gpus and (device is None or device.type != "cuda"):
            return self.pinned.run_on_host(self, func, name, args, kwargs)
        if name == "_local_scalar_dense":
            return func(self.read(args[0], "item"))
        if name == "_to_copy" and (device is not None and (device.type == "cpu" or not gpus)):
            return self._copy_across(func, args, kwargs, device)
        if name == "copy_" and len(gpus) == 1:
            return self._fill_across(*args, **kwargs)
        self._require_one_device(func, name, args, tensors, gpus, device)
        if self._needs_numbers(name, args, kwargs):
            self.wait(name)
        index = gpus[0].device.index if gpus else device.index or 0
        return self._compute(func, name, args, kwargs, index)

    def _compute(self, func, name: str, args: tuple, kwargs: dict, index: int):
        inner_args, inner_kwargs = tree_map(strip, (args, kwargs))
        if kwargs.get("device") is not None:
            if (
                torch.device(kwargs["device"]).type == "cpu"
            ):  # an empty tensor in host memory, like a GPU's
                return func(*inner_args, **inner_kwargs)
            inner_kwargs["device"] = torch.device("cpu" if self.has_numbers else "meta")
        if inner_kwargs.get("pin_memory"):
            raise self.refuse(f"{name}: only host memory can be pinned")
        if not self.has_numbers:  # numbers of the host among the arguments have none to meet
            inner_args, inner_kwargs = tree_map(
                lambda x: x.to("meta") if isinstance(x, Tensor) and x.dim() else x,
                (inner_args, inner_kwargs),
            )
        known = {id(x.inner): x for x in tree_leaves((args, kwargs)) if isinstance(x, GpuTensor)}
        runs_kernel = name not in _NO_KERNEL and not _is_view(func)
        used = list(_operands(func, args, kwargs)) if runs_kernel else []
        for tensor, is_written in used:
            self.check_use(tensor.inner, is_written, name)
        call = stand_ins.KERNELS.get(name, func)
        graph = self.capturing
        if graph is not None and graph.forbids(threading.get_ident()):
            if graph.thread != threading.get_ident() and not _is_view(func):
                raise self.refuse(
                    f"{name} in another thread while a graph is captured in mode 'global'"
                )
            out = graph.add(call, name, inner_args, inner_kwargs, _is_view(func), _writes(func))
        else:
            out = call(*inner_args, **inner_kwargs)
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in known]
        if not _is_view(func):
            is_ours = self.capturing is None or self.capturing.thread != threading.get_ident()
            for tensor in fresh:  # what is allocated while a graph is captured belongs to the graph
                self.streams.allocate(tensor, is_ours)
        if runs_kernel and any(
            x.numel() for x in tree_leaves((out, inner_args)) if isinstance(x, Tensor)
        ):
            self.launched("kernel", name, used, fresh)

        def wrap(x):
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else GpuTensor(x, index, self)

        return tree_map(wrap, out)

    def launched(self, kind: str, name: str, used: list, fresh: list[Tensor] = (), **noted) -> None:
        """Note a kernel that uses some tensors (each with whether it writes it) and fills fresh
        ones."""
        if self.capturing is not None and self.capturing.thread == threading.get_ident():
            return
        self.note(kind, name, **noted)
        reads = [tensor.inner for tensor, is_written in used if not is_written]
        writes = [tensor.inner for tensor, is_written in used if is_written] + list(fresh)
        self.launch(reads, writes, name)

    def _require_one_device(self, func, name, args, tensors, gpus, device) -> None:
        """Refuse operands on several devices, but for a host's single numbers and indices."""
        places = {x.device.index for x in gpus} | (
            {device.index} if device and device.type == "cuda" else set()
        )
        if len(places - {None}) > 1:
            raise self.refuse(f"{func}: its operands are on several GPUs, {sorted(places)}")
        hosts = [x for x in tensors if not isinstance(x, GpuTensor)]
        if not hosts or not gpus:
            return
        if name in _INDEXING and isinstance(args[0], GpuTensor):
            for x in hosts:
                self.note("to_gpu", "index", x.nbytes)
            self.wait("index from the host")
        elif any(x.dim() for x in hosts) or name in ("cat", "stack", "mm", "bmm", "addmm"):
            devices = ", ".join(f"{x.device} {tuple(x.shape)}" for x in tensors)
            raise self.refuse(f"{func}: its operands are on two devices ({devices})")

    def _needs_numbers(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Tell whether the host has to know numbers that are on the GPU before this can be
        launched."""
        if name == "repeat_interleave":
            return isinstance(args[0], GpuTensor) and kwargs.get("output_size") is None
        if name in _INDEXING:
            masks = (torch.bool, torch.uint8)
            return any(
                isinstance(x, GpuTensor) and x.dtype in masks for x in args[1] if x is not None
            )
        return name in _SHAPED_BY_DATA

    def _copy_across(self, func, args: tuple, kwargs: dict, device: torch.device):
        """Copy a tensor from the host to a GPU, or back."""
        source = args[0]
        is_blocking = not kwargs.get("non_blocking")
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("non_blocking", "device")
        }
        if device.type == "cuda":
            self._note_to_gpu(source, is_blocking)
            inner = func(source, *args[1:], **kwargs)
            inner = inner if self.has_numbers else inner.to("meta")
            self.streams.allocate(inner)
            return GpuTensor(inner, device.index or 0, self)
        numbers = self._to_host(source, is_blocking)
        copied = func(numbers, *args[1:], **kwargs)
        if is_blocking:
            return copied
        self.pinned.add(copied)  # torch pins what it copies to without blocking
        return self._fill_later(copied, copied.clone())

    def _fill_across(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between tensors of which one is in host memory."""
        if isinstance(target, GpuTensor):
            self._note_to_gpu(source, not non_blocking)
            self.check_use(target.inner, True, "copy_")
            with _disable_current_modes():
                if self.has_numbers:
                    target.inner.copy_(source)
            self.launch([], [target.inner], "copy_")
            return target
        is_blocking = not (non_blocking and target in self.pinned)
        numbers = self._to_host(source, is_blocking)
        if is_blocking:
            return target.copy_(numbers)
        return self._fill_later(target, numbers.clone())

    def _note_to_gpu(self, source: Tensor, is_blocking: bool) -> None:
        self.forbid_in_capture("copies from host memory")
        self.note("to_gpu", "copy", source.nbytes)
        self.launch([], [], "copy")
        if is_blocking and source.numel():
            self.wait("copy from the host")
        elif source in self.pinned:
            self.pinned.is_read_until(source, self.streams.moment())

    def _to_host(self, source: GpuTensor, is_blocking: bool) -> Tensor:
        self.forbid_in_capture("copies to host memory")
        self.note("to_host", "copy", source.nbytes)
        self.check_use(source.inner, False, "copy to the host")
        self.launch([source.inner], [], "copy to the host")
        if is_blocking:
            self.wait("copy to the host")
        return self._numbers_of(source)

    def _fill_later(self, target: Tensor, numbers: Tensor) -> Tensor:
        """Fill host memory once the host has waited for it; until then it holds what nobody can
        want."""
        spoil(target)
        self.streams.later(lambda: target.copy_(numbers))
        return target


class Dispatch(TorchDispatchMode):
    """Hands every operator of a thread to the machine, also those that only make a tensor on a
    GPU."""

    def __init__(self, machine: Machine):
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._machine.run(func, args, kwargs or {})


def spoil(tensor: Tensor) -> None:
    """Fill a tensor with what nobody can want: NaN, or a number far below zero."""
    with _disable_current_modes():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_view(func) -> bool:
    """Tell whether an operator's results alias its arguments without being written: it runs no
    kernel."""
    if func._schema.name == "aten::_unsafe_view":  # whose schema does not say so
        return True
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _writes(func) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _operands(func, args: tuple, kwargs: dict) -> Iterator[tuple[GpuTensor, bool]]:
    """Yield the GPU tensors among an operator's arguments, and whether it writes each."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, GpuTensor):
                yield tensor, is_written
