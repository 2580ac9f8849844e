"""Ends the processes that a benchmark has started, chooses cores, and waits for devices."""

import os
import signal
import sys
from multiprocessing import active_children
from typing import NoReturn

import torch

from apbv.errors import InvalidRequestError


def end_children_with_this() -> None:
    """Make SIGTERM also end the processes that this one has started, which would else go on."""

    def end(*_) -> NoReturn:
        for child in active_children():
            child.terminate()
        # By this exception subprocess ends its own children.
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def pin_host(rank: int, num_cores: int = 1) -> None:
    """Let this process run only on its own cores, which hosts share where there are too few.

    Raises:
        InvalidRequestError: this system does not let a process choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidRequestError("--pinned: this system does not let a process choose its cores")
    available = sorted(os.sched_getaffinity(0))
    first = rank * num_cores
    cores = [available[number % len(available)] for number in range(first, first + num_cores)]
    os.sched_setaffinity(0, cores)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; a CPU has no work left behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
