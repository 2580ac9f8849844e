"""How offered KV ends, who may have it, and where it is given out."""

import socket
from contextlib import ExitStack

import pytest

from apbv import HostError, HostGroup, StorageError
from apbv.kv import offers as offers_module
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV, drop
from apbv.kv.sending import Share
from apbv.kv.ticket import new_token, new_transfer
from apbv.testing.simulated import simulate

from apbv_tests.fresh_hosts import described
from apbv_tests.offered import (
    a_ticket,
    asking_for_all,
    changed,
    fetch,
    is_free,
    made_up,
    message,
    of_memory,
    offer,
)
from apbv_tests.patience import HANGING, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")


# ---- who may have it ----


def test_only_who_knows_the_secret_is_told_anything(offers, ended):
    ticket = offer(offers, made_up())
    stranger = changed(ticket, token=new_token())
    for call in (fetch, drop, lambda ticket: RemoteKV(ticket).confirm()):
        with pytest.raises(StorageError, match=f"token for transfer {ticket.transfer} is wrong"):
            call(stranger)
    with pytest.raises(StorageError, match="unknown KV transfer"):
        fetch(changed(ticket, transfer=new_transfer()))
    assert not ended and len(fetch(ticket)) == 2


def ask_raw(offers: Offers, content: bytes) -> bytes:
    with socket.create_connection(offers.address, HANGING) as connection:
        connection.sendall(content)
        return b"".join(iter(lambda: connection.recv(4096), b""))


NONSENSE = {
    "another protocol": (b"GET / HTTP/1", b"KV protocol"),
    "deep nesting": (b"apbv-kv\x01\x00\x80\x00\x00" + b"[" * 0x8000, b"malformed KV message"),
    "something else to do": (message(do=["fetch"]), b"'fetch'"),
    "no transfer": (message(do="drop", token="a"), b"must name its transfer"),
    "half a character": (message(do="drop", transfer="\ud800", token="a"), b"unknown KV transfer"),
}


def test_nonsense_gets_an_answer_and_harms_nobody(offers):
    ticket = offer(offers, made_up())
    for name, (content, answer) in NONSENSE.items():
        assert answer in ask_raw(offers, content), name
    assert len(fetch(ticket)) == 2


def test_a_part_that_there_is_not_is_refused(offers):
    ticket = offer(offers, made_up())
    for part in ({"tokens": [5, 2]}, {"kv_heads": ["0", 1]}, {"layers": [0, 3]}, {"layers": None}):
        assert b"error" in ask_raw(offers, asking_for_all(ticket, **part)), part
    assert b"num_readers" in ask_raw(offers, asking_for_all(ticket, do="done", num_readers=0))
    assert b"['closed']" in ask_raw(offers, asking_for_all(ticket, do="end", how=["closed"]))
    with pytest.raises(ValueError, match="not within"):
        RemoteKV(ticket).layers(range(0, 13))


def test_who_asks_for_nothing_holds_nobody_up(offers, monkeypatch):
    monkeypatch.setattr(offers_module, "REQUEST_SECONDS", 0.05)
    ticket = offer(offers, made_up())
    with socket.create_connection(offers.address, HANGING) as silent:
        assert len(fetch(ticket)) == 2
        assert silent.recv(1) == b""


def test_silent_connections_give_way_to_who_comes_and_to_who_knows_the_secret(offers, monkeypatch):
    """However many there are, and for however long they may stay."""
    monkeypatch.setattr("apbv.kv.sending.MAX_STRANGERS", 4)
    ticket = offer(offers, made_up(num_layers=8, num_tokens=100_000))
    silent = []
    with ExitStack() as stack:
        reading = stack.enter_context(RemoteKV(ticket)).layers(range(100_000))
        next(reading)
        for _ in range(9):
            silent.append(stack.enter_context(socket.create_connection(offers.address, HANGING)))
        assert len(list(reading)) == 7 and len(fetch(ticket)) == 8
        assert [each.recv(1) for each in silent[:5]] == [b""] * 5
        silent[-1].settimeout(0.01)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


# ---- how it ends ----


def test_kv_that_nobody_fetches_expires(offers, ended, clock):
    layers = made_up()
    memory = of_memory(layers)
    ticket = offer(offers, layers)
    del layers
    for seconds in (999, 999, 3):
        clock(seconds)
        # So that the clock's thread looks at the time.
        offers.drop(offer(offers, made_up()).transfer)
        # Just in time, and that gives as much time again.
        assert seconds == 3 or len(fetch(ticket)) == 2
    wait_for(lambda: (ticket.transfer, "expired", ticket.num_bytes) in ended)
    assert is_free(memory)
    with pytest.raises(StorageError, match=f"the KV of transfer {ticket.transfer} has expired"):
        fetch(ticket)


def test_closing_ends_everything(ended):
    offers = Offers(HostGroup.single("cpu"), on_end=lambda *how: ended.append(how))
    layers = made_up()
    memory = of_memory(layers)
    ticket = offer(offers, layers)
    del layers
    offers.close()
    assert is_free(memory) and [how for _, how, _ in ended] == ["closed"]
    with pytest.raises(StorageError, match="cannot export KV"):
        offer(offers, made_up())
    with pytest.raises(StorageError, match=f":{offers.address[1]} cannot be reached"):
        fetch(ticket)


def other_host_job(hosts: HostGroup) -> None:
    """Host 1 holds KV of which it never hears again."""
    with Offers(hosts, seconds=0.02) as offers:
        if hosts.rank:
            ticket = a_ticket(sources=(offers.address,))
            offers.hold(ticket.transfer, ticket.token, Share([range(12)], range(3), made_up()))
            wait_for(lambda: described(fetch, ticket).endswith("has expired"))


def test_what_host_0_forgets_expires_all_the_same():
    simulate(2, other_host_job)


# ---- where it listens ----


def test_the_ticket_has_an_address_by_which_this_machine_is_reached():
    with Offers(HostGroup.single("cpu"), host="0.0.0.0") as offers:
        assert offers.address[0] != "0.0.0.0" and len(fetch(offer(offers, made_up()))) == 2
    with Offers(HostGroup.single("cpu"), advertised="prefill.example") as named:
        assert named.address == ("prefill.example", named.address[1])


def port_job(hosts: HostGroup, port: int) -> str:
    with pytest.raises((ValueError, HostError)) as error:
        Offers(hosts, port=port)
    return str(error.value)


def test_every_process_has_a_port_of_its_own_and_a_taken_one_is_refused_on_all(pool):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1  # that of host 1 is taken
        assert all("in use" in said for said in pool.run(2, port_job, port))
