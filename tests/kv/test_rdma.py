"""KV read out of another process's memory by RDMA; without such a network NIXL takes shared memory or TCP."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from apbv import HostGroup, StorageError
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV, drop
from apbv.kv.sending import Share
from apbv.kv.ticket import Ticket

from offered import a_ticket, fetch, made_up
from patience import HANGING, wait_for
from pool import start

pytest.importorskip("nixl", reason="the extra 'rdma' is not installed")

SIZES = {"num_layers": 9, "num_tokens": 1000, "num_kv_heads": 3, "head_dim": 64}
RUNS = [[range(0, 100), range(700, 1000)], [range(100, 700)]]


def hold_until_killed(path: Path) -> None:
    """Two sources in one process, each with some of the tokens."""
    with ExitStack() as stack:
        sources = [stack.enter_context(Offers(HostGroup.single("cpu"))) for _ in RUNS]
        ticket = a_ticket(sources=tuple(source.address for source in sources), **SIZES)
        for source, runs in zip(sources, RUNS, strict=True):
            rows = torch.cat([torch.tensor(run) for run in runs])
            layers = [tuple(states[:, :, rows] for states in layer) for layer in made_up(**SIZES)]
            source.hold(ticket.transfer, ticket.token, Share(runs, range(3), layers))
        path.with_suffix(".new").write_text(json.dumps(ticket.to_params()))
        path.with_suffix(".new").rename(path)
        time.sleep(HANGING)


@pytest.fixture
def ticket(tmp_path) -> Iterator[Ticket]:
    """That of a process with KV."""
    process = start(hold_until_killed, tmp_path / "ticket")
    wait_for((tmp_path / "ticket").exists)
    yield Ticket.from_params(json.loads((tmp_path / "ticket").read_text()))
    process.kill()
    process.join()


def test_all_and_parts_are_read_as_they_are(ticket):
    expected = made_up(**SIZES)
    for found, layer in zip(fetch(ticket, transport="rdma"), expected, strict=True):
        assert all(torch.equal(got, states[0]) for got, states in zip(found, layer, strict=True))
    with RemoteKV(ticket, transport="rdma") as kv:
        part = kv.layers(range(50, 720), range(1, 2), range(2, 8))
        for found, layer in zip(part, expected[2:8], strict=True):
            assert all(torch.equal(got, states[0, 1:2, 50:720]) for got, states in zip(found, layer, strict=True))


def test_nobody_reads_on_from_kv_that_has_ended(ticket):
    with RemoteKV(ticket, transport="rdma") as kv:
        reading = kv.layers(range(1000))
        next(reading)
        drop(ticket)
        with pytest.raises(StorageError, match=r"closed the connection|was dropped"):
            list(reading)
    with pytest.raises(StorageError, match="was dropped by its consumer"):
        fetch(ticket, transport="rdma")
