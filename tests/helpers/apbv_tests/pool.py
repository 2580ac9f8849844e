"""Processes for tests: forked from a server that has imported everything, and a pool of them that
stays up.

Starting a process that imports transformers takes seconds; running a job on a tiny model takes
milliseconds. So four processes are forked once, with one gloo group for every H, and a job runs on
the first H of them.
"""

import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from apbv_tests.patience import GROUP_TIMEOUT, HANGING, limit

GROUP_SIZES = (1, 2, 3, 4)
MAX_HOSTS = max(GROUP_SIZES)
# A group lives as long as its process, and its thread wakes up a hundred times a second.
_MOST_GROUPS = 32
# Of the modules that the server imports.
_FOLDERS = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3] / "benchmarks")]
_JOB_TIMEOUT = limit(600.0)


def start(target: Callable, *args) -> mp.Process:
    """A process forked from the server that has imported everything."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["apbv_tests.preloaded"])
    with patch.dict(
        os.environ, PYTHONPATH=os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")])
    ):
        forkserver.ensure_running()
    # The name of ``_call`` is read before those of the target and its arguments, which need
    # ``tests``.
    process = context.Process(target=_call, args=(target, *args), daemon=True)
    process.start()
    return process


def _call(target: Callable, *args) -> None:
    target(*args)


def _make_tests_importable() -> None:
    """Let functions of test modules be found by the names that pytest gives them, such as
    ``tests.kv.test_cache``.

    Putting the root on the path would do it as well, and make the folder ``kernels`` importable
    under that name.
    """
    package = ModuleType("tests")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules.setdefault("tests", package)


_make_tests_importable()


def exit_statuses(processes: list[mp.Process], seconds: float = limit(300.0)) -> list[int]:
    """How the processes ended; none may outlive so many seconds."""
    deadline = time.monotonic() + seconds
    try:
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"host {rank} did not end"
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


class HostPool:
    """Runs ``job(hosts, *args)`` on H gloo processes; new ones, once jobs have made many groups in
    them."""

    def __init__(self, rendezvous_file: str):
        self._rendezvous_file = rendezvous_file
        self._generation = 0
        self._start()

    def _start(self) -> None:
        self._generation = self._generation + 1
        self._num_groups = 0
        self._pipes = []
        self._processes = []
        for rank in range(MAX_HOSTS):
            ours, theirs = mp.Pipe()
            self._processes.append(
                start(_serve, rank, f"{self._rendezvous_file}-{self._generation}", theirs)
            )
            theirs.close()
            self._pipes.append(ours)

    def run(self, num_hosts: int, job: Callable, *args) -> list[Any]:
        """Run a module-level function on ``num_hosts`` hosts; returns what each host returned.

        Raises:
            AssertionError: a host raised; with its traceback.
        """
        if self._num_groups > _MOST_GROUPS:
            self.close()
            self._start()
        for pipe in self._pipes[:num_hosts]:
            pipe.send((num_hosts, job, args))
        results = []
        failures = []
        for rank, pipe in enumerate(self._pipes[:num_hosts]):
            if not pipe.poll(_JOB_TIMEOUT):
                raise AssertionError(f"host {rank} did not finish {job.__name__}")
            ok, value, num_groups = pipe.recv()
            self._num_groups = max(self._num_groups, num_groups)
            (results if ok else failures).append(value if ok else f"host {rank}:\n{value}")
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # a process that a job killed
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=HANGING)
            process.kill()


def num_made(groups) -> int:
    """How many groups a process has made; more than it may where one of these is of no more use.

    A job may make other hosts of the same process group. A failure of theirs is posted where these
    hosts find it, too, as soon as one waits a little longer for another.
    """
    if any(hosts.watch.read_failure() is not None for hosts in groups):
        return _MOST_GROUPS + 1
    return sum(len(hosts.groups.made) for hosts in groups)


def _serve(rank: int, rendezvous_file: str, pipe) -> None:
    import torch
    import torch.distributed as dist

    from apbv import HostGroup

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=MAX_HOSTS,
        timeout=timedelta(seconds=_JOB_TIMEOUT),
    )
    groups = {size: dist.new_group(list(range(size))) for size in GROUP_SIZES}
    hosts = {
        size: HostGroup.from_process_group(group, device="cpu", timeout=GROUP_TIMEOUT)
        for size, group in groups.items()
        if rank < size
    }
    while (message := pipe.recv()) is not None:
        num_hosts, job, args = message
        try:
            pipe.send((True, job(hosts[num_hosts], *args), num_made(hosts.values())))
        except Exception:
            pipe.send((False, traceback.format_exc(), num_made(hosts.values())))
    dist.destroy_process_group()
