"""A host that works is waited for; one that is silent is not. By a clock and a store of the tests,
then real ones.

Working, over real gloo processes, is sleeping in a stage: nothing but the sign of work tells that
it goes on.
"""

import multiprocessing as mp
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from apbv import Engine, HostError, HostGroup, SpeculativeConfig, demo
from apbv.hosts import failure_watch, heartbeat
from apbv.hosts.failure_watch import WORK_LIMIT, FailureWatch
from apbv.hosts.heartbeat import Heartbeat, Patience
from apbv.speculate.loops.link import Link

from apbv_tests.fresh_hosts import described
from apbv_tests.patience import HANGING
from apbv_tests.pool import exit_statuses, start
from apbv_tests.scripts import as_torchrun_starts

TIMEOUT = 4.0


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a test says so."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


class ManualHeartbeat(Heartbeat):
    """A heart that beats only when a test says so."""

    def start(self) -> None:
        pass


def a_heart(store: dist.Store) -> Heartbeat:
    """The heart of host 1."""
    return ManualHeartbeat(store, "host 1", TIMEOUT, 40.0)


def test_patience_ends_where_nobody_has_worked_for_the_timeout(clock):
    patience = Patience(TIMEOUT)
    patience.hear(7, "old news")
    for step in range(1, 4):
        clock.now += TIMEOUT
        assert not patience.is_over
        patience.hear(7 + step, f"news {step}")
    patience.hear(10, "the same once more")
    clock.now += TIMEOUT + 0.1
    assert (
        patience.is_over
        and patience.last_heard == "news 3"
        and patience.seconds == pytest.approx(16.1)
    )


def test_work_from_before_a_wait_is_no_reason_to_wait_longer(clock):
    patience = Patience(TIMEOUT)
    clock.now += 0.9 * TIMEOUT
    patience.hear(7, "old news")
    clock.now += 0.2 * TIMEOUT
    assert patience.is_over and not patience.last_heard


def test_a_host_beats_while_it_works_and_not_while_it_waits(clock):
    store = dist.HashStore()
    heart = a_heart(store)

    def beats(seconds: float) -> str | None:
        clock.now += seconds
        before, _ = heart.heard()
        heart.beat()
        count, said = heart.heard()
        return said if count > before else None

    assert beats(1) is None and heart.heard() == (0, "")
    with heart.working("prefill"):
        assert beats(3) == "host 1 has worked on prefill for 3 s"
        with heart.working("encode"):
            assert beats(5) == "host 1 has worked on encode for 5 s"
        with heart.waiting():
            assert beats(1) is None
        assert beats(2) == "host 1 has worked on prefill for 2 s", "a new stretch"
        assert beats(37.9) and beats(0.1) is None, "a host that hangs keeps nobody for ever"
    assert beats(0) is None


SILENT = "HostError: host 0 waited more than 4 s for another host"
CASES = [(False, 7, "nothing raised"), (True, 7, SILENT), (False, 4, f"{SILENT}, 18 s in all")]


@pytest.mark.parametrize(("bounded", "beats", "outcome"), CASES)
def test_who_works_is_waited_for_unless_the_wait_is_bounded(
    clock, monkeypatch, bounded, beats, outcome
):
    """The last of them works, and is then silent."""
    store = dist.HashStore()
    polls = []
    other = a_heart(store)
    monkeypatch.setattr(failure_watch, "POLL_SECONDS", 0.01)

    def wait(timeout=None) -> None:
        polls.append(1)
        clock.now += 3.0
        if len(polls) <= beats:
            other.beat()
        if len(polls) < 7:
            raise RuntimeError("Operation timed out!")

    watch = FailureWatch("host 0", TIMEOUT, store, a_heart(store), waits_for_work=not bounded)
    with other.working("prefill"):
        said = described(watch.wait, SimpleNamespace(wait=wait, is_completed=lambda: False))
    assert said.startswith(outcome) and watch.is_broken == (outcome != "nothing raised")
    assert beats == 7 or said.endswith(
        "; the last sign of work was: host 1 has worked on prefill for 12 s"
    )


@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_an_exchange_that_ends_as_a_wait_gives_up_has_its_own_outcome(monkeypatch, error):
    store = dist.HashStore()
    monkeypatch.setattr(failure_watch, "GRACE_SECONDS", 0.1)

    def wait(timeout=None) -> None:
        if timeout is not None or error:
            raise RuntimeError("Operation timed out!" if timeout else error)

    watch = FailureWatch("host 0", TIMEOUT, store, a_heart(store))
    outcome = described(watch.wait, SimpleNamespace(wait=wait, is_completed=lambda: True))
    told = f"another host ended, or did not answer in time (seen by host 0): {error}"
    assert outcome == (f"HostError: {told}" if error else "nothing raised")
    other = FailureWatch("host 1", TIMEOUT, store, a_heart(store))
    posted = other.read_failure()
    assert (posted and str(posted)) == (told if error else None), "the others are told"


