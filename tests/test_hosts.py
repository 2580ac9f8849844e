"""HostGroup over real gloo processes: the exchanges, and that a failure reaches every host, soon and by name.

Bounds in seconds are bounds on hanging, not on speed (see patience): they are below the groups' own timeouts,
unless the timeout is what is tested.
"""

import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import apbv.hosts.group
from apbv import HostGroup

import families
from patience import GROUP_TIMEOUT, HANGING, limit, wait_for
from pool import exit_statuses, start
from scripts import INFER, as_torchrun_starts, run_hosts

SIZES = (1, 2, 3, 8)
WAIT = limit(10.0)  # where it is tested how long a host waits: it must not seem to be gone while it is only slow
UNICODE = "no such clip: Übersicht_映像.mp4"
# What os.fsdecode makes of a file name that is not UTF-8.
UNDECODABLE = "cannot read caf\udce9.mp4"


def described(job: Callable, *args) -> str:
    """The error that ``job`` raises, as text."""
    try:
        job(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


# ---- exchanges ----


def pattern(host: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that differs between hosts, and whose values every dtype here holds exactly."""
    return ((torch.arange(torch.Size(shape).numel()) + 37 * host) % 251).view(shape).to(dtype)


def all_gather_job(hosts: HostGroup, shape: tuple[int, ...], dtype: torch.dtype):
    before = hosts.bytes_received
    mine = pattern(hosts.rank, shape, dtype)
    gathered = hosts.all_gather(mine).wait()
    assert torch.equal(gathered, torch.stack([pattern(h, shape, dtype) for h in range(hosts.size)]))
    assert gathered.dtype == dtype
    assert hosts.bytes_received - before == (hosts.size - 1) * mine.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("hosts", SIZES)
def test_all_gather(pool, hosts, dtype):
    for shape in ((2, 1, 3, 7, 5), (1,), (), (3, 0, 2)):
        pool.run(hosts, all_gather_job, shape, dtype)


def strided_job(hosts: HostGroup):
    mine = pattern(hosts.rank, (5, 3), torch.float32).t()
    gathered = hosts.all_gather(mine).wait()
    assert torch.equal(gathered[-1], pattern(hosts.size - 1, (5, 3), torch.float32).t())


def test_all_gather_of_a_strided_tensor(pool):
    pool.run(2, strided_job)


def in_flight_job(hosts: HostGroup):
    """Five exchanges at once, of different sizes and kinds, waited for in reverse order, one twice."""
    others = [h for h in range(hosts.size) if h != hosts.rank]
    before = hosts.bytes_received
    exchanges = [hosts.all_gather(pattern(hosts.rank, (4, 1 + i), torch.bfloat16)) for i in range(4)]
    parts = [pattern(hosts.rank, (h + 1,), torch.float32) for h in range(hosts.size)]
    swapped = hosts.all_to_all(parts, [(hosts.rank + 1,)] * hosts.size)
    del parts
    received = swapped.wait()
    for host in range(hosts.size):
        assert torch.equal(received[host], pattern(host, (hosts.rank + 1,), torch.float32))
    for i, exchange in reversed(list(enumerate(exchanges))):
        expected = torch.stack([pattern(h, (4, 1 + i), torch.bfloat16) for h in range(hosts.size)])
        assert torch.equal(exchange.wait(), expected)
    assert exchanges[0].wait() is exchanges[0].wait()
    assert hosts.bytes_received - before == len(others) * (2 * 4 * (1 + 2 + 3 + 4) + 4 * (hosts.rank + 1))


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_several_exchanges_in_flight(pool, hosts):
    pool.run(hosts, in_flight_job)


def asynchronous_job(hosts: HostGroup, started: Path):
    """Host 1 joins only once host 0's calls have returned; calls that block would keep both from going on."""
    if hosts.rank == 1:
        wait_for(started.exists)
    exchange = hosts.all_gather(torch.full((3,), hosts.rank))
    swapped = hosts.all_to_all([torch.full((2,), hosts.rank)] * 2, [(2,)] * 2)
    if hosts.rank == 0:
        started.touch()
    assert exchange.wait().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [part.tolist() for part in swapped.wait()] == [[0, 0], [1, 1]]


def test_an_exchange_is_started_without_waiting(pool, tmp_path):
    pool.run(2, asynchronous_job, tmp_path / "started")


def part_shape(kind: str, sender: int, receiver: int) -> tuple[int, ...]:
    """The shape of what ``sender`` sends to ``receiver``."""
    return {
        "even": (2, 3),
        "uneven": (1 + 2 * sender + receiver, 3),
        "some empty": (0 if (sender + receiver) % 2 else 2 + receiver, 3),
        "only to the last": (5, 2) if receiver > sender else (0, 2),
        "all empty": (0, 4),
    }[kind]


def all_to_all_job(hosts: HostGroup, kind: str, dtype: torch.dtype):
    before = hosts.bytes_received
    parts = [pattern(hosts.rank + 10 * h, part_shape(kind, hosts.rank, h), dtype) for h in range(hosts.size)]
    shapes = [part_shape(kind, h, hosts.rank) for h in range(hosts.size)]
    received = hosts.all_to_all(parts, shapes).wait()
    assert len(received) == hosts.size
    for host, (part, shape) in enumerate(zip(received, shapes, strict=True)):
        assert part.dtype == dtype
        assert torch.equal(part, pattern(host + 10 * hosts.rank, shape, dtype))
    payload = sum(part.nbytes for host, part in enumerate(received) if host != hosts.rank)
    assert hosts.bytes_received - before == payload


@pytest.mark.parametrize("kind", ["even", "uneven", "some empty", "only to the last", "all empty"])
@pytest.mark.parametrize("hosts", SIZES)
def test_all_to_all(pool, hosts, kind):
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        pool.run(hosts, all_to_all_job, kind, dtype)


def broadcast_job(hosts: HostGroup, dtype: torch.dtype):
    before = hosts.bytes_received
    tensor = pattern(hosts.rank, (1, 77), dtype)
    assert hosts.broadcast(tensor) is tensor
    assert torch.equal(tensor, pattern(0, (1, 77), dtype))
    assert hosts.bytes_received - before == (tensor.nbytes if hosts.rank else 0)
    last = hosts.size - 1
    assert torch.equal(hosts.broadcast(pattern(hosts.rank, (3, 5), dtype), last), pattern(last, (3, 5), dtype))


def shift_job(hosts: HostGroup, dtype: torch.dtype):
    """Hosts pass on tensors of different lengths, twice, the second time what they got."""
    held, owner = pattern(hosts.rank, (2, hosts.rank + 1), dtype), hosts.rank
    for _ in range(2):
        before, owner = hosts.bytes_received, (owner - 1) % hosts.size
        held = hosts.shift(held, (2, owner + 1)).wait()
        assert held.dtype == dtype and torch.equal(held, pattern(owner, (2, owner + 1), dtype))
        assert hosts.bytes_received - before == (held.nbytes if hosts.size > 1 else 0)


@pytest.mark.parametrize("hosts", SIZES)
def test_shift_round_the_ring(pool, hosts):
    for dtype in (torch.bfloat16, torch.float64):
        pool.run(hosts, shift_job, dtype)


def control_job(hosts: HostGroup):
    before = hosts.bytes_received
    values = [2**62, -1, 0] if hosts.rank == 0 else None
    assert hosts.broadcast_ints(values, 3) == [2**62, -1, 0]
    floats = [hosts.rank + 1e-12, -float("inf"), 1e300]
    assert hosts.gather_floats(floats) == [[h + 1e-12, -float("inf"), 1e300] for h in range(hosts.size)]
    hosts.barrier()
    hosts.require_same("the prompt", b"the same")
    hosts.let_others_report()
    assert hosts.bytes_received == before, "statuses and tokens are not payload"


@pytest.mark.parametrize("hosts", SIZES)
def test_broadcast_and_small_values(pool, hosts):
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        pool.run(hosts, broadcast_job, dtype)
    pool.run(hosts, control_job)


def different_job(hosts: HostGroup):
    failure = described(hosts.require_same, "the prompt", b"b" if hosts.rank == 2 else b"a")
    hosts.barrier()
    return failure


def test_values_that_differ_are_refused_on_every_host(pool):
    assert pool.run(3, different_job) == ["HostError: the prompt of host 2 differs from that of host 0"] * 3


# ---- groups ----


def test_without_torchrun_there_is_one_host(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for hosts in (HostGroup.from_env("cpu"), HostGroup.single("cpu")):
        assert (hosts.rank, hosts.size, hosts.device.type) == (0, 1, "cpu")
        assert torch.equal(hosts.all_gather(torch.arange(3)).wait(), torch.arange(3)[None])
        assert hosts.broadcast_ints([4, 5], 2) == [4, 5]
        assert hosts.gather_floats([0.5]) == [[0.5]]
        assert hosts.bytes_received == 0
        hosts.barrier()
        with pytest.raises(KeyError), hosts.collective_stage("prefill"):
            raise KeyError("its own")
        hosts.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("message", ["its own", UNICODE, UNDECODABLE, ""], ids=ascii)
def test_one_host_raises_its_own_error(message):
    with pytest.raises(ValueError) as caught, HostGroup.single("cpu").local_stage("reading"):
        raise ValueError(message)
    assert str(caught.value) == message


def subgroup_job(world: HostGroup, members: list[int]):
    """Ranks in a subgroup are the subgroup's own."""
    group = dist.new_group(members)
    seen = None
    if world.rank in members:
        hosts = HostGroup.from_process_group(group, "cpu", timeout=GROUP_TIMEOUT)
        position = pattern(members[0], (3,), torch.float32)
        mine = pattern(world.rank, (3,), torch.float32)
        gathered = hosts.all_gather(mine).wait()
        assert torch.equal(gathered, torch.stack([pattern(m, (3,), torch.float32) for m in members]))
        assert torch.equal(hosts.broadcast(mine), position)
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


def test_a_subgroup(pool):
    members = [2, 5, 7]
    seen = pool.run(8, subgroup_job, members)
    quoted = "HostError: host 1 failed in reading the prompt: ValueError: bad"
    failures = [quoted, "ValueError: bad", quoted]
    expected = [(h, 3, [2], failures[h]) for h in range(3)]
    assert [seen[m] for m in members] == expected
    assert all(seen[h] is None for h in set(range(8)) - set(members))


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
    with hosts.local_stage("another stage"):
        pass
    with hosts.collective_stage("an exchange"):
        gathered = hosts.all_gather(torch.tensor([hosts.rank])).wait()
    assert gathered.flatten().tolist() == list(range(hosts.size))
    return failures[0]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no frame 12"),
        ValueError(UNICODE),
        ValueError(""),
        OddError("odd"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize(("hosts", "bad"), [(2, 0), (2, 1), (3, 1), (8, 7)])
def test_one_hosts_error_reaches_all(pool, hosts, bad, error):
    failures = pool.run(hosts, local_failure_job, [bad], {bad: error})
    own = f"{type(error).__name__}: {error}"
    assert failures.pop(bad) == own
    assert set(failures) == {f"HostError: host {bad} failed in reading the prompt: {own}"}


@pytest.mark.parametrize("letter", ["x", "é", "映"])
def test_a_long_message_is_cut_but_arrives(pool, letter):
    """Longer than a status holds, and cut wherever a letter of several bytes happens to stand."""
    error = ValueError(letter * 5000)
    mine, other = pool.run(2, local_failure_job, [0], {0: error})
    assert mine == f"ValueError: {error}"
    start = "HostError: host 0 failed in reading the prompt: ValueError: "
    assert other.startswith(start + letter * 1000)
    assert set(other.removeprefix(start)) <= {letter, "\N{REPLACEMENT CHARACTER}"}


def test_where_all_hosts_fail_each_raises_its_own_error(pool):
    errors = {h: ValueError(f"bad file of host {h}") for h in range(3)}
    assert pool.run(3, local_failure_job, [0, 1, 2], errors) == [f"ValueError: {errors[h]}" for h in range(3)]


def test_where_several_hosts_fail_the_others_quote_the_first(pool):
    errors = {h: ValueError(f"bad file of host {h}") for h in range(1, 3)}
    failures = pool.run(4, local_failure_job, [1, 2], errors)
    quoted = "HostError: host 1 failed in reading the prompt: ValueError: bad file of host 1"
    assert failures == [quoted, f"ValueError: {errors[1]}", f"ValueError: {errors[2]}", quoted]


# ---- groups that break: each in processes of its own ----


@dataclass
class Outcome:
    """What became of one host's process: the job's result, or its error; and how the process ended."""

    result: Any = None
    error: str | None = None
    seconds: float | None = None
    exit_status: int | None = None


@dataclass
class Store:
    """How the hosts of a fresh group find each other: a file, or a store in the memory of host 0."""

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


def serve_fresh(pipe, rank: int, size: int, store: Store, timeout: float, job: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    longest = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=longest, **store.arguments(rank, size))
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


def run_fresh(store: Store, size: int, job: Callable, *args, timeout: float = GROUP_TIMEOUT) -> list[Outcome]:
    """Run ``job(hosts, *args)`` on a group of new processes, as a program would that lets its errors out."""
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = mp.Pipe(duplex=False)
        processes.append(start(serve_fresh, theirs, rank, size, store, timeout, job, args))
        theirs.close()
        pipes.append(ours)
    statuses = exit_statuses(processes)
    outcomes = []
    for pipe, status in zip(pipes, statuses, strict=True):
        try:
            outcome = pipe.recv()
        except EOFError:
            outcome = Outcome()
        outcome.exit_status = status
        outcomes.append(outcome)
    return outcomes


@pytest.fixture(params=["file", "memory of host 0"])
def store(request, tmp_path):
    return Store(tmp_path, in_host_0=request.param != "file")


def exchange_in_stage(hosts: HostGroup, error: BaseException | None = None) -> None:
    with hosts.collective_stage("encode"):
        if error is not None:
            raise error
        hosts.all_gather(torch.full((1000,), float(hosts.rank))).wait()


def failing_exchange_job(hosts: HostGroup, bad: int, error: Exception, folder: Path, stays: bool = True):
    """Host ``bad`` fails. It ends at once, or, as the others (one may hold the store), once all were told."""
    failure = described(exchange_in_stage, hosts, error if hosts.rank == bad else None)
    began = time.monotonic()
    later = [
        described(exchange_in_stage, hosts),
        described(failing_locally, hosts, -1, ValueError()),
        described(hosts.barrier),
        described(hosts.all_to_all, [torch.ones(1)] * hosts.size, [(1,)] * hosts.size),
    ]
    assert time.monotonic() - began < HANGING, "a broken group refuses at once"
    (folder / f"told {hosts.rank}").touch()
    if stays or hosts.rank != bad:
        wait_for(lambda: len(list(folder.glob("told *"))) == hosts.size)
    return failure, later


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "ends at once"])
def test_a_failure_amid_exchanges_reaches_those_who_wait(store, tmp_path, stays):
    """The failed host lives on, so that the others must look for its message, or it hangs up."""
    error = OddError(UNICODE * 300)
    outcomes = run_fresh(store, 3, failing_exchange_job, 1, error, tmp_path, stays)
    own = f"{type(error).__name__}: {error}"
    quoted = f"HostError: host 1 failed in encode: {own}"
    assert [outcome.exit_status for outcome in outcomes] == [0, 0, 0]
    for rank, (failure, later) in enumerate(outcome.result for outcome in outcomes):
        assert failure == (own if rank == 1 else quoted)
        assert all(text.startswith("HostError: ") and "broke" in text for text in later), later
    assert max(outcome.seconds for outcome in outcomes) < HANGING


@pytest.mark.parametrize("stage", ["local", "collective"])
def test_an_undecodable_message_reaches_all(tmp_path, stage):
    error = ValueError(UNDECODABLE)
    if stage == "local":
        outcomes = run_fresh(Store(tmp_path), 2, local_failure_job, [0], {0: error})
        mine, other = (outcome.result for outcome in outcomes)
        name = "reading the prompt"
    else:
        outcomes = run_fresh(Store(tmp_path), 2, failing_exchange_job, 0, error, tmp_path)
        mine, other = (outcome.result[0] for outcome in outcomes)
        name = "encode"
    assert mine == f"ValueError: {UNDECODABLE}"
    assert other == rf"HostError: host 0 failed in {name}: ValueError: cannot read caf\udce9.mp4"


def all_fail_job(hosts: HostGroup):
    return described(exchange_in_stage, hosts, ValueError(f"own {hosts.rank}"))


def test_where_all_fail_amid_exchanges_each_raises_its_own(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 3, all_fail_job)
    assert [outcome.result for outcome in outcomes] == [f"ValueError: own {h}" for h in range(3)]


def late_job(hosts: HostGroup, met: Path):
    """Host 1 fails and is gone before host 0 begins to exchange."""
    process = int(hosts.gather_floats([os.getpid()])[1][0])
    if hosts.rank == 1:
        wait_for(met.exists)
        exchange_in_stage(hosts, ValueError("bad"))
    met.touch()
    wait_for(lambda: not is_alive(process))
    return described(exchange_in_stage, hosts)


def nearly_late_job(hosts: HostGroup, rounds: int) -> int:
    """Exchanges that end about when those who wait look at their watch, which here is every millisecond."""
    apbv.hosts.group._POLL_SECONDS = 0.001
    delays = random.Random(hosts.rank)
    for turn in range(rounds):
        if turn % hosts.size == hosts.rank:
            time.sleep(delays.uniform(0.0, 0.004))
        hosts.barrier()
    return rounds


def test_an_exchange_that_ends_while_its_wait_runs_out_is_no_loss(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 3, nearly_late_job, 400)
    assert [(outcome.error, outcome.result) for outcome in outcomes] == [(None, 400)] * 3


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_host_that_comes_late_still_learns_the_reason(store, tmp_path):
    late, failed = run_fresh(store, 2, late_job, tmp_path / "met")
    assert late.result == "HostError: host 1 failed in encode: ValueError: bad"
    assert (failed.error, failed.exit_status) == ("ValueError: bad", 1)


def kill_job(hosts: HostGroup, victim: int, stage: str):
    if hosts.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if stage == "local":
        failing_locally(hosts, -1, ValueError())
    else:
        exchange_in_stage(hosts)


@pytest.mark.parametrize("stage", ["local", "collective"])
def test_a_killed_host_ends_the_others(store, stage):
    """Without a word from it, and also where the store that could carry one dies with it."""
    victim = 0 if store.in_host_0 else 2
    outcomes = run_fresh(store, 3, kill_job, victim, stage)
    assert outcomes.pop(victim).exit_status == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error is not None and outcome.error.startswith("HostError: "), outcome
        assert "ended" in outcome.error
        assert outcome.exit_status == 1, "an error, not a crash on the way out"
        assert outcome.seconds < HANGING


def absent_job(hosts: HostGroup, done: Path):
    """Host 1 lives, but does not come."""
    if hosts.rank == 1:
        wait_for(done.exists, GROUP_TIMEOUT)
        return
    try:
        exchange_in_stage(hosts)
    finally:
        done.touch()


def test_a_host_that_never_comes_is_given_up(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 2, absent_job, tmp_path / "done", timeout=WAIT)
    assert outcomes[0].error == f"HostError: host 0 waited more than {WAIT:g} s for another host"
    assert outcomes[0].exit_status == 1
    assert WAIT <= outcomes[0].seconds < HANGING


# ---- processes as torchrun starts them ----


@pytest.fixture
def agent_store():
    """The key-value store that torchrun's agent holds for its processes."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def from_env_job(pipe, rank: int, port: int, done: Path) -> None:
    as_torchrun_starts(rank, 2, port)
    hosts = HostGroup.from_env("cpu", timeout=WAIT)
    pipe.send((hosts.rank, hosts.size, hosts.timeout))
    hosts.barrier()
    try:
        pipe.send(described(absent_job, hosts, done))
    finally:
        hosts.close()
    pipe.send(dist.is_initialized())


def test_from_env_builds_waits_and_leaves(agent_store, tmp_path):
    """The hosts meet, one waits no longer than it was told to and says so, and the group is left behind."""
    processes, pipes = [], []
    for rank in range(2):
        ours, theirs = mp.Pipe(duplex=False)
        processes.append(start(from_env_job, theirs, rank, agent_store.port, tmp_path / "done"))
        theirs.close()
        pipes.append(ours)
    assert exit_statuses(processes) == [0, 0]
    for rank, expected in (
        (0, f"HostError: host 0 waited more than {WAIT:g} s for another host"),
        (1, "nothing raised"),
    ):
        assert [pipes[rank].recv() for _ in range(3)] == [(rank, 2, WAIT), expected, False]


def lonely_job(pipe, port: int) -> None:
    as_torchrun_starts(0, 2, port)
    pipe.send(described(HostGroup.from_env, "cpu", 1.0))


def test_hosts_that_do_not_meet(agent_store):
    ours, theirs = mp.Pipe(duplex=False)
    processes = [start(lonely_job, theirs, agent_store.port)]
    assert exit_statuses(processes, HANGING) == [0]
    assert ours.recv().startswith("HostError: the hosts did not meet within 1 s: ")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(families.save_checkpoint("llama", tmp_path_factory.mktemp("checkpoints") / "llama"))


@pytest.fixture
def infer(tmp_path, checkpoint):
    """Runs ``launch/infer.py`` on two hosts, each in a folder of its own; returns what each printed to stderr."""
    folders = [tmp_path / f"host{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()

    def run(*options: str) -> list[str]:
        asked = ["--model", checkpoint, "--prompt", "Why?", "--max-new-tokens", 2, *options]
        asked += ["--timeout", GROUP_TIMEOUT]
        results = run_hosts(INFER, *asked, hosts=2, folders=folders, timeout=HANGING)
        assert [result.returncode for result in results] == [1, 1]
        return [result.stderr for result in results]

    run.folders = folders
    return run


def only_line(stderr: str) -> str:
    """The one error line; there is no traceback beside it."""
    assert "Traceback" not in stderr, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error")]
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "missing.txt"], "cannot read the context missing.txt: "),
        (["--context", "."], "cannot read the context .: "),
        (["--video", "missing.mp4"], "missing.mp4"),
        (["--image", "missing.png"], "cannot read the image missing.png: "),
        (["--speculate", "ngram", "--draft-host"], "ngram drafts without a second model: there is nothing for"),
        (["--speculate", "ngram", "--keep-ratio", "0.1"], "keep_ratio does not apply"),
        (["--speculate", "vanilla"], "speculative decoding by vanilla needs a draft model"),
        (
            ["--speculate", "vanilla", "--draft-model", "./missing"],
            "cannot load the model ./missing: there is no ",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_clear_line_on_every_host(infer, options, message):
    for rank, stderr in enumerate(infer(*options)):
        line = only_line(stderr)
        assert line.startswith(f"error (host {rank}): ")
        assert message in line


@pytest.mark.parametrize("bad", [0, 1])
def test_a_file_that_one_host_lacks_is_told_by_all(infer, bad):
    (infer.folders[1 - bad] / "context.txt").write_text("A long text. " * 50)
    lines = [only_line(stderr) for stderr in infer("--context", "context.txt")]
    own = "cannot read the context context.txt: "
    assert lines[bad].startswith(f"error (host {bad}): {own}")
    quoted = f"host {bad} failed in reading the options: ValueError: {own}"
    assert lines[1 - bad].startswith(f"error (host {1 - bad}): {quoted}")


def test_torchrun_lets_every_host_say_why(tmp_path):
    """torchrun stops the others once one process has failed: by then each has printed its line."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*run, str(INFER), "--model", str(tmp_path / "nothing"), "--prompt", "Why?"],
        capture_output=True,
        text=True,
        timeout=limit(600.0),
        cwd=tmp_path,
    )
    assert result.returncode != 0
    assert "[rank" not in result.stderr, "no traceback of ours"
    lines = sorted(line for line in result.stderr.splitlines() if line.startswith("error"))
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"error (host {rank}): cannot load the model {tmp_path / 'nothing'}: ")
