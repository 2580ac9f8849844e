"""Waiting for what GPUs exchange: a failure elsewhere ends the wait soon, and frees the GPU.

The processes, their store and their signs of work are real. In place of a GPU stands one event,
which comes only when the other hosts have taken part, or when the communicators are aborted, as
with a kernel of NCCL.
"""

import threading
from dataclasses import dataclass

import pytest

from apbv import HostGroup
from apbv.hosts import failure_watch
from apbv.hosts.process_groups import ProcessGroups

from apbv_tests.fresh_hosts import Store, described, run_fresh, told_job
from apbv_tests.patience import HANGING


class Gpu:
    """A GPU that works on an exchange; its communicator, and the event behind the exchange."""

    def __init__(self):
        self.done = threading.Event()
        self.is_aborted = False
        self.problem = ""
        self.query = self.done.is_set
        self.synchronize = self.done.wait

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
    gpu = Gpu()
    groups = hosts.groups
    groups = GroupsOnGpu(groups.data, groups.control, gpu=gpu)
    return HostGroup(groups, device=hosts.device, timeout=hosts.timeout), gpu


def prefill(hosts: HostGroup, gpu: Gpu, how: str, error: Exception | None = None) -> None:
    """A stage in which a host comes to a stop where it reads a result, or fails before."""
    with hosts.collective_stage("prefill"):
        if error is not None:
            raise error
        if how == "asks":
            return hosts.watch.wait_for_gpu(gpu)
        gpu.synchronize()  # as .item() does
        raise IndexError("no such token")


def failing_job(hosts: HostGroup, how: str):
    """Host 1 fails."""
    hosts, gpu = on_gpu(hosts)
    failure = described(
        prefill, hosts, gpu, how, ValueError("out of memory") if hosts.rank == 1 else None
    )
    return failure, gpu.is_aborted, hosts.is_broken, described(prefill, hosts, gpu, how)


@pytest.mark.parametrize("how", ["asks", "misled"])
def test_a_failure_frees_the_gpus(tmp_path, how):
    """Whatever a host then makes of what its GPU has computed is not the reason."""
    quoted = "HostError: host 1 failed in prefill: ValueError: out of memory"
    later = (
        "HostError: cannot start prefill: the host group failed in an earlier request; restart it"
    )
    for rank, outcome in enumerate(
        run_fresh(Store(tmp_path), 2, told_job, tmp_path, failing_job, how)
    ):
        assert outcome.result == (
            "ValueError: out of memory" if rank == 1 else quoted,
            True,
            True,
            later,
        )
        assert outcome.seconds < HANGING


def cut_off_job(hosts: HostGroup):
    """Host 0's NCCL finds an error that no other host sees, while it waits or after an exchange
    that came."""
    failure_watch.GRACE_SECONDS = 0.2
    sound, gpu = on_gpu(hosts)
    gpu.done.set()
    first = described(prefill, sound, gpu, "asks")
    hosts, gpu = on_gpu(hosts)
    if hosts.rank == 0:
        gpu.problem = "NCCL reports COMM_ERROR"
        gpu.done.set()
    return first, sound.is_broken, described(prefill, hosts, gpu, "asks"), gpu.is_aborted


def test_a_wait_ends_with_the_exchange_and_an_error_that_one_host_sees_reaches_the_others(tmp_path):
    text = (
        "HostError: another host ended, or did not answer in time (seen by host 0): NCCL reports "
        "COMM_ERROR"
    )
    outcomes = run_fresh(Store(tmp_path), 2, told_job, tmp_path, cut_off_job)
    assert [outcome.result for outcome in outcomes] == [("nothing raised", False, text, True)] * 2
