"""Ends the processes that a benchmark has started, chooses their cores, and waits for their
devices."""

import os
import signal
import sys
from multiprocessing import active_children
from typing import NoReturn

import torch


def end_children_with_this() -> None:
    """Make SIGTERM also end the processes that this one has started, which would otherwise
    continue."""

    def end(*_) -> NoReturn:
        for child in active_children():
            child.terminate()
        sys.exit(128 + signal.SIGTERM)  # by which subprocess ends its own

    signal.signal(signal.SIGTERM, end)


def pin_host(rank: int, num_cores: int = 1) -> None:
    """Let this process run only on its own cores, which hosts share where there are too few.

    Raises:
        ValueError: this system does not let a process choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--pinned: this system does not let a process choose its cores")
    cores = sorted(os.sched_getaffinity(0))
    first = rank * num_cores
    os.sched_setaffinity(
        0, [cores[number % len(cores)] for number in range(first, first + num_cores)]
    )


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; a CPU has no work left behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
