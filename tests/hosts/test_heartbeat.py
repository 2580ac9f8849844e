"""A host that works is waited for; one that is silent is not. Over real gloo processes, whose timeout is short.

Working is sleeping in a stage: nothing but the sign of work tells the others that it goes on.
"""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import apbv.hosts.failure_watch
from apbv import HostGroup
from apbv.speculate.link import Link

from fresh_hosts import Store, described, run_fresh
from patience import HANGING, wait_for
from pool import exit_statuses, start
from scripts import ROOT, as_torchrun_starts

TIMEOUT = 4.0
LONG = 9.0  # longer than any wait without a sign of work, the back end's own included


def slow_job(hosts: HostGroup, stage: str) -> list[int]:
    """The last host takes its time."""
    if stage == "local":
        with hosts.local_stage("reading the video"):
            time.sleep(LONG * (hosts.rank == hosts.size - 1))
    with hosts.collective_stage("prefill"):
        if stage == "collective":
            time.sleep(LONG * (hosts.rank == hosts.size - 1))
        return hosts.all_gather(torch.tensor([hosts.rank])).wait().flatten().tolist()


@pytest.mark.parametrize(
    ("store", "stage"),
    [pytest.param("file", "local", marks=pytest.mark.thorough), ("memory of host 0", "collective")],
    indirect=["store"],
)
def test_a_host_that_works_is_waited_for(store, stage):
    for outcome in run_fresh(store, 3, slow_job, stage, timeout=TIMEOUT):
        assert (outcome.error, outcome.result) == (None, [0, 1, 2])


def from_env_job(pipe, rank: int, port: int) -> None:
    """As torchrun starts them, one host of two processes: exchanges of transformers, and ours."""
    as_torchrun_starts(rank, 2, port)
    hosts = HostGroup.from_env("cpu", TIMEOUT, tensor_parallel=2)
    total = torch.tensor([1.0 + rank])
    with hosts.collective_stage("prefill"):
        if rank == 1:
            time.sleep(LONG)
        dist.all_reduce(total, group=hosts.tensor_parallel_mesh().get_group())
    with hosts.local_stage("reading the video"):
        if rank == 0:
            time.sleep(LONG)
    pipe.send(total.item())
    hosts.close()


@pytest.mark.thorough
def test_the_back_ends_own_limit_is_no_shorter(agent_store):
    processes, pipes = [], []
    for rank in range(2):
        ours, theirs = mp.Pipe(duplex=False)
        processes.append(start(from_env_job, theirs, rank, agent_store.port))
        theirs.close()
        pipes.append(ours)
    assert exit_statuses(processes) == [0, 0]
    assert [pipe.recv() for pipe in pipes] == [3.0, 3.0]


def stopped_job(hosts: HostGroup) -> None:
    with hosts.collective_stage("prefill"):
        if hosts.rank == 1:
            time.sleep(LONG)  # who did not hear of it would have given up
            os.kill(os.getpid(), signal.SIGSTOP)
        hosts.all_gather(torch.tensor([hosts.rank])).wait()


def run_beside_stopped(store: Store, job, *args) -> list:
    """What became of hosts 0 and 2, of which each has reported before host 1, which stops, is killed."""
    ours, theirs = zip(*(mp.Pipe(duplex=False) for _ in range(3)), strict=True)
    processes = [start(report, pipe, rank, store, job, *args) for rank, pipe in enumerate(theirs)]
    try:
        for rank in (0, 2):
            assert ours[rank].poll(90), f"host {rank} still waits"
        return [ours[rank].recv() for rank in (0, 2)]
    finally:
        for process in processes:
            process.kill()


def report(pipe, rank: int, store: Store, job, *args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, **store.arguments(rank, 3))
    hosts = HostGroup.from_process_group(dist.group.WORLD, "cpu", TIMEOUT)
    began = time.monotonic()
    failure = described(job, hosts, *args)
    pipe.send((failure, time.monotonic() - began))


@pytest.mark.thorough
def test_a_stopped_host_is_noticed_although_it_has_worked(tmp_path):
    for failure, seconds in run_beside_stopped(Store(tmp_path), stopped_job):
        assert failure.startswith("HostError: "), failure
        assert LONG < seconds < LONG + TIMEOUT + HANGING
        assert "s in all; the last sign of work was: host 1 has worked on prefill for" in failure


def waiting_job(hosts: HostGroup, done: Path) -> None:
    """Host 1 does not come, outside any stage; the others wait in one, which is no work."""
    if hosts.rank == 1:
        wait_for(lambda: len(list(done.iterdir())) == 2, 80)
        return
    try:
        with hosts.collective_stage("prefill"):
            hosts.all_gather(torch.tensor([hosts.rank])).wait()
    finally:
        (done / str(hosts.rank)).touch()


def test_waiting_is_no_work(tmp_path):
    (tmp_path / "done").mkdir()
    outcomes = run_fresh(Store(tmp_path), 3, waiting_job, tmp_path / "done", timeout=TIMEOUT)
    assert outcomes[1].error is None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("HostError: ") and outcome.seconds < TIMEOUT + HANGING


