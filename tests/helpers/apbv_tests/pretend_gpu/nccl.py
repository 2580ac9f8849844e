"""NCCL's rules, on exchanges that gloo makes.

A process group with an NCCL back end can be made in a rehearsal, by ``new_group`` or
``init_process_group("cpu:gloo,cuda:nccl")``. Its exchanges of GPU memory travel over gloo. Refused
are host tensors where NCCL alone is there, tensors of both kinds, and tensors that are not
contiguous. Faults are: buffers that are touched before the exchange is waited for, and a group that
a thread uses while another thread's exchange in it is under way.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .events import Event, Events, place_in_project
from .machine import Machine
from .tensors import GpuTensor, strip

# Arguments that an exchange fills.
_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")
_RECEIVED = ("output", "output_tensor", "output_tensors", "outputs")


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """Stands for NCCL's back end."""

    class Options:
        """What NCCL's groups can be told."""

        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)

    _made: ClassVar[list["ProcessGroupNCCL"]] = []

    def __init__(self, store, rank: int, size: int, options: "ProcessGroupNCCL.Options"):
        super().__init__(store, rank, size, options._timeout)
        # What is held in C++ alone is no more than gloo's, when it comes back.
        self._made.append(self)

    def abort(self) -> None:
        """Do nothing: gloo's exchanges end by their limits."""

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name="SUCCESS")


class Nccl:
    """Runs a machine's collectives.

    Attributes:
        machine: the machine.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        # Under way: the Work, its name, number, group and thread.
        self._works: dict[int, tuple] = {}
        self._users: dict[str, Counter] = {}  # of each group: exchanges under way, by thread
        self._number = 0

    def install(self, stack: ExitStack) -> None:
        """Put the stand-ins in place until the stack is closed."""
        self.machine.exchange = self._exchange
        stack.enter_context(patch.object(c10d, "_NCCL_AVAILABLE", True))
        stack.enter_context(patch.object(c10d, "ProcessGroupNCCL", ProcessGroupNCCL, create=True))
        stack.enter_context(patch.object(dist, "ProcessGroupNCCL", ProcessGroupNCCL, create=True))
        wait = dist.Work.wait

        def waited(work, *args):
            if began := self._works.get(id(work)):
                self._await(work, began, bool(args))
            return wait(work, *args)

        stack.enter_context(patch.object(dist.Work, "wait", waited))

    def _exchange(self, func, name: str, args: tuple, kwargs: dict):
        machine = self.machine
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
        has_nccl = isinstance(_backend(group, _CUDA), ProcessGroupNCCL)
        has_gloo = not isinstance(_backend(group, _CPU), (type(None), ProcessGroupNCCL))
        kinds = {isinstance(x, GpuTensor) for x in tensors}
        nbytes = sum(x.nbytes for x in tensors)
        if len(kinds) > 1:
            raise machine.refuse(f"{name} of GPU and host tensors")
        if kinds != {True}:
            if has_nccl and not has_gloo:
                raise machine.refuse(f"{name} of host tensors in a group that has NCCL only")
            machine.note("host_collective", name, nbytes, group=group.group_desc)
            return func(*args, **kwargs)
        if not has_nccl:
            raise machine.refuse(
                f"{name} of GPU tensors in a group without NCCL ({group.group_desc})"
            )
        if not all(x.is_contiguous() for x in tensors):
            raise machine.refuse(f"{name} of tensors that are not contiguous")
        if len({x.device for x in tensors}) > 1:
            raise machine.refuse(f"{name} of tensors on several GPUs")
        machine.forbid_in_capture(f"begins an exchange ({name})")
        if {thread for thread, count in self._users.get(group.group_desc, {}).items() if count} - {
            get_ident()
        }:
            machine.find(
                f"{name} in group {group.group_desc} while another thread's exchange in it is "
                "under way"
            )
        if not has_gloo:  # what stands for GPU memory is host memory
            group._register_backend(
                _CPU, dist.ProcessGroup.BackendType.NCCL, group._get_backend(_CUDA)
            )
        return self._begin(func, name, args, kwargs, nbytes, group.group_desc)

    def _begin(self, func, name: str, args: tuple, kwargs: dict, nbytes: int, group: str):
        machine = self.machine
        operands = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            receives = argument.name in _RECEIVED or (
                name in ("broadcast_", "allreduce_") and i == 0
            )
            operands += [(t, receives) for t in tree_leaves(value) if isinstance(t, GpuTensor)]
        for tensor, receives in operands:
            machine.check_use(tensor.inner, receives, name)
        # NCCL's kernels come behind the stream that they are begun in, and read what that has
        # written.
        reads = [tensor.inner for tensor, receives in operands if not receives]
        machine.launch(reads, [], name)
        known = {id(tensor.inner): tensor for tensor, _ in operands}
        self._number += 1
        machine.note("collective", name, nbytes, self._number, group)
        inner_args, inner_kwargs = tree_map(strip, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        work = next(x for x in tree_leaves(out) if isinstance(x, torch.ScriptObject))
        work = dist.Work.unbox(work)
        for tensor, receives in operands:
            machine.transfers.begin(tensor.inner, receives, work, place_in_project())
        self._works[id(work)] = work, name, self._number, group, get_ident()
        self._users.setdefault(group, Counter())[get_ident()] += 1
        return tree_map(lambda x: known.get(id(x), x), out)

    def _await(self, work, began: tuple, by_host: bool) -> None:
        _, name, number, group, thread = began
        machine = self.machine
        del self._works[id(work)]
        self._users[group][thread] -= 1
        if by_host:  # with a limit NCCL blocks the host until the exchange is complete
            machine.wait(name)
        machine.note("await", name, detail=number, group=group)
        machine.transfers.end(work)


def _backend(group: dist.ProcessGroup, device: torch.device):
    """Return a group's backend for a kind of device; None if it has none."""
    return group._get_backend(device) if device in group._device_types else None


