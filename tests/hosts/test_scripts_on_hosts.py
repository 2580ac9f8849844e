"""Hosts as torchrun starts them: they meet, they leave, and a bad option is one clear line on each
of them."""

import multiprocessing as mp
import subprocess
import sys

import pytest

from apbv import HostGroup
from apbv.hosts import process_groups, run_on_hosts

from apbv_tests import families
from apbv_tests.fresh_hosts import described
from apbv_tests.patience import GROUP_TIMEOUT, HANGING, limit
from apbv_tests.pool import exit_statuses, start
from apbv_tests.scripts import INFER, as_torchrun_starts, run_hosts


def alone_job(pipe, port: int) -> None:
    as_torchrun_starts(0, 2, port)
    process_groups.POLL_SECONDS = 0.05
    pipe.send(described(HostGroup.from_env, "cpu", 0.1))


def test_hosts_that_do_not_meet(agent_store):
    ours, theirs = mp.Pipe(duplex=False)
    assert exit_statuses([start(alone_job, theirs, agent_store.port)], HANGING) == [0]
    assert ours.recv().startswith("HostError: rendezvous timed out after 0.1 s: ")


def test_a_scripts_error_is_one_line_and_a_fault_has_a_traceback(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert run_on_hosts(lambda hosts: None, device="cuda") == 69
    assert (
        capsys.readouterr().err
        == "error: no such device: cuda; torch finds 0 GPUs on this machine\n"
    )

    assert run_on_hosts(lambda hosts: int("x")) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("ValueError: invalid literal")
    assert run_on_hosts(lambda hosts: None) == 0


def test_a_file_that_one_host_lacks_is_told_by_all_in_one_line(tmp_path):
    """Each host has a folder of its own."""
    model = families.save_checkpoint("llama", tmp_path / "llama")
    folders = [model, tmp_path]
    (folders[0] / "context.txt").write_text("A long text. " * 50)
    asked = [
        "--model",
        model,
        "--prompt",
        "Why?",
        "--timeout",
        GROUP_TIMEOUT,
        "--context",
        "context.txt",
    ]
    results = run_hosts(INFER, *asked, hosts=2, folders=folders, timeout=HANGING)
    own = "cannot read the context context.txt: "
    for rank in range(2):
        assert results[rank].returncode == 65 and "Traceback" not in results[rank].stderr
        (line,) = [line for line in results[rank].stderr.splitlines() if line.startswith("error")]
        assert line.startswith(f"error (host 1): {own}")


@pytest.mark.thorough
def test_under_torchrun_an_error_is_said_once_and_by_its_last_lines(tmp_path):
    """It stops the others once one process has failed: by then each has said why, and the first has
    printed it."""
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(INFER),
    ]
    command = [*run, "--model", str(tmp_path / "nothing"), "--prompt", "Why?"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(600.0), cwd=tmp_path
    )
    assert result.returncode != 0 and "[rank" not in result.stderr, "no traceback of ours"
    told = f"cannot load the model {tmp_path / 'nothing'}: "
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error")] == [lines[0]] and told in lines[0]
    by_torchrun = [
        line.partition("traceback : ")[2].partition(told)[0] for line in lines[1:] if told in line
    ]
    assert sorted(by_torchrun) == ["error (host 0): ", "error (host 1): "] and told in "".join(
        lines[-3:]
    )
