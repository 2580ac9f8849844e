"""Hosts as torchrun starts them: they meet, they leave, and a bad option is one clear line on each of them."""

import multiprocessing as mp
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apbv import HostGroup
from apbv.hosts import run_on_hosts

import families
from fresh_hosts import WAIT, absent_job, described, exchange_in_stage
from patience import GROUP_TIMEOUT, HANGING, limit
from pool import exit_statuses, start
from scripts import INFER, as_torchrun_starts, run_hosts


def lonely_job(hosts: HostGroup) -> str:
    return described(exchange_in_stage, hosts)


def from_env_job(pipe, rank: int, port: int, done: Path) -> None:
    as_torchrun_starts(rank, 2, port)
    hosts = HostGroup.from_env("cpu", timeout=WAIT)
    met = (hosts.rank, hosts.size, hosts.timeout)
    hosts.barrier()
    failure = absent_job(hosts, done, lonely_job)
    hosts.close()
    pipe.send((met, failure, dist.is_initialized()))


@pytest.mark.thorough
def test_from_env_builds_waits_and_leaves(agent_store, tmp_path):
    """The hosts meet, one waits no longer than it was told to and says so, and the group is left behind."""
    ours, theirs = zip(*(mp.Pipe(duplex=False) for _ in range(2)), strict=True)
    args = agent_store.port, tmp_path / "done"
    assert exit_statuses([start(from_env_job, pipe, rank, *args) for rank, pipe in enumerate(theirs)]) == [0, 0]
    waited = f"HostError: host 0 waited more than {WAIT:g} s for another host"
    assert [pipe.recv() for pipe in ours] == [((0, 2, WAIT), waited, False), ((1, 2, WAIT), None, False)]


def alone_job(pipe, port: int) -> None:
    as_torchrun_starts(0, 2, port)
    pipe.send(described(HostGroup.from_env, "cpu", 0.1))


def test_hosts_that_do_not_meet(agent_store):
    ours, theirs = mp.Pipe(duplex=False)
    assert exit_statuses([start(alone_job, theirs, agent_store.port)], HANGING) == [0]
    assert ours.recv().startswith("HostError: the hosts did not meet within 0.1 s: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_scripts_error_is_one_line_and_status_1(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert run_on_hosts(lambda hosts: None, device="cuda") == 1
    assert capsys.readouterr().err == "error: there is no device cuda: torch finds 0 GPUs on this machine\n"

    def body(hosts: HostGroup) -> None:
        raise ValueError("a bad option")

    assert run_on_hosts(body) == 1 and capsys.readouterr().err == "error (host 0): a bad option\n"
    assert run_on_hosts(lambda hosts: None) == 0


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
        asked = ["--model", checkpoint, "--prompt", "Why?", "--timeout", GROUP_TIMEOUT, *options]
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
        ("--context missing.txt", "cannot read the context missing.txt: "),
        ("--speculate ngram --draft-host", "ngram drafts without a second model: there is nothing for"),
        ("--speculate vanilla --draft-model ./missing", "cannot load the model ./missing: there is no "),
    ],
)
def test_a_bad_option_is_one_clear_line_on_every_host(infer, options, message):
    for rank, stderr in enumerate(infer(*options.split())):
        line = only_line(stderr)
        assert line.startswith(f"error (host {rank}): ") and message in line


def test_a_file_that_one_host_lacks_is_told_by_all(infer):
    (infer.folders[0] / "context.txt").write_text("A long text. " * 50)
    first, second = (only_line(stderr) for stderr in infer("--context", "context.txt"))
    own = "cannot read the context context.txt: "
    assert second.startswith(f"error (host 1): {own}")
    assert first.startswith(f"error (host 0): host 1 failed in reading the options: ValueError: {own}")


@pytest.mark.thorough
def test_torchrun_lets_every_host_say_why(tmp_path):
    """torchrun stops the others once one process has failed: by then each has printed its line."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(INFER)]
    command = [*run, "--model", str(tmp_path / "nothing"), "--prompt", "Why?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit(600.0), cwd=tmp_path)
    assert result.returncode != 0
    assert "[rank" not in result.stderr, "no traceback of ours"
    lines = sorted(line for line in result.stderr.splitlines() if line.startswith("error"))
    assert [line.partition(": ")[0] for line in lines] == ["error (host 0)", "error (host 1)"]
    assert all(f"cannot load the model {tmp_path / 'nothing'}: " in line for line in lines)
