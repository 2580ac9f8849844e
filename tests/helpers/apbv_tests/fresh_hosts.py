"""Host processes for one test alone, which may fail, hang or be killed, and what they exchange
there."""

import multiprocessing as mp
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apbv import HostGroup
from apbv.hosts import failure_watch, heartbeat

from apbv_tests.patience import GROUP_TIMEOUT, wait_for
from apbv_tests.pool import exit_statuses, start


def described(job: Callable, *args) -> str:
    """The error that ``job`` raises, as text."""
    try:
        job(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@dataclass
class Outcome:
    """What became of one host's process: the job's result, or its error; and how the process
    ended."""

    result: Any = None
    error: str | None = None
    seconds: float | None = None
    exit_status: int | None = None


@dataclass
class Store:
    """How the hosts of a fresh group find each other: a file, or a store in the memory of host
    0."""

    folder: Path
    in_host_0: bool = False
    _held: list = field(default_factory=list)

    def arguments(self, rank: int, size: int) -> dict:
        if not self.in_host_0:
            return {"init_method": f"file://{self.folder / 'rendezvous'}"}
        port = self.folder / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            port.with_suffix(".new").write_text(str(store.port))
            port.with_suffix(".new").rename(port)
        else:
            wait_for(port.exists)
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), size, is_master=False)
        self._held.append(store)
        return {"store": store}


def serve_fresh(
    pipe, rank: int, size: int, store: Store, timeout: float, job: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    failure_watch.POLL_SECONDS = heartbeat.BEAT_SECONDS = 0.1
    longest = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=longest, **store.arguments(rank, size)
    )
    hosts = HostGroup.from_process_group(dist.group.WORLD, "cpu", timeout, owns_group=True)
    began = time.monotonic()
    outcome = Outcome()
    try:
        hosts.barrier()
        outcome.result = job(hosts, *args)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        outcome.seconds = time.monotonic() - began
        pipe.send(outcome)
        hosts.close()


def run_fresh(
    store: Store, size: int, job: Callable, *args, timeout: float = GROUP_TIMEOUT
) -> list[Outcome]:
    """Run ``job(hosts, *args)`` on a group of new processes, as a program would that lets its
    errors out."""
    pipes = []
    processes = []
    for rank in range(size):
        ours, theirs = mp.Pipe(duplex=False)
        processes.append(start(serve_fresh, theirs, rank, size, store, timeout, job, args))
        theirs.close()
        pipes.append(ours)
    statuses = exit_statuses(processes)
    outcomes = []
    for pipe, status in zip(pipes, statuses, strict=True):
        outcome = Outcome()
        with suppress(EOFError):
            outcome = pipe.recv()
        outcomes.append(replace(outcome, exit_status=status))
    return outcomes


def told_job(hosts: HostGroup, folder: Path, job: Callable, *args) -> Any:
    """The job, after which every host lives on until all have heard how theirs ended."""
    try:
        return job(hosts, *args)
    finally:
        (folder / f"told {hosts.rank}").touch()
        wait_for(lambda: len(list(folder.glob("told *"))) == hosts.size)


def exchange_in_stage(hosts: HostGroup, error: BaseException | None = None) -> None:
    with hosts.collective_stage("encode"):
        if error is not None:
            raise error
        hosts.all_gather(torch.full((1000,), float(hosts.rank))).wait()


def pattern(host: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that differs between hosts, and whose values every dtype here holds exactly."""
    return ((torch.arange(torch.Size(shape).numel()) + 37 * host) % 251).view(shape).to(dtype)
