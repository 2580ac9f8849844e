"""NCCL's communicators: how they are made ready, what has become of them, and how they are given up."""

import os
from collections.abc import Sequence
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta

import torch
import torch.distributed as dist

from .exchange import in_thread

_CUDA = torch.device("cuda")


class Communicators:
    """The communicators of some process groups that carry GPU memory.

    Args:
        groups: the groups, each with an NCCL back end.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        self._backends = [group._get_backend(_CUDA) for group in groups]

    def error(self) -> str:
        """Return what NCCL's watchdog has found to be wrong; an empty string: nothing."""
        # A back end may lack it; what it would say is then known by the group's timeout.
        asked = [getattr(backend, "get_error", None) for backend in self._backends]
        errors = [ask().name for ask in asked if ask is not None]
        return next((f"NCCL reports {error}" for error in errors if error != "SUCCESS"), "")

    def abort(self, seconds: float) -> None:
        """Let exchanges under way end at once, on the GPU too; wait for that no longer than so many seconds."""
        # Side by side: each may wait for the other, where a GPU has kernels of both.
        wait_for_futures([in_thread(backend.abort) for backend in self._backends], seconds)


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Build a group's communicator by a first exchange, so that the first request does not wait for that.

    This blocks until all processes of the group take part.
    """
    with torch.cuda.device(device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)


def options(limit: timedelta) -> "dist.ProcessGroupNCCL.Options":
    """Return a new group's options, by which a small exchange does not queue behind a long attention kernel.

    Args:
        limit: after which the watchdog ends an exchange; :func:`torch.distributed.new_group` wants it twice.
    """
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    made._timeout = limit
    return made


def leave_errors_to_us() -> None:
    """Have NCCL's watchdog abort exchanges that fail or take too long, but not this process.

    torch reads this as it makes a group. A user's own choice stands.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
