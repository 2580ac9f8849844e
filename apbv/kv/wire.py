"""The KV transfer protocol: JSON messages, and rows of KV as in memory.

A connection carries one request and its reply. The request names the operation, the transfer, and
its secret:

- ``fetch`` has also ``tokens``, ``kv_heads`` and ``layers`` (ranges ``[start, stop)``), and the
  reader. The reply has the ranges that this source holds. For every layer there follow a message,
  the keys and the values, head by head and row by row, and a message with their checksum.
- ``done`` confirms that a reader has all it wanted, ``drop`` that the KV will not be fetched.
- ``end`` notifies another source of the transfer that it has ended, and how.

Every message may hold an ``error`` instead of the expected fields. Numbers are as the machines have
them: both ends must be little-endian, as everything is that runs torch on a GPU.
"""

import ipaddress
import json
import os
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import StorageError

Address = tuple[str, int]

LOOPBACK = "127.0.0.1"

_MAGIC = b"apbv-kv\x01"
_HEAD = struct.Struct("<8sI")
_LONGEST_MESSAGE = 1 << 16
_MOST_READERS = 1024
_HIGHEST = 2**31  # more than the tokens of any prompt
# Small enough that checksummed data is still in the CPU's cache when it is copied to or from the
# network.
_CHUNK = 1 << 18


class Severed(ConnectionError):
    """Raised if the peer closed the connection."""


def connect(address: Address, timeout: float) -> socket.socket:
    """Open a connection on which no wait is longer than ``timeout`` seconds.

    Raises:
        OSError: the address cannot be reached.
    """
    connection = socket.create_connection(address, timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def sever(connection: socket.socket) -> None:
    """Close a connection, so that threads that wait in it wake up."""
    with suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, within the connection's timeout."""
    content = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(_MAGIC, len(content)) + content)


def read_message(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Read a message, whose bytes must all arrive within some seconds.

    Raises:
        StorageError: the data is not a message of this protocol, or reports an error.
        OSError: a timeout, or the connection broke.
    """
    deadline = time.monotonic() + seconds
    timeout = connection.gettimeout()

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
        connection.settimeout(timeout)
    try:
        message = json.loads(content)
    except (RecursionError, ValueError) as error:
        # Not JSON or text, too deep, or too long a number.
        raise StorageError(f"malformed KV message: {error}") from None
    if not isinstance(message, dict):
        raise StorageError("a KV message is not a JSON object")
    reported_error = message.get("error")
    if reported_error is not None:
        raise StorageError(str(reported_error)[:1000])
    return message


def send_rows(connection: socket.socket, tensors: Iterable[Tensor]) -> int:
    """Send tensors ``[H, T, D]`` without a copy, and return their checksum.

    Each chunk must be accepted within the connection's timeout.
    """
    checksum = 0
    for piece in chunks_of(tensors):
        checksum = zlib.crc32(piece, checksum)
        connection.sendall(piece)
    return checksum


def receive_rows(connection: socket.socket, tensors: Iterable[Tensor]) -> int:
    """Receive into tensors ``[H, T, D]``, and return the checksum of the data."""
    checksum = 0
    for piece in chunks_of(tensors):
        rest = piece
        while rest:
            rest = rest[_received(connection, rest) :]
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _received(connection: socket.socket, buffer: memoryview) -> int:
    """Receive into the beginning of a buffer, and return how many bytes."""
    num_bytes = connection.recv_into(buffer)
    if num_bytes == 0:
        raise Severed("connection closed by peer")
    return num_bytes


def chunks_of(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the memory of tensors ``[H, T, D]`` in CPU memory, with contiguous rows, in chunks."""
    for tensor in tensors:
        for head in tensor:
            if head.numel():
                memory = memoryview(head.view(torch.uint8).numpy()).cast("B")
                for start in range(0, len(memory), _CHUNK):
                    yield memory[start : start + _CHUNK]


def ask(address: Address, request: dict[str, Any], timeout: float) -> None:
    """Send a request that returns no data.

    Raises:
        StorageError: the source rejects it, or cannot be reached.
    """
    try:
        with connect(address, timeout) as connection:
            ask_on(connection, request, timeout)
    except OSError as error:
        raise unreachable(address, error) from error


def ask_on(connection: socket.socket, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a request, and return the reply.

    Raises:
        StorageError: the source rejects it.
        OSError: the connection broke, or a timeout.
    """
    send_message(connection, request)
    return read_message(connection, timeout)


def unreachable(address: Address, error: OSError) -> StorageError:
    """Return the error for a source that cannot be reached, or closed the connection."""
    host, port = address
    reason = error.strerror or str(error) or type(error).__name__
    return StorageError(f"the KV's source {host}:{port} cannot be reached: {reason}")


def reachable_address(host: str) -> str:
    """Return the address by which other machines reach a listener.

    Args:
        host: the address on which it listens, which may be a wildcard.

    Raises:
        OSError: this machine's own address cannot be determined.
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    address_family = socket.AF_INET6 if host == "::" else socket.AF_INET
    name = socket.gethostname()
    with suppress(socket.gaierror):
        for *_, socket_address in socket.getaddrinfo(
            name, None, address_family, socket.SOCK_STREAM
        ):
            address = str(socket_address[0])
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    # Many systems resolve their own name to a loopback address, or not at all. These addresses are
    # for documentation: nothing is sent to them.
    outside = "2001:db8::1" if address_family == socket.AF_INET6 else "192.0.2.1"
    return _address_towards(address_family, (outside, 9))


def own_address(http_host: str) -> str:
    """Guess the address under which other processes, of the group or not, reach this one.

    Args:
        http_host: the address on which the server listens for HTTP; if it is loopback, so is the
            result, unless the group runs on several machines.

    Raises:
        OSError: this machine's own address cannot be determined.
    """
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if is_one_machine:
        return LOOPBACK if _is_loopback(http_host) else reachable_address(http_host)
    leader = os.environ["MASTER_ADDR"]
    address_family, *_, leader_address = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
    address = _address_towards(address_family, leader_address)
    return reachable_address("0.0.0.0") if _is_loopback(address) else address


def _address_towards(address_family: int, address: Any) -> str:
    """Return this machine's address on the route to another, without sending anything."""
    with socket.socket(address_family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def range_of(request: dict[str, Any], name: str) -> range:
    """Read a range from a request.

    Raises:
        StorageError: it is missing or malformed.
    """
    match request.get(name):
        case [int(start), int(stop)] if 0 <= start <= stop <= _HIGHEST:
            return range(start, stop)
    raise StorageError(f"a KV request needs {name} as [start, stop]")


def reader_of(request: dict[str, Any]) -> tuple[str, int]:
    """Read the reader's name and the number of readers from a request.

    Raises:
        StorageError: they are missing or malformed.
    """
    match request.get("reader"), request.get("num_readers"):
        case str(reader), int(count) if len(reader) <= 64 and 0 < count <= _MOST_READERS:
            return reader, count
    raise StorageError("a KV request needs reader (a string) and num_readers")
