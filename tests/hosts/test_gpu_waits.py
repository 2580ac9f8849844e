"""Waiting for what GPUs exchange: a failure elsewhere ends the wait soon, and frees the GPU.

The processes, their store and their signs of work are real. In place of a GPU stands one event, which comes only
when the other hosts have taken part, or when the communicators are aborted, as with a kernel of NCCL.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from apbv import HostGroup
from apbv.hosts.process_groups import ProcessGroups

from fresh_hosts import WAIT, Store, described, run_fresh
from patience import HANGING, wait_for


class Gpu:
    """A GPU that works on an exchange; its communicator, and the event behind the exchange."""

    def __init__(self):
        self.done = threading.Event()
        self.is_aborted = False
        self.problem = ""

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()

    def error(self) -> str:
        return self.problem

    def abort(self, seconds: float) -> None:
        self.is_aborted = True
        self.done.set()


@dataclass(frozen=True)
class GroupsOnGpu(ProcessGroups):
    gpu: Gpu | None = None

    def communicators(self) -> Gpu:
        return self.gpu


def on_gpu(hosts: HostGroup) -> tuple[HostGroup, Gpu]:
    """The same hosts, whose data is exchanged by GPUs."""
    gpu, groups = Gpu(), hosts._groups
    return HostGroup(
        GroupsOnGpu(groups.data, groups.control, gpu=gpu), device=hosts.device, timeout=hosts.timeout
    ), gpu


def prefill(hosts: HostGroup, gpu: Gpu, how: str, error: Exception | None = None) -> None:
    """A stage in which a host comes to a stop where it reads a result, or fails before."""
    with hosts.collective_stage("prefill"):
        if error is not None:
            raise error
        if how == "asks":
            hosts._watch.wait_for_gpu(gpu)
        else:  # as .item() does
            gpu.synchronize()
            hosts.all_gather(torch.ones(3)).wait()


def failing_job(hosts: HostGroup, how: str, told: Path):
    """Host 1 fails, and lives on until the others know."""
    hosts, gpu = on_gpu(hosts)
    failure = described(prefill, hosts, gpu, how, ValueError("out of memory") if hosts.rank == 1 else None)
    (told / str(hosts.rank)).touch()
    wait_for(lambda: len(list(told.iterdir())) == hosts.size)
    return failure, gpu.is_aborted, hosts.is_broken, described(prefill, hosts, gpu, how)


@pytest.mark.parametrize("how", ["asks", "stops unasked"])
def test_a_failure_frees_the_gpus(tmp_path, how):
    (tmp_path / "told").mkdir()
    outcomes = run_fresh(Store(tmp_path), 3, failing_job, how, tmp_path / "told")
    quoted = "HostError: host 1 failed in prefill: ValueError: out of memory"
    later = "HostError: cannot start prefill: this host group broke in an earlier request"
    for rank, outcome in enumerate(outcomes):
        own = "ValueError: out of memory" if rank == 1 else quoted
        assert outcome.result == (own, True, True, later)
        assert outcome.seconds < HANGING


def misled_job(hosts: HostGroup, told: Path):
    """Host 1 fails, and the others do because of what their GPUs have computed then."""
    hosts, gpu = on_gpu(hosts)

    def prefill():
        with hosts.collective_stage("prefill"):
            if hosts.rank == 1:
                raise ValueError("out of memory")
            gpu.synchronize()
            raise IndexError("no such token")

    failure = described(prefill)
    (told / str(hosts.rank)).touch()
    wait_for(lambda: len(list(told.iterdir())) == hosts.size)
    return failure


def test_an_error_that_comes_of_an_aborted_exchange_is_not_the_reason(tmp_path):
    (tmp_path / "told").mkdir()
    outcomes = run_fresh(Store(tmp_path), 2, misled_job, tmp_path / "told")
    quoted = "HostError: host 1 failed in prefill: ValueError: out of memory"
    assert [outcome.result for outcome in outcomes] == [quoted, "ValueError: out of memory"]


def cut_off_job(hosts: HostGroup, told: Path):
    """Host 0's NCCL finds an error that no other host sees."""
    hosts, gpu = on_gpu(hosts)
    if hosts.rank == 0:
        gpu.problem = "NCCL reports COMM_ERROR"
        gpu.done.set()
    failure = described(prefill, hosts, gpu, "asks")
    (told / str(hosts.rank)).touch()
    wait_for(lambda: len(list(told.iterdir())) == hosts.size)
    return failure, gpu.is_aborted


def test_an_error_that_one_host_sees_reaches_the_others(tmp_path):
    (tmp_path / "told").mkdir()
    outcomes = run_fresh(Store(tmp_path), 2, cut_off_job, tmp_path / "told")
    text = "HostError: another host ended, or did not answer in time (seen by host 0): NCCL reports COMM_ERROR"
    assert [outcome.result for outcome in outcomes] == [(text, True)] * 2


def absent_job(hosts: HostGroup, done: Path):
    hosts, gpu = on_gpu(hosts)
    if hosts.rank == 1:
        wait_for(done.exists)
        return
    try:
        failure = described(prefill, hosts, gpu, "asks")
    finally:
        done.touch()
    return failure, gpu.is_aborted


@pytest.mark.thorough
def test_a_host_that_never_comes_is_given_up(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, absent_job, tmp_path / "done", timeout=WAIT)
    assert outcomes[0].result == (f"HostError: host 0 waited more than {WAIT:g} s for another host", True)
    assert WAIT <= outcomes[0].seconds < HANGING


def sound_job(hosts: HostGroup):
    """All take part in the exchange, one of them late."""
    hosts, gpu = on_gpu(hosts)
    if hosts.rank == 1:
        threading.Timer(1.5, gpu.done.set).start()
    else:
        gpu.done.set()
    first = described(prefill, hosts, gpu, "asks")
    gpu.problem = "NCCL reports COMM_ERROR" if hosts.rank == 0 else ""
    failure = described(hosts._watch.wait_for_gpu, gpu)
    return first, failure, gpu.is_aborted


def test_a_wait_ends_with_the_exchange_and_errors_of_nccl_are_told(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, sound_job)
    assert outcomes[1].result == ("nothing raised", "nothing raised", False)
    first, failure, is_aborted = outcomes[0].result
    assert (first, is_aborted) == ("nothing raised", True)
    assert failure.startswith("HostError: another host ended, or did not answer in time (seen by host 0): NCCL")


class BrokenGpu(Gpu):
    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def own_error_job(hosts: HostGroup):
    hosts, _ = on_gpu(hosts)
    return described(hosts._watch.wait_for_gpu, BrokenGpu())


def test_an_error_of_the_gpu_itself_is_no_other_hosts(pool):
    assert pool.run(2, own_error_job) == ["RuntimeError: CUDA error: an illegal memory access was encountered"] * 2
