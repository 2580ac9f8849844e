"""Assigns a machine's devices and cores to its processes."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import BackendUnavailableError, InvalidConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Moment:
    """When a host came to a place in the code.

    Attributes:
        seconds: by the host's clock; NaN as long as a simulated host's are not worked out.
        event: what its GPU reaches when it has done the work queued there; None: the GPU does not
            count.
    """

    seconds: float
    event: torch.cuda.Event | None = None


def record_event(device: torch.device) -> torch.cuda.Event:
    """Return an event that the GPU reaches after the work that this thread has queued so far."""
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def choose_device(wanted: str | torch.device | None = None) -> torch.device:
    """Choose this process's device.

    Args:
        wanted: a device by name; ``"cuda"``: any GPU; None: a GPU, or the CPU if there is none.
            torchrun's LOCAL_RANK then selects the GPU; if a machine has more processes than GPUs,
            GPUs are shared. Without torchrun it is the current one.

    Raises:
        BackendUnavailableError: the device does not exist.
    """
    try:
        device = torch.device(
            "cuda" if wanted is None and torch.cuda.is_available() else wanted or "cpu"
        )
    except RuntimeError as error:
        raise InvalidConfigError(
            f"{wanted!r} is not a device: use cpu, cuda, or a GPU such as cuda:0"
        ) from error
    if device.type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= num_gpus:
        raise BackendUnavailableError(
            f"no such device: {device}; torch finds {num_gpus} GPUs on this machine"
        )
    if device.index is not None:
        return device
    local_rank = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if local_rank is None else int(local_rank) % num_gpus
    return torch.device("cuda", index)


def device_identity(device: torch.device) -> str:
    """Return a GPU's unique identifier, valid across machines and processes.

    ``"cpu"`` for a CPU.
    """
    if device.type != "cuda":
        return device.type
    # Of two processes, either may call the same GPU cuda:0, or each another one.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot} {device if uuid is None else uuid}"


def sharing(identities: Sequence[str]) -> list[list[int]]:
    """Return the processes that share GPUs: for each shared GPU their numbers, ascending."""
    processes: dict[str, list[int]] = {}
    for process, identity in enumerate(identities):
        processes.setdefault(identity, []).append(process)
    return [found for identity, found in processes.items() if identity != "cpu" and len(found) > 1]


def fair_share_of_cores() -> int:
    """Return this process's share of the machine's CPU cores; at least 1.

    They are the cores that the operating system lets this process run on, divided by the number of
    processes that torchrun started on this machine (its LOCAL_WORLD_SIZE); without torchrun all of
    them.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:  # macOS and Windows have no such limit, or do not tell
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
