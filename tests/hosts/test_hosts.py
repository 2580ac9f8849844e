"""HostGroup over real gloo processes: who is in it, and that a failure reaches every host, soon and
by name."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apbv import HostGroup
from apbv.hosts import failure_watch, fair_share_of_cores

from apbv_tests.fresh_hosts import Store, described, exchange_in_stage, run_fresh, told_job
from apbv_tests.patience import GROUP_TIMEOUT, HANGING, wait_for

UNICODE = "no such clip: Übersicht_映像.mp4"
# What os.fsdecode makes of a file name that is not UTF-8.
UNDECODABLE = "cannot read caf\udce9.mp4"


# ---- groups ----


def test_without_torchrun_there_is_one_host(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for hosts in (HostGroup.from_env("cpu"), HostGroup.single("cpu")):
        assert (hosts.rank, hosts.size, hosts.device.type) == (0, 1, "cpu")
        assert torch.equal(hosts.all_gather(torch.arange(3)).wait(), torch.arange(3)[None])
        assert hosts.broadcast_ints([4, 5], 2) == [4, 5] and hosts.gather_floats([0.5]) == [[0.5]]
        with pytest.raises(KeyError), hosts.collective_stage("prefill"):
            raise KeyError("its own")
        hosts.close()
    assert not dist.is_initialized()


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    shares = [fair_share_of_cores()]
    for num_processes in ("1", "3", "9"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_processes)
        shares.append(fair_share_of_cores())
    assert shares == [8, 8, 2, 1]


def subgroup_job(world: HostGroup, members: list[int]):
    """Ranks in a subgroup are the subgroup's own."""
    group = dist.new_group(members)
    seen = None
    if world.rank in members:
        hosts = HostGroup.from_process_group(group, "cpu", timeout=GROUP_TIMEOUT)
        mine, expected = (torch.tensor(ranks) for ranks in ([world.rank], [[m] for m in members]))
        assert torch.equal(hosts.all_gather(mine).wait(), expected)
        assert torch.equal(hosts.broadcast(mine), expected[0])
        failure = described(failing_locally, hosts, 1, ValueError("bad"))
        seen = (hosts.rank, hosts.size, hosts.broadcast_ints([world.rank], 1), failure)
        hosts.close()
    assert dist.is_initialized(), "closing leaves a group alone that the caller made"
    world.barrier()
    return seen


def failing_locally(hosts: HostGroup, bad: int, error: Exception) -> None:
    with hosts.local_stage("reading the prompt"):
        if hosts.rank == bad:
            raise error


def test_a_subgroup(tmp_path):
    """In processes of their own, since all processes of the world have to make a group like the
    caller's."""
    quoted = "HostError: host 1 failed in reading the prompt: ValueError: bad"
    first, second, third = ((h, 3, [2], quoted if h != 1 else "ValueError: bad") for h in range(3))
    seen = [outcome.result for outcome in run_fresh(Store(tmp_path), 8, subgroup_job, [2, 5, 7])]
    assert seen == [None, None, first, None, None, second, None, third]


def uneven_groups_job(hosts: HostGroup) -> list[list[int] | None]:
    for _ in range(hosts.rank):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    first, second = (hosts.subgroup(members) for members in ([0, 1], [0, 2]))
    return [
        some and some.all_gather(torch.tensor([hosts.rank])).wait().flatten().tolist()
        for some in (first, second)
    ]


def test_subgroups_of_processes_that_are_in_different_numbers_of_groups(pool):
    assert pool.run(3, uneven_groups_job) == [[[0, 1], [0, 2]], [[0, 1], None], [None, [0, 2]]]


# ---- a stage without exchanges: all hosts raise, or none, and the group stays usable ----


class OddError(Exception):
    """Neither a ValueError nor anything else that the library knows."""


def local_failure_job(hosts: HostGroup, bad: list[int], errors: dict[int, Exception]):
    def stage():
        with hosts.local_stage("reading the prompt"):
            if hosts.rank in bad:
                raise errors[hosts.rank]

    failures = [described(stage) for _ in range(2)]
    assert failures[0] == failures[1], "the second failure is told like the first"
    with hosts.collective_stage("an exchange"):
        gathered = hosts.all_gather(torch.tensor([hosts.rank])).wait()
    assert gathered.flatten().tolist() == list(range(hosts.size))
    return failures[0]