def callers_group(like: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta, backend: str):
    """Make a process group as a caller of the library would by ``new_group``; collective over its
    members.

    They alone take part, and not all processes of the world.

    Args:
        like: a group of the same processes, in whose store no others meet.
        ranks: theirs in the world.
        backend: :data:`GLOO` or :data:`GLOO_AND_NCCL`.
    """
    options = {"pg_options": like.get_group_store(), "use_local_synchronization": True}
    with _disable_current_modes():
        return dist.new_group(
            list(ranks), timeout, backend, group_desc=f"{like.group_desc}, {backend}", **options
        )


def _make_group(asked, place: dist.Store, has_nccl: bool) -> dist.ProcessGroup:
    rank = asked.group_rank
    size = asked.group_size
    group = dist.ProcessGroup(place, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("again", place), rank, size, asked.timeout)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    if has_nccl:
        options = ProcessGroupNCCL.Options()
        options._timeout = asked.timeout
        nccl = ProcessGroupNCCL(dist.PrefixStore("nccl", place), rank, size, options)
        group._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, nccl)
    return group


GLOO = "gloo_alone"
GLOO_AND_NCCL = "gloo_and_nccl"
for _name, _has_nccl in ((GLOO, False), (GLOO_AND_NCCL, True)):
    _make = partial(_make_group, has_nccl=_has_nccl)
    dist.Backend.register_backend(
        _name, _make, extended_api=True, devices=["cpu", "cuda"][: 1 + _has_nccl]
    )


def assert_same_order(ranks: Sequence[Events]) -> None:
    """Make sure that any two ranks begin the exchanges of the groups that both are in, in the same
    order.

    NCCL matches exchanges by their order alone: another order is a hang, or wrong numbers.

    Raises:
        AssertionError: the order, an operator or a size differs.
    """
    groups_of_ranks = []
    for events in ranks:
        groups_of_ranks.append({event.group for event in events.of("collective")})
    for rank in range(len(ranks)):
        for other in range(rank):
            shared = groups_of_ranks[rank] & groups_of_ranks[other]
            order = _order_in(shared, ranks[rank])
            assert order == _order_in(shared, ranks[other]), (
                f"ranks {other} and {rank} begin exchanges in another order"
            )


def _order_in(groups: set[str], events: Events) -> list[tuple[str, str, int]]:
    """The signatures of a rank's exchanges in some groups, in order."""
    exchanges = events.of("collective")
    return [_signature(event) for event in exchanges if event.group in groups]


def _signature(event: Event) -> tuple[str, str, int]:
    """An exchange's group, operator, and size where it has to be the same on all ranks."""
    return event.group, event.name, 0 if event.name.startswith("alltoall") else event.nbytes
