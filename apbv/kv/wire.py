"""Speaks the protocol by which KV travels: messages of JSON, and rows of KV as they lie in memory.

A connection carries one request and its reply. The request names what to do, the transfer, and its secret:

- ``fetch`` has also ``tokens``, ``kv_heads`` and ``layers`` (ranges ``[start, stop)``), and who reads. The reply
  says which of them this source holds. Then comes for every layer a message, the keys and the values, head by head
  and row by row, and a message with their checksum.
- ``fetch`` with ``rdma`` is answered by where the KV lies in memory, which may be read until the connection ends
  (see :mod:`apbv.kv.rdma`). Who has read all of it sends a message, and is answered where it was kept until then.
- ``done`` says that a reader has all it wanted, ``drop`` that nobody will fetch the KV.
- ``end`` says to another source of the transfer that it has ended, and how.

Every message may hold an ``error`` in place of what was expected. Numbers are as the machines have them: both ends
must be little-endian, as everything is that runs torch on a GPU.
"""

import ipaddress
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .facts import StorageError

Address = tuple[str, int]

_MAGIC = b"apbv-kv\x01"
_HEAD = struct.Struct("<8sI")
_LONGEST_MESSAGE = 1 << 16
_MOST_READERS = 1024
_HIGHEST = 2**31  # no prompt has as many tokens
# Small enough that what is summed up is still in the processor's cache when it is copied to or from the network.
_CHUNK = 1 << 18


class Severed(ConnectionError):
    """The other end has closed the connection."""


def connect(address: Address, timeout: float) -> socket.socket:
    """Open a connection on which no wait is longer than ``timeout`` seconds.

    Raises:
        OSError: the address cannot be reached.
    """
    connection = socket.create_connection(address, timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def sever(connection: socket.socket) -> None:
    """End a connection, so that threads that wait in it wake up."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, within the connection's timeout."""
    content = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(_MAGIC, len(content)) + content)


def read_message(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Read a message of which every byte has to be there within some seconds.

    Raises:
        StorageError: what came is no message of this protocol, or says that something is wrong.
        OSError: nothing came in time, or the connection broke.
    """
    deadline, before = time.monotonic() + seconds, connection.gettimeout()

    def read(count: int) -> bytes:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            view = view[_received(connection, view) :]
        return bytes(content)

    try:
        magic, length = _HEAD.unpack(read(_HEAD.size))
        if magic != _MAGIC or length > _LONGEST_MESSAGE:
            raise StorageError("peer does not speak the KV protocol")
        content = read(length)
    finally:
        connection.settimeout(before)
    try:
        message = json.loads(content)
    except (RecursionError, ValueError) as error:  # no JSON, no text, nested too deeply, or too long a number
        raise StorageError(f"malformed KV message: {error}") from None
    if not isinstance(message, dict):
        raise StorageError("a KV message is not a JSON object")
    if (error := message.get("error")) is not None:
        raise StorageError(str(error)[:1000])
    return message


def send_rows(connection: socket.socket, tensors: Iterable[Tensor]) -> int:
    """Send tensors ``[H, T, D]`` from where they lie, and return their checksum.

    Each chunk has to be taken within the connection's timeout.
    """
    checksum = 0
    for piece in chunks_of(tensors):
        checksum = zlib.crc32(piece, checksum)
        connection.sendall(piece)
    return checksum


def receive_rows(connection: socket.socket, tensors: Iterable[Tensor]) -> int:
    """Receive tensors ``[H, T, D]`` to where they are to lie, and return the checksum of what came."""
    checksum = 0
    for piece in chunks_of(tensors):
        rest = piece
        while rest:
            rest = rest[_received(connection, rest) :]
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _received(connection: socket.socket, buffer: memoryview) -> int:
    if not (count := connection.recv_into(buffer)):
        raise Severed("connection closed by peer")
    return count


def chunks_of(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the memory of tensors ``[H, T, D]`` in CPU memory, whose rows lie one after the other, in chunks."""
    for tensor in tensors:
        for head in tensor:
            if head.numel():
                memory = memoryview(head.view(torch.uint8).numpy()).cast("B")
                for start in range(0, len(memory), _CHUNK):
                    yield memory[start : start + _CHUNK]


def ask(address: Address, request: dict[str, Any], timeout: float) -> None:
    """Have a source do something of which nothing comes back.

    Raises:
        StorageError: it rejects, or cannot be reached.
    """
    try:
        with connect(address, timeout) as connection:
            ask_on(connection, request, timeout)
    except OSError as error:
        raise unreachable(address, error) from error


def ask_on(connection: socket.socket, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a request, and return the answer.

    Raises:
        StorageError: it rejects.
        OSError: the connection broke, or nothing came in time.
    """
    send_message(connection, request)
    return read_message(connection, timeout)


def unreachable(address: Address, error: OSError) -> StorageError:
    """Return the error of a source that cannot be reached, or has broken off."""
    host, port = address
    reason = error.strerror or str(error) or type(error).__name__
    return StorageError(f"the KV's source {host}:{port} cannot be reached: {reason}")


def reachable_address(host: str) -> str:
    """Return by which address other machines reach what listens at ``host``, which may stand for all addresses.

    Raises:
        OSError: this machine does not know its own address.
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with suppress(socket.gaierror):
        for *_, (address, *_) in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM):
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    # Many systems give their own name a loopback address, or none. This sends nothing: it chooses a route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
        return probe.getsockname()[0]


def range_of(request: dict[str, Any], name: str) -> range:
    """Read a range of a request.

    Raises:
        StorageError: there is none.
    """
    match request.get(name):
        case [int(start), int(stop)] if 0 <= start <= stop <= _HIGHEST:
            return range(start, stop)
    raise StorageError(f"a KV request needs {name} as [start, stop]")


def reader_of(request: dict[str, Any]) -> tuple[str, int]:
    """Read who reads, and how many readers there are.

    Raises:
        StorageError: the request does not say so.
    """
    match request.get("reader"), request.get("num_readers"):
        case str(reader), int(count) if len(reader) <= 64 and 0 < count <= _MOST_READERS:
            return reader, count
    raise StorageError("a KV request needs reader (a string) and num_readers")
