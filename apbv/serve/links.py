"""Connections between host 0 and the hosts that decode answers, beside the hosts' collectives.

After a secret and its rank, a host sends lines of JSON: lists of ``[number, method, *arguments]``,
calls of a request's :class:`~.output.JobOutput`. Host 0 sends lists, too: of the numbers of
requests that are not wanted any more, or an order that the host prefills alone and the sizes of its
files, which follow.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import count
from threading import Lock, Thread
from typing import Any

from ..hosts import HostError, HostGroup
from ..kv.sending import Listener
from ..kv.wire import LOOPBACK, connect, own_address, sever
from .job import Piece
from .order import Order, decode_order, encode_order
from .output import JobOutput

_SECONDS = 30.0  # for a connection between hosts


def connect_hosts(hosts: HostGroup, stack: ExitStack) -> "Links | Link":
    """Connect every other host with host 0, until the stack ends; collective.

    Raises:
        OSError: this host cannot listen, or not reach host 0.
        HostError: another host cannot.
    """
    with hosts.local_stage("listening to the other hosts"):
        links = stack.enter_context(closing(Links())) if hosts.is_leader else None
    greeting = hosts.broadcast_bytes(links and links.greeting)
    with hosts.local_stage("connecting to host 0"):
        return links or stack.enter_context(closing(Link(greeting, hosts.rank)))


def _line(message: Any) -> bytes:
    return json.dumps(message, default=vars).encode() + b"\n"


class Links:
    """Host 0's connections to the other hosts, and the outputs of requests whose answers these
    decode.

    Attributes:
        greeting: for the constructors of the others' :class:`Link`.
        failure: the error that ended a connection; None: there was none.

    Raises:
        OSError: this process cannot listen.
    """

    def __init__(self):
        self._outputs, self._numbers, self._secret = {}, count(), secrets.token_hex().encode()
        # The lock: of the two threads that send.
        self._hosts: dict[int, tuple[socket.socket, Lock]] = {}
        self.failure: HostError | None = None
        address = own_address(LOOPBACK)
        self._listener = Listener((address, 0), self._serve, _SECONDS)
        self.greeting = f"{address} {self._listener.server_address[1]} ".encode() + self._secret
        self.close = self._listener.close

    def add(self, output: JobOutput) -> int:
        """Give a request a number, by which another host names it until its release."""
        number = next(self._numbers)
        self._outputs[number], output.on_release = output, lambda: self._outputs.pop(number, None)
        return number

    def send(self, order: Order, files: Sequence[bytes]) -> None:
        """Have an order's home prefill its prompt alone; where the connection has ended,
        :attr:`failure` tells."""
        sock, lock = self._hosts[order.home]
        with suppress(OSError), lock:
            sock.sendall(
                _line({"order": encode_order(order).decode(), "sizes": [*map(len, files)]})
            )
            for data in files:
                sock.sendall(data)

    def _serve(self, sock: socket.socket, trust: Callable[[], None]) -> None:
        """Call the outputs' methods as another host wants it."""
        lines = sock.makefile("rb")
        reason = "it was closed"
        if not hmac.compare_digest(lines.read(len(self._secret)), self._secret):
            return
        trust()
        sock.settimeout(None)
        lock = Lock()
        self._hosts[int(lines.readline())] = sock, lock
        sock.sendall(_line([]))
        try:
            for line in lines:
                unwanted = []
                for number, method, *arguments in json.loads(
                    line, object_hook=lambda fields: Piece(**fields)
                ):
                    output = self._outputs.get(number)
                    if output is not None:
                        getattr(output, method)(*arguments)
                    if output is None or output.is_cancelled:
                        unwanted.append(number)
                if unwanted:
                    with lock:
                        sock.sendall(_line(unwanted))
        except Exception as error:
            reason = error
        self.failure = HostError(f"the connection to another host ended: {reason}")


class Link:
    """Another host's connection to host 0, for its decoding thread.

    Args:
        greeting: as of :class:`Links`.
        rank: this host's.

    Attributes:
        outputs: by their numbers on host 0.
        calls: of outputs' methods, to be sent by :meth:`flush`.

    Raises:
        OSError: host 0 cannot be reached.
    """

    def __init__(self, greeting: bytes, rank: int):
        address, port, secret = greeting.split()
        self._sock = connect((address.decode(), int(port)), _SECONDS)
        self._sock.sendall(secret + b"%d\n" % rank)
        self._lines = self._sock.makefile("rb")
        self._lines.readline()  # host 0 knows this one now
        self._sock.settimeout(None)
        self.outputs: dict[int, RemoteOutput] = {}
        self.calls: list[tuple] = []

    def listen(self, prefill: Callable[[Order, Iterator[bytes]], None]) -> None:
        """Note cancellations in a thread, and call a function with each order and its files'
        bytes."""
        Thread(target=self._read, args=(prefill,), name="orders", daemon=True).start()

    def flush(self) -> None:
        """Send a step's calls together.

        Raises:
            OSError: host 0 has ended.
        """
        if self.calls:
            self._sock.sendall(_line(self.calls))
            self.calls.clear()

    def close(self) -> None:
        """Close the connection."""
        sever(self._sock)
        self._sock.close()

    def _read(self, prefill: Callable[[Order, Iterator[bytes]], None]) -> None:
        with suppress(OSError, ValueError):  # if host 0 has ended, that shows elsewhere
            for line in self._lines:
                told = json.loads(line)
                if isinstance(told, dict):
                    files = [self._lines.read(size) for size in told["sizes"]]
                    prefill(decode_order(told["order"]), iter(files))
                    continue
                for number in told:
                    if output := self.outputs.get(number):
                        output.is_cancelled = True


class RemoteOutput:
    """The :class:`~.output.JobOutput` of a request whose answers another host decodes: passes all
    calls on."""

    def __init__(self, link: Link, number: int):
        self._link = link
        self._number = number
        self.is_cancelled = False
        link.outputs[number] = self

    def tell(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        self._link.calls.append((self._number, "tell", choice, num_tokens, piece))
        return True

    def note_draft(self, metrics: Iterable[tuple[str, Any]]) -> None:
        self._link.calls.append((self._number, "note_draft", [*metrics]))

    def fail(self, failure: str, is_invalid: bool = False) -> None:
        self.is_cancelled = True
        self._link.calls.append((self._number, "fail", failure, is_invalid))

    def release(self) -> None:
        del self._link.outputs[self._number]
        self._link.calls.append((self._number, "release"))


Output = JobOutput | RemoteOutput
