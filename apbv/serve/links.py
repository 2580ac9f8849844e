"""Connections between host 0 and the hosts that decode answers, beside the hosts' collectives.

After its secret, a host sends lines of JSON: lists of ``[number, method, *arguments]``, calls of a request's
:class:`~.output.Output`. Host 0 replies with lists of the numbers of requests that are not wanted any more.
"""

import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from threading import Lock, Thread
from typing import Any

from ..hosts import HostError, HostGroup
from ..kv.wire import connect, sever
from .job import Piece
from .output import Output

_SECONDS = 30.0  # for a connection between hosts
_LOOPBACK = "127.0.0.1"


def connect_hosts(hosts: HostGroup) -> list[socket.socket]:
    """Connect every other host with host 0; collective.

    Returns:
        On host 0 a connection to each of the others, on these the one to host 0.

    Raises:
        OSError: a host cannot listen, or not reach host 0.
        HostError: on the others.
    """
    # Without torchrun's variables, too, as in tests.
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    address = _LOOPBACK if is_one_machine else os.environ["MASTER_ADDR"]
    listener = greeting = None
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        with hosts.local_stage("listening to the other hosts"):
            if hosts.is_leader:
                listener = stack.enter_context(_listen(is_one_machine, hosts.size))
                greeting = f"{listener.getsockname()[1]} {secrets.token_hex(32)}".encode()
        greeting = hosts.broadcast_bytes(greeting)
        with hosts.local_stage("connecting to host 0"):
            if listener is None:
                sockets.append(connect((address, int(greeting.split()[0])), _SECONDS))
                sockets[0].sendall(greeting)
                sockets[0].settimeout(None)
        with hosts.local_stage("accepting the other hosts"):
            while listener is not None and len(sockets) < hosts.size - 1:
                sockets += _accept(listener, greeting)
    return sockets


def _listen(is_one_machine: bool, backlog: int) -> socket.socket:
    if is_one_machine:
        return socket.create_server((_LOOPBACK, 0), backlog=backlog)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)


def _accept(listener: socket.socket, greeting: bytes) -> list[socket.socket]:
    """Accept a connection; none if it does not begin with the secret."""
    listener.settimeout(_SECONDS)
    sock, _ = listener.accept()
    with suppress(OSError):
        sock.settimeout(_SECONDS)
        if hmac.compare_digest(sock.makefile("rb").read(len(greeting)), greeting):
            sock.settimeout(None)
            return [sock]
    sock.close()
    return []


def _send(sock: socket.socket, message: list) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _messages(sock: socket.socket) -> Iterator[list]:
    """Yield what the other end sends, until it closes the connection."""
    yield from map(json.loads, sock.makefile("rb"))


class Links:
    """Host 0's connections to the other hosts, and the outputs of requests whose answers these decode.

    Args:
        sockets: of :func:`connect_hosts`; closed at the end.

    Attributes:
        failure: the error that ended a connection; None: there was none.
    """

    def __init__(self, sockets: Sequence[socket.socket]):
        self._sockets, self._outputs, self._numbers = sockets, {}, count()
        self.failure: HostError | None = None
        for sock in sockets:
            Thread(target=self._follow, args=(sock,), name="answers", daemon=True).start()

    def add(self, output: Output) -> int:
        """Give a request a number, by which another host names it."""
        number = next(self._numbers)
        self._outputs[number] = output
        return number

    def forget(self, number: int) -> None:
        """Drop a request whose KV is gone; if another host still decodes an answer to it, that is ended."""
        self._outputs.pop(number, None)

    def close(self) -> None:
        """Close the connections."""
        for sock in self._sockets:
            sever(sock)
            sock.close()

    def _follow(self, sock: socket.socket) -> None:
        """Call the outputs' methods as another host wants it."""
        reason: Any = "it was closed"
        try:
            for calls in _messages(sock):
                unwanted = set()
                for number, method, *arguments in calls:
                    if not self._call(number, method, arguments):
                        unwanted.add(number)
                if unwanted:
                    _send(sock, list(unwanted))
        except Exception as error:
            reason = error
        self.failure = HostError(f"the connection to another host ended: {reason}")

    def _call(self, number: int, method: str, arguments: list) -> bool:
        """Call an output; return whether the request's answers are still wanted."""
        output = self._outputs.get(number)
        if output is None:
            return method == "release"
        if method == "release":
            self.forget(number)
            output.release()
        elif method == "fail":
            output.fail(*arguments)
        else:
            choice, num_tokens, piece = arguments
            output.tell(choice, num_tokens, piece and Piece(**piece))
        return method == "release" or not output.is_cancelled


class Link:
    """Another host's connection to host 0; calls of outputs wait for :meth:`flush`, which sends them together."""

    def __init__(self, sock: socket.socket):
        self._sock, self._calls, self._lock = sock, [], Lock()
        self._outputs: dict[int, RemoteOutput] = {}
        Thread(target=self._read, name="cancellations", daemon=True).start()

    def output(self, number: int) -> "RemoteOutput":
        """Return the output of the request with this number on host 0."""
        self._outputs[number] = output = RemoteOutput(self, number)
        return output

    def call(self, number: int, method: str, *arguments: Any) -> None:
        """Call a method of an output on host 0."""
        with self._lock:
            if method == "release":
                del self._outputs[number]
            self._calls.append((number, method, *arguments))

    def flush(self) -> None:
        """Send the calls.

        Raises:
            OSError: host 0 has ended.
        """
        with self._lock:
            calls, self._calls = self._calls, []
            if calls:
                _send(self._sock, calls)

    def close(self) -> None:
        """Close the connection."""
        sever(self._sock)
        self._sock.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # if host 0 has ended, that shows elsewhere
            for numbers in _messages(self._sock):
                for number in numbers:
                    if output := self._outputs.get(number):
                        output.is_cancelled = True


class RemoteOutput:
    """Output on another host than host 0, which passes all calls on."""

    def __init__(self, link: Link, number: int):
        self._link, self._number, self.is_cancelled = link, number, False

    def tell(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        self._link.call(self._number, "tell", choice, num_tokens, piece and vars(piece))
        return True

    def fail(self, failure: str) -> None:
        self.is_cancelled = True
        self._link.call(self._number, "fail", failure)

    def release(self) -> None:
        self._link.call(self._number, "release")
