"""CPU process group whose collectives are waited for in Python.

transformers' tensor parallelism runs its own collectives inside the model's layers. So that a
process which fails there does not block the other TP ranks of its host, these wait as a HostGroup
does: see :mod:`.failure_watch`.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName


class PolledWork(dist.Work):
    """A collective in a :class:`PolledGroup`."""

    def __init__(self, work: dist.Work, wait_for: Callable[[dist.Work], object]):
        super().__init__()
        self._work = work
        self._wait_for = wait_for

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class PolledGroup(dist.ProcessGroup):
    """A gloo group for other libraries' collectives.

    They are waited for as its HostGroup waits for its own.

    gloo itself waits for another process until a timeout, without checking whether it has failed.

    Attributes:
        wait_for: blocks until a collective is complete.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str):
        # torch's stub declares only the constructor with a store, which a subclass does not need.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = GroupName(name)
        self.wait_for: Callable[[dist.Work], object] = lambda work: work.wait()
        self._gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
        )

    def getBackendName(self) -> str:
        return "apbv_polled"

    @property
    def group_name(self) -> GroupName:
        return self._name

    def allreduce(self, *args) -> PolledWork:
        return PolledWork(self._gloo.allreduce(*args), self.wait_for)

    def allgather_into_tensor_coalesced(self, *args) -> PolledWork:
        return PolledWork(self._gloo.allgather_into_tensor_coalesced(*args), self.wait_for)

    def allgather(self, *args) -> PolledWork:
        return PolledWork(self._gloo.allgather(*args), self.wait_for)

    def broadcast(self, *args) -> PolledWork:
        return PolledWork(self._gloo.broadcast(*args), self.wait_for)
