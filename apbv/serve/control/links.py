"""Connections between host 0 and the hosts that decode answers, beside the hosts' collectives.

After a secret and its rank, a host sends lines of messages about its answers. Host 0 sends orders
to prefill a prompt, each followed by the bytes of its files, and the numbers of requests that are
not wanted any more (:mod:`.messages`).
"""

import hmac
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import count
from threading import Lock, Thread
from typing import Any

from ...errors import HostError
from ...hosts import HostGroup
from ...kv.sending import Listener
from ...kv.wire import LOOPBACK, connect, own_address, sever
from .job import Piece
from .messages import (
    AnswerMessage,
    DraftMessage,
    FailedMessage,
    PrefillMessage,
    ReleasedMessage,
    TokensMessage,
    UnwantedMessage,
    decode_answers,
    decode_for_host,
    encode_answers,
    encode_for_host,
)
from .output import Failure, JobOutput, failure_of
from .work_order import WorkOrder

_SECONDS = 30.0  # for a connection between hosts


def connect_to_hosts(hosts: HostGroup, stack: ExitStack) -> "Links":
    """Connect host 0 with every other host, until the stack ends.

    Collective with the others' :func:`connect_to_leader`.

    Raises:
        OSError: this host cannot listen.
        HostError: another host cannot reach this one.
    """
    with hosts.local_stage("listening to the other hosts"):
        links = stack.enter_context(closing(Links()))
    hosts.broadcast_bytes(links.greeting)
    with hosts.local_stage("connecting to host 0"):
        return links


def connect_to_leader(hosts: HostGroup, stack: ExitStack) -> "Link":
    """Connect this host with host 0, until the stack ends.

    Collective with host 0's :func:`connect_to_hosts`, and with this function on the others.

    Raises:
        OSError: this host cannot reach host 0.
        HostError: another host cannot listen, or not reach host 0.
    """
    with hosts.local_stage("listening to the other hosts"):
        pass  # only host 0 does
    greeting = hosts.broadcast_bytes(None)
    with hosts.local_stage("connecting to host 0"):
        return stack.enter_context(closing(Link(greeting, hosts.rank)))


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
        self._outputs: dict[int, JobOutput] = {}
        self._numbers = count()
        self._secret = secrets.token_hex().encode()
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
        self._outputs[number] = output
        output.on_release = lambda: self._outputs.pop(number, None)
        return number

    def send(self, order: WorkOrder, files: Sequence[bytes]) -> None:
        """Have an order's decode host prefill its prompt alone.

        Where the connection has ended, :attr:`failure` tells.
        """
        sock, lock = self._hosts[order.decode_host]
        file_sizes = [len(data) for data in files]
        with suppress(OSError), lock:
            sock.sendall(encode_for_host(PrefillMessage(order, file_sizes)))
            for data in files:
                sock.sendall(data)

    def _serve(self, sock: socket.socket, trust: Callable[[], None]) -> None:
        """Pass another host's messages on to the outputs, and answer with what is not wanted."""
        lines = sock.makefile("rb")
        reason: str | Exception = "it was closed"
        if not hmac.compare_digest(lines.read(len(self._secret)), self._secret):
            return
        trust()
        sock.settimeout(None)
        lock = Lock()
        self._hosts[int(lines.readline())] = sock, lock
        # The host waits for this line: it is known now.
        sock.sendall(encode_for_host(UnwantedMessage([])))
        try:
            for line in lines:
                unwanted = []
                for message in decode_answers(line):
                    output = self._outputs.get(message.number)
                    if output is not None:
                        _pass_on(message, output)
                    if output is None or output.is_cancelled:
                        unwanted.append(message.number)
                if unwanted:
                    with lock:
                        sock.sendall(encode_for_host(UnwantedMessage(unwanted)))
        except Exception as error:
            reason = error
        self.failure = HostError(f"the connection to another host ended: {reason}")


def _pass_on(message: AnswerMessage, output: JobOutput) -> None:
    """Call an output's method for a message."""
    match message:
        case TokensMessage():
            output.add_tokens(message.choice, message.num_tokens, message.piece)
        case DraftMessage():
            output.note_draft(message.metrics)
        case FailedMessage():
            output.fail_with(Failure(message.status, message.message))
        case ReleasedMessage():
            output.release()


class Link:
    """Another host's connection to host 0, for its decoding thread.

    Args:
        greeting: as of :class:`Links`.
        rank: this host's.

    Attributes:
        outputs: by their numbers on host 0.
        messages: about outputs, to be sent by :meth:`flush`.

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
        self.messages: list[AnswerMessage] = []

    def listen(self, prefill: Callable[[WorkOrder, Iterator[bytes]], None]) -> None:
        """Note cancellations in a thread, and call a function with each order and its files'
        bytes."""
        Thread(target=self._read, args=(prefill,), name="orders", daemon=True).start()

    def flush(self) -> None:
        """Send a step's messages together.

        Raises:
            OSError: host 0 has ended.
        """
        if self.messages:
            self._sock.sendall(encode_answers(self.messages))
            self.messages.clear()

    def close(self) -> None:
        """Close the connection."""
        sever(self._sock)
        self._sock.close()

    def _read(self, prefill: Callable[[WorkOrder, Iterator[bytes]], None]) -> None:
        with suppress(OSError, ValueError):  # if host 0 has ended, that shows elsewhere
            for line in self._lines:
                message = decode_for_host(line)
                if isinstance(message, PrefillMessage):
                    files = [self._lines.read(size) for size in message.file_sizes]
                    prefill(message.order, iter(files))
                    continue
                for number in message.numbers:
                    output = self.outputs.get(number)
                    if output is not None:
                        output.is_cancelled = True


class RemoteOutput:
    """The output of a request on another host than host 0: sends messages to the
    :class:`~.output.JobOutput` there.

    Args:
        link: the connection to host 0.
        number: the request's number there.
        request_id: the request's id in its reply and in the log.
    """

    def __init__(self, link: Link, number: int, request_id: str):
        self.request_id = request_id
        self._link = link
        self._number = number
        self.is_cancelled = False
        link.outputs[number] = self

    def add_tokens(self, choice: int, num_tokens: int, piece: Piece | None = None) -> bool:
        self._link.messages.append(TokensMessage(self._number, choice, num_tokens, piece))
        return True

    def note_draft(self, metrics: dict[str, Any]) -> None:
        self._link.messages.append(DraftMessage(self._number, metrics))

    def fail(self, error: BaseException) -> None:
        self.fail_with(failure_of(error, self.request_id))

    def fail_with(self, failure: Failure) -> None:
        self.is_cancelled = True
        self._link.messages.append(FailedMessage(self._number, failure.status, failure.message))

    def release(self) -> None:
        del self._link.outputs[self._number]
        self._link.messages.append(ReleasedMessage(self._number))
