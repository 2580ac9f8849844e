"""Hosts on two nodes, which share nothing but the network between them; and when that falls silent."""

import os
import sys
from contextlib import closing

import pytest

from nodes import NAMES, TwoNodes
from patience import HANGING, limit, wait_for
from scripts import HELPERS, ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
STARTING = limit(300.0)

pytestmark = pytest.mark.thorough


@pytest.fixture
def nodes(tmp_path):
    with closing(TwoNodes(tmp_path)) as nodes:
        yield nodes


def test_a_network_that_falls_silent_ends_both_nodes(nodes, tmp_path):
    """Behind a right answer, amid the next; the node without the key-value store cannot even ask what happened."""
    # Long enough for hosts to wait for each other while they load the model on a busy machine.
    decoding, timeout, processes = tmp_path / "decoding", limit(8.0), []
    meeting = ["--master-addr", NAMES[0], "--master-port", "29500", "--node-rank"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for node in range(2):
        with open(tmp_path / f"{node}.stdout", "w") as stdout, open(tmp_path / f"{node}.stderr", "w") as stderr:
            words = [*TORCHRUN, *meeting, node, HELPERS / "ask_endlessly.py", decoding, timeout]
            processes.append(nodes.start(node, words, stdout=stdout, stderr=stderr, env=environment))

    def printed(name: str) -> list[str]:
        return [(tmp_path / f"{node}.{name}").read_text() for node in range(2)]

    wait_for(lambda: decoding.exists() or processes[0].poll() is not None, STARTING)
    assert decoding.exists(), printed("stderr")
    assert printed("stdout") == ["X J P H E L\n"] * 2
    nodes.cut()
    assert [process.wait(timeout + HANGING) for process in processes] == [1, 1]
    assert not any("[rank" in stderr for stderr in printed("stderr")), "torchrun's own traceback alone"
    lines = [line for stderr in printed("stderr") for line in stderr.splitlines() if line.startswith("error")]
    waited = [f"error (host {n}): host {n} waited more than {timeout:g} s for another host" for n in range(2)]
    silent = "; the hosts' key-value store does not answer either: the network may be cut"
    assert lines == [waited[0], waited[1] + silent]