FAILURES = [
    (2, [1], ValueError(UNDECODABLE)),
    (3, [1], ValueError("")),
    (4, [1, 3], OddError(UNICODE)),
]


@pytest.mark.parametrize(("hosts", "bad", "error"), FAILURES, ids=ascii)
def test_one_hosts_error_reaches_all(pool, hosts, bad, error):
    """Where several fail, each raises its own, and the others quote the first of them."""
    errors = {host: type(error)(f"{error} of host {host}") for host in bad}
    own = {host: f"{type(error).__name__}: {each}" for host, each in errors.items()}
    quoted = f"HostError: host {bad[0]} failed in reading the prompt: {own[bad[0]]}"
    quoted = quoted.replace("\udce9", r"\udce9")
    assert pool.run(hosts, local_failure_job, bad, errors) == [
        own.get(host, quoted) for host in range(hosts)
    ]


def test_a_long_message_is_cut_but_arrives(pool):
    """Longer than a status holds, and cut wherever a letter of several bytes happens to stand."""
    start = "HostError: host 0 failed in reading the prompt: ValueError: "
    error = ValueError("映" * 5000)
    mine, other = pool.run(2, local_failure_job, [0], {0: error})
    assert mine == f"ValueError: {error}" and other.startswith(start + "映" * 1000)
    assert set(other.removeprefix(start)) <= {"映", "\N{REPLACEMENT CHARACTER}"}


# ---- groups that break: each in processes of its own ----


def failing_exchange_job(hosts: HostGroup, bad: list[int], error: Exception):
    failure = described(exchange_in_stage, hosts, error if hosts.rank in bad else None)
    # A broken group refuses at once.
    calls = [
        (exchange_in_stage, hosts),
        (failing_locally, hosts, -1, ValueError()),
        (hosts.barrier,),
    ]
    calls.append((hosts.all_to_all, [torch.ones(1)] * hosts.size, [(1,)] * hosts.size))
    return failure, [described(*call) for call in calls]


def ending_job(hosts: HostGroup, folder: Path, *args):
    """Host 1 ends at once; the others stay until both know."""
    outcome = failing_exchange_job(hosts, *args)
    (folder / f"told {hosts.rank}").touch()
    wait_for(lambda: hosts.rank == 1 or len(list(folder.glob("told *"))) == 3)
    return outcome


WAYS = [(True, [1], "stays"), (False, [1], "ends at once"), (False, [0, 1, 2], "stays")]


@pytest.mark.parametrize(("in_host_0", "bad", "how"), WAYS)
def test_a_failure_amid_exchanges_reaches_those_who_wait(tmp_path, in_host_0, bad, how):
    """The failed host lives on, so that the others must look for its message, or it hangs up."""
    error = OddError(UNICODE * 300 + UNDECODABLE)
    store = Store(tmp_path, in_host_0)
    job = (told_job, tmp_path, failing_exchange_job) if how == "stays" else (ending_job, tmp_path)
    outcomes = run_fresh(store, 3, *job, bad, error)
    own = f"OddError: {error}"
    quoted = f"HostError: host 1 failed in encode: {own}".replace("\udce9", r"\udce9")
    assert [outcome.exit_status for outcome in outcomes] == [0, 0, 0]
    for rank, (failure, later) in enumerate(outcome.result for outcome in outcomes):
        assert failure == (own if rank in bad else quoted)
        assert all(text.startswith("HostError: ") and "in an earlier" in text for text in later), (
            later
        )
    assert max(outcome.seconds for outcome in outcomes) < HANGING


def kill_job(hosts: HostGroup, victim: int, stage: str):
    failure_watch.GRACE_SECONDS = 0.2  # in which nobody posts a failure
    if hosts.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    failing_locally(hosts, -1, ValueError()) if stage == "local" else exchange_in_stage(hosts)


@pytest.mark.parametrize(("victim", "stage"), [(2, "local"), (0, "collective")])
def test_a_killed_host_ends_the_others(tmp_path, victim, stage):
    """Without a word from it, and also where the store that could carry one dies with it."""
    store = Store(tmp_path, in_host_0=victim == 0)
    outcomes = run_fresh(store, 3, kill_job, victim, stage)
    assert outcomes.pop(victim).exit_status == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error.startswith("HostError: ") and "ended" in outcome.error
        assert outcome.exit_status == 1 and outcome.seconds < HANGING, (
            "an error, not a crash on the way out"
        )
