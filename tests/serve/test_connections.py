"""More connections than a server can have; and two signals, of which the second ends it at once."""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import uvicorn

from apbv.serve.http.connections import Connections, HttpProtocol, log_in_one_line, most_connections
from apbv.serve.metrics.log import OncePerPeriod
from apbv.serve.server import bind

from apbv_tests.patience import HANGING, wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.servers import ENDLESS, Stream, serving

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Server:
    """An app whose requests for /slow are answered once they may be."""

    def __init__(self, most: int):
        self.connections = Connections(most)
        self.may_answer = threading.Event()
        self.num_slow = 0
        http = partial(HttpProtocol, connections=self.connections)
        options = {
            "http": http,
            "port": 0,
            "lifespan": "off",
            "log_config": None,
            "interface": "asgi3",
        }
        self.server = uvicorn.Server(uvicorn.Config(self.app, **options))

    async def app(self, scope, receive, send):
        if scope["path"] == "/slow":
            self.num_slow += 1
            while not self.may_answer.is_set():
                await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    def connect(self) -> socket.socket:
        return socket.create_connection(self.server.servers[0].sockets[0].getsockname(), HANGING)


@contextmanager
def running(most: int):
    server = Server(most)
    thread = threading.Thread(target=server.server.run)
    thread.start()
    try:
        wait_for(lambda: server.server.started)
        yield server
    finally:
        server.may_answer.set()
        server.server.should_exit = True
        thread.join(HANGING)


def first_line(client: socket.socket) -> bytes:
    return client.recv(1000).partition(b"\r\n")[0]


def test_the_longest_idle_connections_make_room_and_those_with_requests_do_not(caplog):
    with running(8) as server, ExitStack() as stack:
        slow = stack.enter_context(server.connect())
        slow.sendall(REQUEST.replace(b"/", b"/slow", 1))
        wait_for(lambda: server.num_slow == 1)
        kept = stack.enter_context(server.connect())
        kept.sendall(REQUEST)
        assert first_line(kept) == b"HTTP/1.1 204 No Content"
        idle = [stack.enter_context(server.connect()) for _ in range(40)]
        assert kept.recv(1) == b"" and idle[0].recv(1) == b""
        for client in idle[-3:]:
            client.sendall(REQUEST)
            assert first_line(client) == b"HTTP/1.1 204 No Content"
        server.may_answer.set()
        assert first_line(slow) == b"HTTP/1.1 204 No Content"
    assert "8 connections are open" in caplog.text


def test_where_all_have_requests_a_new_connection_is_told_so():
    with running(3) as server, ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(3)]
        for client in busy:
            client.sendall(REQUEST.replace(b"/", b"/slow", 1))
        wait_for(lambda: server.num_slow == 3)
        with server.connect() as another:
            assert first_line(another) == b"HTTP/1.1 503 Service Unavailable"
        server.may_answer.set()
        assert {first_line(client) for client in busy} == {b"HTTP/1.1 204 No Content"}
        with server.connect() as another:  # the others are idle now
            another.sendall(REQUEST)
            assert first_line(another) == b"HTTP/1.1 204 No Content"


def test_a_server_without_descriptors_says_so_once(caplog):
    logger = logging.getLogger("apbv.serve.http.connections")
    once = OncePerPeriod(3600.0)
    logger.addFilter(once)
    loop = asyncio.new_event_loop()
    try:
        for _ in range(2):
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            log_in_one_line(
                loop, {"message": "socket.accept() out of system resource", "exception": error}
            )
        assert [record.getMessage() for record in caplog.records] == [
            "connections cannot be accepted for a second: Too many open files"
        ]
        log_in_one_line(loop, {"message": "another", "exception": ValueError("x")})
        assert caplog.records[-1].name == "asyncio" and caplog.records[-1].exc_info
    finally:
        loop.close()
        logger.removeFilter(once)


def test_connections_leave_descriptors_for_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = len(os.listdir("/dev/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
    try:
        most = most_connections()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert lowered <= raised and (hard <= lowered or raised > lowered)
    assert 8 <= most <= raised // 2


@pytest.mark.parametrize("port", [99_999, 65_536, -1])
def test_a_port_that_does_not_exist_is_not_taken_for_another(port):
    with pytest.raises(ValueError, match=r"ports lie in 0 \.\. 65535"):
        bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "a" * 70, "", "1.2.3.4.5"])
def test_an_address_that_does_not_exist_is_named(host):
    with pytest.raises(ValueError, match=f"cannot listen on {host}:"):
        bind(host, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_answers(tmp_path, number):
    with serving(tmp_path / "server", "--model", "demo", "--grace", 3600) as server:
        stream = Stream(server, **ENDLESS)
        wait_for(lambda: stream.pieces)
        leader = server.processes[0]
        while leader.exitcode is None:  # however long the machine takes for the first one
            os.kill(leader.pid, number)
            time.sleep(0.5)
        assert exit_statuses(server.processes) in ([0, 0], [128 + number, 1])
        stream.end()
