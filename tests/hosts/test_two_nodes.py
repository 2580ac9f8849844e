"""Hosts on two nodes, which share nothing but the network between them; and when that falls
silent."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import closing, suppress
from pathlib import Path

import pytest

from apbv_tests.patience import HANGING, limit, wait_for
from apbv_tests.scripts import ROOT

INTERFACE = "eth0"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
NAMES = ("node0", "node1")
# A name of its own, and how names resolve there: both for this command alone.
_AS_NODE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class TwoNodes:
    """Close it: it holds namespaces of the machine, and ends what still runs in them.

    The test is skipped where a tool or the right to use it is missing.
    """

    def __init__(self, folder: Path):
        if not shutil.which("ip") or not shutil.which("unshare") or os.geteuid() != 0:
            pytest.skip("needs the tools ip and unshare, and root, for network namespaces")
        self._hosts_file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        self._namespaces = [f"apbv-{uuid.uuid4().hex[:8]}-{name}" for name in NAMES]
        try:
            for namespace in self._namespaces:
                _ip("netns", "add", namespace)
            here, there = self._namespaces
            cable = ("type", "veth", "peer", "name", INTERFACE, "netns", there)
            _ip("link", "add", INTERFACE, "netns", here, *cable)
            for namespace, address in zip(self._namespaces, ADDRESSES, strict=True):
                _ip("-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "link", "set", INTERFACE, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"cannot make network namespaces: {error.stderr.strip()}")

    def start(self, node: int, command: list, **options) -> subprocess.Popen:
        """A command on a node, as a user of that node would start it."""
        as_node = [
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            _AS_NODE,
            "sh",
            self._hosts_file,
            NAMES[node],
        ]
        words = ["ip", "netns", "exec", self._namespaces[node], *as_node, *command]
        return subprocess.Popen([str(word) for word in words], text=True, **options)

    def cut(self) -> None:
        """From now on neither node hears the other, nor anything from the network, such as that it
        is gone.

        Frames go to a hardware address that nobody has.
        """
        for node, namespace in enumerate(self._namespaces):
            nobody = ("lladdr", "02:00:00:00:00:ff", "dev", INTERFACE, "nud", "permanent")
            _ip("-n", namespace, "neighbour", "replace", ADDRESSES[1 - node], *nobody)

    def close(self) -> None:
        for namespace in self._namespaces:
            with suppress(subprocess.CalledProcessError):  # not made
                for process in _ip("netns", "pids", namespace).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                _ip("netns", "delete", namespace)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
STARTING = limit(300.0)

pytestmark = pytest.mark.thorough


@pytest.fixture
def nodes(tmp_path):
    with closing(TwoNodes(tmp_path)) as nodes:
        yield nodes


def test_a_network_that_falls_silent_ends_both_nodes(nodes, tmp_path):
    """Behind a right answer, amid the next; the node without the key-value store cannot even ask
    what happened."""
    # Long enough for hosts to wait for each other while they load the model on a busy machine.
    decoding, timeout, processes = tmp_path / "decoding", limit(8.0), []
    meeting = ["--master-addr", NAMES[0], "--master-port", "29500", "--node-rank"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for node in range(2):
        with (
            open(tmp_path / f"{node}.stdout", "w") as stdout,
            open(tmp_path / f"{node}.stderr", "w") as stderr,
        ):
            words = [
                *TORCHRUN,
                *meeting,
                node,
                Path(__file__).with_name("ask_endlessly.py"),
                decoding,
                timeout,
            ]
            processes.append(
                nodes.start(node, words, stdout=stdout, stderr=stderr, env=environment)
            )

    def printed(name: str) -> list[str]:
        return [(tmp_path / f"{node}.{name}").read_text() for node in range(2)]

    wait_for(lambda: decoding.exists() or processes[0].poll() is not None, STARTING)
    assert decoding.exists(), printed("stderr")
    assert printed("stdout") == ["X J P H E L\n"] * 2
    nodes.cut()
    assert [process.wait(timeout + HANGING) for process in processes] == [1, 1]
    assert not any("[rank" in stderr for stderr in printed("stderr")), (
        "torchrun's own traceback alone"
    )
    lines = [
        line
        for stderr in printed("stderr")
        for line in stderr.splitlines()
        if line.startswith("error")
    ]
    waited = [
        f"error (host {n}): host {n} waited more than {timeout:g} s for another host"
        for n in range(2)
    ]
    silent = "; the hosts' key-value store does not answer either: the network may be cut"
    assert lines == [waited[0], waited[1] + silent]