def hanging_job(hosts: HostGroup, done: Path) -> None:
    if hosts.rank == 1:
        with hosts.collective_stage("prefill"):
            wait_for(done.exists, 60)
        return
    try:
        hosts.barrier()
    finally:
        done.touch()


def test_a_host_that_hangs_in_a_stage_is_given_up_in_the_end(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, impatient, hanging_job, tmp_path / "done", timeout=2.0)
    assert outcomes[0].error.startswith("HostError: host 0 waited more than 2 s for another host, ")
    assert "the last sign of work was: host 1 has worked on prefill for" in outcomes[0].error


def impatient(hosts: HostGroup, job, *args):
    """The job where only four seconds of work are believed."""
    assert hosts._watch.heartbeat._longest == apbv.hosts.failure_watch.WORK_LIMIT * hosts.timeout
    hosts._watch.heartbeat._longest = 4.0
    return job(hosts, *args)


def subgroup_job(hosts: HostGroup) -> str:
    """Hosts 0 and 1 work in a group of theirs, or host 2 alone, while the others wait in that of all."""
    some, alone = hosts.subgroup([0, 1]), hosts.subgroup([2])
    pair = hosts.subgroup([0, 2], TIMEOUT / 2, waits_for_work=False)
    if some is not None:
        with some.collective_stage("decode"):
            time.sleep(LONG * some.rank)
            some.all_gather(torch.tensor([hosts.rank])).wait()
    hosts.barrier()
    if alone is not None:
        with alone.collective_stage("draft"):
            time.sleep(LONG)
    hosts.barrier()
    failure = "none"
    if hosts.rank == 0:
        failure = described(pair.start_broadcast(torch.zeros(1), 1).wait)
    elif hosts.rank == 2:
        with alone.collective_stage("draft"):
            time.sleep(LONG)
        pair.start_broadcast(torch.zeros(1), 1)
    hosts.barrier()
    return failure


@pytest.mark.thorough
def test_work_in_a_group_of_some_counts_for_all_unless_it_shall_not(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 3, subgroup_job, timeout=TIMEOUT)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].result == "HostError: host 0 waited more than 2 s for another host"


def closing_job(pipe, rank: int, port: int) -> None:
    """Host 1 stops while host 0 has an exchange with it that nobody waits for."""
    as_torchrun_starts(rank, 2, port)
    hosts = HostGroup.from_env("cpu", TIMEOUT)
    pair = hosts.subgroup([0, 1])
    hosts.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange = pair.start_broadcast(torch.zeros(1), 1)
    hosts.close()
    pipe.send((dist.is_initialized(), exchange.has_ended()))


def test_closing_and_exiting_do_not_wait_for_a_host_that_has_stopped(agent_store):
    ours, theirs = mp.Pipe(duplex=False)
    processes = [start(closing_job, theirs, rank, agent_store.port) for rank in range(2)]
    try:
        assert ours.poll(HANGING) and ours.recv() == (False, False)
        assert exit_statuses(processes[:1]) == [0]
    finally:
        processes[1].kill()


def leaving_draft_job(pipe, rank: int, port: int) -> None:
    """The draft host gives its account and ends at once; the target asks for it later."""
    as_torchrun_starts(rank, 2, port)
    hosts = HostGroup.from_env("cpu", HANGING)
    link = Link(hosts.subgroup([0, 1], HANGING), hosts.subgroup([0, 1], HANGING))
    account = "x" * 2**24  # more than a socket holds
    hosts.barrier()
    if rank == 1:
        link.send_json(account)
        link.wait_until_received()
        os._exit(0)
    time.sleep(LONG / 4)
    pipe.send(link.receive_json() == account)


def test_a_draft_host_that_ends_has_given_its_account(agent_store):
    ours, theirs = mp.Pipe(duplex=False)
    processes = [start(leaving_draft_job, theirs, rank, agent_store.port) for rank in range(2)]
    assert ours.poll(HANGING) and ours.recv()
    assert exit_statuses(processes) == [0, 0]


ASKING = """
import time
import apbv.hosts.failure_watch as watch

class SlowStore:
    def check(self, keys):
        time.sleep(1.0)
        print("answered", flush=True)
        return False
    def add(self, key, count):
        return 0

from apbv.hosts.heartbeat import Heartbeat
watch.POLL_SECONDS = 0.1
store = SlowStore()
alone = watch.FailureWatch("host 0", 60.0, store, Heartbeat(store, "host 0", 60.0, 600.0))
assert alone._posted_failure() is None
print("ends", flush=True)
"""


def test_the_process_ends_only_when_the_store_has_answered():
    """A thread that is inside the store's C++ when the interpreter ends would abort the process."""
    command = [sys.executable, "-c", ASKING]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANGING)
    assert (result.returncode, result.stdout.split()) == (0, ["ends", "answered"]), result.stderr
