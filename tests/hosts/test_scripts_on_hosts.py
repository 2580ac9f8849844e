"""Hosts as torchrun starts them: they meet, they leave, and a bad option is one clear line on each of them."""

import multiprocessing as mp
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from apbv import HostGroup

import families
from fresh_hosts import WAIT, absent_job, described
from patience import GROUP_TIMEOUT, HANGING, limit
from pool import exit_statuses, start
from scripts import INFER, as_torchrun_starts, run_hosts


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
