"""Data exchanges over one process group."""

import math
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, HostError, describe_error
from .failure_watch import FailureWatch

_DRAINING_SECONDS = 1.0
_NAP_SECONDS = 1e-3


class Collectives:
    """The exchanges of one torch.distributed group, with the failures of its processes watched for.

    Args:
        group: the group, of N processes; None where this process is alone and exchanges nothing.
        watch: starts the exchanges and waits for them.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: FailureWatch):
        self._group, self._watch = group, watch
        self._last_gathered: list[weakref.ref[Tensor]] = []

    def all_gather(self, tensor: Tensor) -> Exchange:
        """Start gathering one contiguous tensor of the same shape from every process, to ``[N, *shape]``."""
        result = tensor.new_empty(dist.get_world_size(self._group), *tensor.shape)
        parts = result.flatten().detach(), tensor.flatten().detach()  # new objects, which no caller keeps
        work = self._watch.start(lambda: gather_into(self._group, *parts))
        self._last_gathered = [weakref.ref(part) for part in parts]

        def finish() -> Tensor:
            self._wait(work, tensor)
            return result

        return Exchange(finish, work.is_completed)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:
        """Start sending tensor p to every process p and receiving one of shape ``shapes[p]`` from it."""
        parcel = Parcel(tensors, shapes)
        received = parcel.sent.new_empty(parcel.num_received)
        work = self._watch.start(lambda: swap_into(self._group, received, parcel.sent, parcel))

        def finish() -> list[Tensor]:  # the parcel holds what is being sent alive until it is sent
            self._wait(work, received)
            return parcel.unpacked(received)

        return Exchange(finish, work.is_completed)

    def broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor from one process to all, in place; shape and dtype are the same everywhere."""
        work = self._watch.start(
            lambda: dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        )

        def finish() -> Tensor:
            self._wait(work, tensor)
            return tensor

        return Exchange(finish, work.is_completed)

    def drain(self) -> None:
        """Wait, for a second at most, until gloo has let go of what was gathered last.

        An exchange is complete a moment before gloo's thread drops its tensors, for which it needs the
        interpreter's lock. Where the interpreter has ended by then, that aborts the process.
        """
        deadline = time.monotonic() + _DRAINING_SECONDS
        while any(part() is not None for part in self._last_gathered) and time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)

    def _wait(self, work: dist.Work, tensor: Tensor) -> None:
        """Wait for an exchange; on a GPU its stream does, and not this thread."""
        if tensor.is_cuda:
            self._watch.order(work)
        else:
            self._watch.wait(work)


def gather_into(group: dist.ProcessGroup, result: Tensor, tensor: Tensor) -> dist.Work:
    """Start gathering contiguous tensors of one shape from all processes into ``result``, ``[N, *shape]``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(result.flatten(), tensor.flatten(), group=group, async_op=True)


def swap_into(group: dist.ProcessGroup, received: Tensor, sent: Tensor, parcel: "Parcel") -> dist.Work:
    """Start an all-to-all of what a parcel holds; both tensors are bytes, laid out as the parcel says."""
    return dist.all_to_all_single(
        received, sent, parcel.received_counts, parcel.sent_counts, group=group, async_op=True
    )


class Parcel:
    """The tensors that a process sends to all in an all-to-all, and the layout of those that it receives.

    They travel as bytes, because not every back end knows every dtype.

    Args:
        tensors: number p goes to process p; of one dtype, on one device.
        shapes: of what comes from each process.

    Attributes:
        sent: the tensors' bytes, one after the other.
        sent_counts, received_counts: the bytes to and from each process.
    """

    def __init__(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]):
        width = tensors[0].element_size()
        self._dtype, self._shapes = tensors[0].dtype, shapes
        self.sent = torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
        self.sent_counts = [tensor.numel() * width for tensor in tensors]
        self.received_counts = [math.prod(shape) * width for shape in shapes]

    @property
    def num_received(self) -> int:
        """The bytes received, this process's own included."""
        return sum(self.received_counts)

    def unpacked(self, received: Tensor) -> list[Tensor]:
        """Return the received tensors as views of the received bytes."""
        parts = received.split(self.received_counts)
        return [part.view(self._dtype).view(*shape) for part, shape in zip(parts, self._shapes, strict=True)]


def as_tensor(data: bytes) -> Tensor:
    """Copy one or more bytes to a tensor, uint8 ``[n]``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def gather_bytes(gather: Callable[[Tensor], Tensor], mine: bytes) -> list[bytes]:
    """Gather byte strings of any length from every process, on every process.

    Args:
        gather: gathers a tensor of the same shape from every process, to ``[N, *shape]``.
        mine: this process's.
    """
    lengths = gather(torch.tensor([len(mine)])).flatten().tolist()
    if not any(lengths):
        return [b""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = as_tensor(mine)
    return [bytes(row[:length].tolist()) for row, length in zip(gather(padded), lengths, strict=True)]


def raise_together(
    gather: Callable[[Tensor], Tensor], name_of: Callable[[int], str], stage: str, error: Exception | None
) -> None:
    """End a local stage: raise on every process if the stage failed on one, else on none.

    Args:
        gather: as in :func:`gather_bytes`.
        name_of: what messages call a process.
        stage: its name.
        error: this process's; None: it did not fail.

    Raises:
        HostError: another process failed, and this one did not.
    """
    # Also an error without words is not the same as none.
    messages = gather_bytes(gather, b"" if error is None else b"!" + describe_error(error).encode()[:4096])
    if error is not None:
        raise error
    for process, message in enumerate(messages):
        if message:
            text = message[1:].decode(errors="replace")
            raise HostError(f"{name_of(process)} failed in {stage}: {text}")
