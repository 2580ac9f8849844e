"""Data exchanges over one process group."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, HostError, describe_error
from .failure_watch import FailureWatch


class Collectives:
    """The exchanges of one torch.distributed group, with the failures of its processes watched for.

    Args:
        group: the group, of N processes; None where this process is alone and exchanges nothing.
        watch: starts the exchanges and waits for them.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: FailureWatch):
        self._group, self._watch = group, watch

    def all_gather(self, tensor: Tensor) -> Exchange:
        """Start gathering one contiguous tensor of the same shape from every process, to ``[N, *shape]``."""
        result = tensor.new_empty(dist.get_world_size(self._group), *tensor.shape)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = self._watch.start(
            lambda: gather(result.flatten(), tensor.flatten(), group=self._group, async_op=True)
        )

        def finish() -> Tensor:
            self._watch.wait(work, tensor.is_cuda)
            return result

        return Exchange(finish, work.is_completed)

    def all_to_all(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Exchange:
        """Start sending tensor p to every process p and receiving one of shape ``shapes[p]`` from it."""
        dtype, device = tensors[0].dtype, tensors[0].device
        width = tensors[0].element_size()
        counts = [math.prod(shape) for shape in shapes]
        # Bytes, because not every back end knows every dtype.
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
        received = torch.empty(sum(counts) * width, dtype=torch.uint8, device=device)
        work = self._watch.start(
            lambda: dist.all_to_all_single(
                received,
                sent,
                [count * width for count in counts],
                [tensor.numel() * width for tensor in tensors],
                group=self._group,
                async_op=True,
            )
        )

        def finish(sent=sent) -> list[Tensor]:  # holds what is being sent alive until it is sent
            self._watch.wait(work, device.type == "cuda")
            flat = received.view(dtype).split(counts)
            return [values.view(*shape) for values, shape in zip(flat, shapes, strict=True)]

        return Exchange(finish, work.is_completed)

    def broadcast(self, tensor: Tensor, source: int) -> Exchange:
        """Start sending a tensor from one process to all, in place; shape and dtype are the same everywhere."""
        work = self._watch.start(
            lambda: dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        )

        def finish() -> Tensor:
            self._watch.wait(work, tensor.is_cuda)
            return tensor

        return Exchange(finish, work.is_completed)


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
