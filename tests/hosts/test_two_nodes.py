"""Hosts on two nodes, which share nothing but the network between them; and when that falls silent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodes import NAMES, NoNodes, TwoNodes
from patience import HANGING, limit, wait_for
from scripts import HELPERS, ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
STARTING = limit(300.0)

pytestmark = pytest.mark.thorough


@pytest.fixture
def nodes(tmp_path):
    try:
        nodes = TwoNodes(tmp_path)
    except NoNodes as reason:
        pytest.skip(str(reason))
    yield nodes
    nodes.close()


def start_torchrun(nodes: TwoNodes, folder: Path, rendezvous: list[list], *command) -> list[subprocess.Popen]:
    """A script on both nodes, each with its own way to find the other; what they print goes to ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = []
    for node in range(2):
        with open(folder / f"{node}.stdout", "w") as stdout, open(folder / f"{node}.stderr", "w") as stderr:
            words = [*TORCHRUN, *rendezvous[node], *command]
            processes.append(nodes.start(node, words, stdout=stdout, stderr=stderr, env=environment))
    return processes


def printed(folder: Path, name: str) -> list[str]:
    return [(folder / f"{node}.{name}").read_text() for node in range(2)]


def error_line(stderr: str) -> str:
    """The one line of ours; torchrun's own traceback stands beside it."""
    assert "[rank" not in stderr, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error")]
    return line


def test_a_network_that_falls_silent_ends_both_nodes(nodes, tmp_path):
    """Behind a right answer, amid the next; the node without the key-value store cannot even ask what happened."""
    # Long enough for hosts to wait for each other while they load the model on a busy machine.
    decoding, timeout = tmp_path / "decoding", limit(8.0)
    meeting = ["--master-addr", NAMES[0], "--master-port", "29500", "--node-rank"]
    script = HELPERS / "ask_endlessly.py"
    processes = start_torchrun(nodes, tmp_path, [[*meeting, "0"], [*meeting, "1"]], script, decoding, timeout)
    wait_for(lambda: decoding.exists() or processes[0].poll() is not None, STARTING)
    assert decoding.exists(), printed(tmp_path, "stderr")
    assert printed(tmp_path, "stdout") == ["X J P H E L\n"] * 2
    nodes.cut()
    assert [process.wait(timeout + HANGING) for process in processes] == [1, 1]
    lines = [error_line(stderr) for stderr in printed(tmp_path, "stderr")]
    waited = [f"error (host {n}): host {n} waited more than {timeout:g} s for another host" for n in range(2)]
    assert lines[0] == waited[0]
    assert lines[1] == f"{waited[1]}; the hosts' key-value store does not answer either: the network may be cut"