def groups_job(hosts: HostGroup):
    """What a host works on in one of its groups is a sign of work in all; of how long a stretch
    counts."""
    own = hosts.subgroup([hosts.rank])
    pair = hosts.subgroup([0, 1], 7.0, waits_for_work=False)
    assert own.watch.heartbeat is hosts.watch.heartbeat
    if pair is not None:
        assert (pair.timeout, pair.watch.waits_for_work, hosts.watch.waits_for_work) == (
            7.0,
            False,
            True,
        )
        assert pair.watch.heartbeat is hosts.watch.heartbeat
    assert hosts.watch.heartbeat.longest == WORK_LIMIT * hosts.timeout


def test_groups_of_a_host_share_its_heart(pool):
    pool.run(3, groups_job)


# ---- real clocks ----


def run_pair(job, port: int, *args, size: int = 2) -> tuple:
    """Hosts as torchrun starts them: their processes, and what each sends."""
    ours, theirs = zip(*(mp.Pipe(duplex=False) for _ in range(size)), strict=True)
    return [
        start(as_host, pipe, rank, size, port, job, *args) for rank, pipe in enumerate(theirs)
    ], ours


def as_host(
    pipe, rank: int, size: int, port: int, job, timeout: float, tensor_parallel: int = 1
) -> None:
    as_torchrun_starts(rank, size, port)
    pipe.send(job(HostGroup.from_env("cpu", timeout, tensor_parallel=tensor_parallel), rank))


def transformers_job(hosts: HostGroup, rank: int) -> float:
    """One host of two processes: an exchange of transformers."""
    total = torch.tensor([1.0 + rank])
    with hosts.collective_stage("prefill"):
        # Longer than any wait without a sign of work, the back end's own included.
        time.sleep(9.0 * rank)
        dist.all_reduce(total, group=hosts.tensor_parallel_mesh().get_group())
    hosts.close()
    return total.item()


@pytest.mark.thorough
def test_a_host_that_works_is_waited_for_and_the_back_ends_own_limit_is_no_shorter(agent_store):
    processes, pipes = run_pair(transformers_job, agent_store.port, TIMEOUT, 2)
    assert exit_statuses(processes) == [0, 0] and [pipe.recv() for pipe in pipes] == [3.0, 3.0]


def closing_job(hosts: HostGroup, rank: int) -> tuple[bool, bool]:
    """Host 1 stops while host 0 has an exchange with it that nobody waits for."""
    pair = hosts.subgroup([0, 1])
    hosts.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange = pair.start_broadcast(torch.zeros(1), 1)
    hosts.close()
    return dist.is_initialized(), exchange.ready()


def test_closing_and_exiting_do_not_wait_for_a_host_that_has_stopped(agent_store):
    processes, (ours, _) = run_pair(closing_job, agent_store.port, 1.0)
    try:
        assert ours.poll(HANGING) and ours.recv() == (False, False)
        assert exit_statuses(processes[:1]) == [0]
    finally:
        processes[1].kill()


def freezing_target_job(hosts: HostGroup, rank: int) -> tuple[str, float]:
    """Host 0 of the target stops in its prefill; how long the others wait for it, and what they
    say."""
    drafting = SpeculativeConfig(strategy="vanilla", draft_model="demo", draft_host=True)
    engine = Engine.from_pretrained("demo", hosts=hosts, speculate=drafting, dtype="float32")

    def freeze(stage: str) -> None:
        if stage == "prefill" and rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    began = time.monotonic()
    with pytest.raises(HostError) as ended:
        engine.generate("describe the clip shot by shot", video=demo.video_path(), on_stage=freeze)
    return str(ended.value), time.monotonic() - began


@pytest.mark.thorough
def test_a_draft_host_waits_no_longer_than_a_target_host_for_one_that_has_stopped(agent_store):
    processes, (_, *others) = run_pair(freezing_target_job, agent_store.port, TIMEOUT, size=3)
    try:
        (_, of_target), (text, of_draft) = (pipe.poll(HANGING) and pipe.recv() for pipe in others)
        assert of_draft < 2 * of_target and text.startswith("host 2 waited")
    finally:
        for process in processes:
            process.kill()


def leaving_draft_job(hosts: HostGroup, rank: int) -> bool:
    """The draft host gives its account and ends at once; the target asks for it later."""
    link = Link(hosts.subgroup([0, 1], HANGING), hosts.subgroup([0, 1], HANGING))
    account = "x" * 2**23  # more than a socket holds
    if rank == 1:
        link.send_json(account)
        link.wait_until_received()
        os._exit(0)
    return link.receive_json() == account


def test_a_draft_host_that_ends_has_given_its_account(agent_store):
    processes, (ours, _) = run_pair(leaving_draft_job, agent_store.port, HANGING)
    assert ours.poll(HANGING) and ours.recv()
    assert exit_statuses(processes) == [0, 0]
