"""Offers of KV for tests of one process."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from apbv import HostGroup
from apbv.kv import offers as offers_module
from apbv.kv.offers import Offers

from apbv_tests.patience import wait_for


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no socket stays behind, whatever a test did."""
    before = num_sockets()
    threads = set(threading.enumerate())
    yield
    wait_for(
        lambda: (
            not [t for t in threading.enumerate() if t.name.startswith("kv-") and t not in threads]
        )
    )
    if num_sockets() > before:
        gc.collect()
    assert num_sockets() <= before


def num_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


@pytest.fixture
def ended() -> list[tuple]:
    return []


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """Lets seconds pass for offers."""
    skipped = [0.0]
    fake = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped[0])
    monkeypatch.setattr(offers_module, "time", fake)

    def skip(seconds: float) -> None:
        skipped[0] += seconds

    return skip


@pytest.fixture
def offers(ended) -> Iterator[Offers]:
    with Offers(
        HostGroup.single("cpu"), on_end=lambda *how: ended.append(how), seconds=1000.0
    ) as offers:
        yield offers
