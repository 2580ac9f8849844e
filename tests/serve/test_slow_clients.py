"""Clients whose headers or bodies come slowly, or never, keep nobody else waiting."""

import asyncio
import socket
import threading
from functools import partial

import pytest
import uvicorn

from apbv.serve.http.connections import Connections, HttpProtocol

from apbv_tests.patience import HANGING, wait_for
from apbv_tests.servers import InProcess, asking


async def trickle(went_on: asyncio.Event, first: bytes = b"{"):
    yield first
    await went_on.wait()
    yield asking()[1:]


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_half_read_bodies_take_no_place_and_give_way_to_others(app: InProcess, monkeypatch, bound):
    """The oldest first, and where there are more of them than the queue has places."""
    monkeypatch.setattr("apbv.serve.http.bodies.MOST_HALF_READ", 8 if bound == "number" else 2**20)
    first = b"{" if bound == "number" else b"{" + b" " * 2**19

    async def ask_beside() -> list[int]:
        went_on = asyncio.Event()
        slow = [
            asyncio.create_task(
                app.client.post("/v1/chat/completions", content=trickle(went_on, first))
            )
            for _ in range(10)
        ]
        await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        reply = await app.client.post("/v1/chat/completions", content=asking())
        given_up = [task.done() for task in slow]
        went_on.set()
        statuses = [reply.status_code, *[(await task).status_code for task in slow]]
        return given_up, statuses

    given_up, statuses = app.loop.run_until_complete(asyncio.wait_for(ask_beside(), HANGING))
    dropped = given_up.index(False)
    assert 0 < dropped < 5 and not any(given_up[dropped:])
    assert statuses == [200] + [408] * dropped + statuses[1 + dropped :]
    assert set(statuses[1 + dropped :]) <= {200, 429}


@pytest.fixture
def address():
    """A server on this machine that has nothing to say."""

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    protocol = partial(HttpProtocol, connections=Connections(8))
    server = uvicorn.Server(
        uvicorn.Config(app, http=protocol, port=0, lifespan="off", log_config=None)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        thread.join(HANGING)


def test_headers_have_to_come_within_a_time(monkeypatch, address):
    """Also behind an answer, on a connection that is kept."""
    monkeypatch.setattr("apbv.serve.http.connections.HEADER_SECONDS", 0.2)
    for begun in (b"", b"GET / HTTP/1.1\r\nHost:", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(address, HANGING) as client:
            client.sendall(begun)
            if begun.endswith(b"\r\n\r\n"):
                assert client.recv(1000).startswith(b"HTTP/1.1 204")
                client.sendall(b"GET /")
            assert client.recv(1000) in (b"", b"HTTP/1.1 400 Bad Request")


LENGTH = b"Content-Length: 13\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = b"3\r\nabc\r\n0\r\n\r\n"


def reply_to(address, headers: bytes, body: bytes) -> bytes:
    """All that the server says until it hangs up, or has answered the same again on a connection
    that it keeps."""
    request = b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n%s" % (headers, body)
    said = b""
    with socket.create_connection(address, HANGING) as client:
        client.sendall(request + request)
        while said.count(b"HTTP/1.1 204") < 2:
            piece = client.recv(1000)
            if not piece:
                break
            said += piece
    return said


def test_a_request_with_two_lengths_ends_its_connection(address):
    """What follows may be part of it, or not: nothing of that is read."""
    for headers in (
        LENGTH + CHUNKED,
        CHUNKED + LENGTH,
        (LENGTH + CHUNKED).lower(),
        CHUNKED + b"X: y\r\n" + LENGTH,
    ):
        said = reply_to(address, headers, BODY)
        assert said.startswith(b"HTTP/1.1 400") and b"connection: close" in said.lower()
        assert said.count(b"HTTP/1.1") == 1
    for headers, body in ((CHUNKED, BODY), (LENGTH, b"x" * 13)):
        assert reply_to(address, headers, body).count(b"HTTP/1.1 204") == 2
