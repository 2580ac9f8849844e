"""KV from the memory of the hosts that prefilled it to a process of somebody else's."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from apbv import Engine, HostError, HostGroup, PrefillConfig, StorageError, demo
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV, drop

from apbv_tests.offered import FRAMES, QUESTION, changed, is_free, of_memory, offered
from apbv_tests.patience import wait_for


def assert_same(layers, expected, tokens: slice = slice(None), heads: slice = slice(None)) -> None:
    for found, (keys, values) in zip(layers, expected, strict=True):
        assert torch.equal(found[0], keys[heads, tokens]) and torch.equal(
            found[1], values[heads, tokens]
        )


# Hosts, sources and settings: members of a host share its heads; a short text one host computes
# alone.
OFFERS = [
    (2, 1, {"kv": "gathered", "passing_len": 8}),
    (4, 4, {"kv": "sharded", "passing_len": 8, "tensor_parallel": 2}),
    (2, 1, {"kv": "sharded", "text": "which " * 80}),
]


@pytest.mark.parametrize(("hosts", "num_sources", "prefill"), OFFERS)
def test_a_consumer_gets_the_bytes_that_the_hosts_hold(pool, tmp_path, hosts, num_sources, prefill):
    """All of it, and parts; then it ends, and its memory is accounted for."""
    with offered(pool, hosts, tmp_path / "kv", **prefill) as found:
        n = found.ticket.num_tokens
        assert len(found.ticket.sources) == num_sources
        with RemoteKV(found.ticket) as remote:
            assert_same(remote.layers(range(n)), found.layers)
            assert_same(
                remote.layers(range(n - 1), range(1, 2)), found.layers, slice(n - 1), slice(1, 2)
            )
            assert_same(
                remote.layers(range(3, 70), layers=range(2, 4)), found.layers[2:], slice(3, 70)
            )
            assert not list(remote.layers(range(n), layers=range(1, 1)))
            assert found.ending() is None
            remote.confirm()
        wait_for(found.ending)
        assert found.ending() == f"fetched {found.ticket.num_bytes}"
        with pytest.raises(StorageError, match=f"{found.ticket.transfer} was already fetched"):
            list(RemoteKV(found.ticket).layers(range(n)))


def test_an_offer_ends_when_all_readers_have_confirmed(pool, tmp_path):
    """As the two halves of a tensor-parallel consumer would, at the same time; one of them after a
    failure."""
    with offered(pool, 2, tmp_path / "kv", kv="sharded", passing_len=8) as found:
        n = found.ticket.num_tokens

        def read(head: int) -> None:
            with RemoteKV(found.ticket, num_readers=2) as given_up:
                next(given_up.layers(range(n)))
            with RemoteKV(found.ticket, num_readers=2) as remote:
                layers = remote.layers(range(n), range(head, head + 1))
                assert_same(layers, found.layers, heads=slice(head, head + 1))
                remote.confirm()
                remote.confirm()  # its answer may have been lost

        with ThreadPoolExecutor(2) as executor:
            executor.submit(read, 0).result()
            assert found.ending() is None
            executor.submit(read, 1).result()
        wait_for(found.ending)
        assert found.ending().startswith("fetched")


def test_what_a_consumer_drops_is_free_on_all_hosts(pool, tmp_path):
    with offered(pool, 2, tmp_path / "kv", kv="sharded", passing_len=8) as found:
        drop(found.ticket)
        wait_for(found.ending)
        assert found.ending().startswith("dropped")
        # Each source says so, and not only the one that was told.
        for source in found.ticket.sources:
            ticket = changed(found.ticket, sources=(source,))
            with pytest.raises(StorageError, match="was dropped by its consumer"):
                list(RemoteKV(ticket).layers(range(ticket.num_tokens)))


def failing_job(hosts: HostGroup) -> str:
    """The leader cannot say which model it was."""

    def fail():
        raise OSError("weights that are gone")

    engine = Engine.from_pretrained(
        "demo", hosts=hosts, dtype="float32", prefill=PrefillConfig(kv="sharded")
    )
    state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=FRAMES)
    memory = of_memory([(layer.keys, layer.values) for layer in state.kv.cache.layers])
    with Offers(hosts) as offers:
        with pytest.raises((OSError, HostError)) as error:
            replace(state, model=fail).offer(offers)
        found = str(error.value)
        del state, error
        gc.collect()
        assert is_free(memory)
    return found


def test_an_offer_that_fails_on_one_host_fails_on_all_and_leaves_nothing(pool):
    assert all("weights that are gone" in message for message in pool.run(2, failing_job))
