"""What goes wrong between a source of KV and its consumer."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from apbv import HostGroup, StorageError
from apbv.kv import offers as offers_module
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV, drop
from apbv.kv.sending import Share
from apbv.kv.ticket import Ticket

from apbv_tests.offered import (
    BIG,
    a_ticket,
    asking_for_all,
    changed,
    fetch,
    is_free,
    made_up,
    of_memory,
    offer,
)
from apbv_tests.patience import HANGING, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_who_reads_on_from_dropped_kv_is_told(offers, ended):
    layers = made_up(**BIG)
    memory, ticket = of_memory(layers), offer(offers, layers)
    del layers
    with RemoteKV(ticket) as kv:
        reading = kv.layers(range(ticket.num_tokens))
        next(reading)
        drop(ticket)
        with pytest.raises(StorageError, match="was dropped by its consumer"):
            list(reading)
    wait_for(lambda: ended)
    assert is_free(memory)


def asked_for_all(offers: Offers, ticket: Ticket) -> socket.socket:
    """A connection that asks for everything and reads nothing."""
    connection = socket.create_connection(offers.address, HANGING)
    connection.sendall(asking_for_all(ticket))
    return connection


def test_a_reader_that_stops_costs_nothing_and_may_try_again(ended, monkeypatch):
    monkeypatch.setattr(offers_module, "IDLE_SECONDS", 0.2)
    with Offers(HostGroup.single("cpu"), on_end=lambda *how: ended.append(how)) as offers:
        ticket = offer(offers, made_up(**BIG))
        with asked_for_all(offers, ticket) as connection:
            connection.recv(1)
            wait_for(
                lambda: (
                    not [thread for thread in threading.enumerate() if thread.name == "kv-sender"]
                )
            )
        with RemoteKV(ticket) as kv:  # a part that buffers hold: the time is short for all readers
            assert not ended and len(list(kv.layers(range(9)))) == ticket.num_layers


def test_a_reader_that_stops_does_not_keep_what_has_ended(monkeypatch):
    """Its memory is free when its end is told, since whoever counts it gives it to others at
    once."""
    monkeypatch.setattr(offers_module, "GRACE_SECONDS", 0.05)
    layers = made_up(**BIG)
    ended = []
    memory = of_memory(layers)
    with Offers(
        HostGroup.single("cpu"), on_end=lambda *how: ended.append((*how, is_free(memory)))
    ) as offers:
        ticket = offer(offers, layers)
        del layers
        with asked_for_all(offers, ticket) as connection:
            connection.recv(1)
            drop(ticket)
            wait_for(lambda: ended)
    assert ended == [(ticket.transfer, "dropped", ticket.num_bytes, True)]


def test_a_silent_source_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for call in (fetch, drop):
            with pytest.raises(StorageError, match="cannot be reached: timed out"):
                call(a_ticket(sources=(silent.getsockname(),)), timeout=0.1)


@contextmanager
def relay(
    source: tuple[str, int], place: int, act: Callable[[bytearray, int], bytes]
) -> Iterator[tuple]:
    """A way to a source on which something is done to one of the bytes that come back; b"" ends the
    connection."""

    def pump() -> None:
        passed = 0
        upstream = socket.create_connection(source, HANGING)
        with suppress(OSError), server.accept()[0] as client, upstream:
            upstream.sendall(client.recv(1 << 16))
            while content := upstream.recv(1 << 16):
                before, passed = passed, passed + len(content)
                content = (
                    act(bytearray(content), place - before) if before <= place < passed else content
                )
                if not content:
                    return
                client.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pump)
        thread.start()
        yield server.getsockname()
    thread.join()


def flip(content: bytearray, index: int) -> bytes:
    content[index] ^= 4
    return bytes(content)


WRONGS = [(0, flip, r"layer 0 .* checksum"), (1, lambda *_: b"", "in layer 1 of 2")]


@pytest.mark.parametrize(("layer", "act", "message"), WRONGS)
def test_what_goes_wrong_on_the_way_is_found(offers, layer, act, message):
    ticket = offer(offers, made_up(num_tokens=4096))
    place = layer * ticket.num_bytes // 2 + 100_000
    with relay(ticket.sources[0], place, act) as way, pytest.raises(StorageError, match=message):
        fetch(changed(ticket, sources=(way,)))
    assert len(fetch(ticket)) == 2


def test_sources_that_do_not_hold_everything_once_are_refused(offers):
    ticket = offer(offers, made_up(num_tokens=5), [range(5)])
    with Offers(HostGroup.single("cpu")) as other:
        share = Share([range(4, 11)], range(3), made_up(num_tokens=7))
        other.hold(ticket.transfer, ticket.token, share)
        ticket = changed(ticket, num_tokens=12, sources=(*ticket.sources, other.address))
        with pytest.raises(StorageError, match="every token exactly once"):
            fetch(ticket)
