"""HTTP connections: how many there may be, and how long one waits for a request."""

import asyncio
import errno
import logging
import os
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections that asyncio accepts before it lets any of them close another; the system keeps more
# waiting.
ACCEPTED_AT_ONCE = 32
WAITING_IN_SYSTEM = 2048
HEADER_SECONDS = 10.0
_MOST_DESCRIPTORS = 2**16  # that this process asks for; each may then be a connection's
_MOST_CONNECTIONS = 2**13
_FEWEST_CONNECTIONS = 8
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: "
    b"1\r\ncontent-length: 0\r\n\r\n"
)

logger = logging.getLogger(__name__)


def most_connections() -> int:
    """Raise this process's limit on open files, and return how many may be connections.

    These are half of those that are left: media files, threads and other hosts need some, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MOST_DESCRIPTORS:
        num_descriptors = _MOST_DESCRIPTORS
        if hard != resource.RLIM_INFINITY:
            num_descriptors = min(hard, _MOST_DESCRIPTORS)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, hard))
            soft = num_descriptors
        except (OSError, ValueError):  # some systems allow less than their hard limit
            pass
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    num_open = len(os.listdir("/dev/fd"))
    return max(_FEWEST_CONNECTIONS, min((soft - num_open) // 2, _MOST_CONNECTIONS))


class Connections:
    """The open connections of a server, used in its event loop's thread.

    Args:
        most: how many there may be. For one more, the connection that has waited longest for a
            request is closed; if all have requests, the new one is.
    """

    def __init__(self, most: int):
        self.most = most
        self._num_open = 0
        # Those without a request, the one that waits longest first.
        self._idle: dict[HttpProtocol, None] = {}

    def open(self, connection: "HttpProtocol") -> bool:
        """Count a new connection, which waits for a request; False if there is no room for it."""
        self._num_open += 1
        if self._num_open > self.most:
            logger.warning(
                "%d connections are open, as many as may be: idle ones are closed", self.most
            )
            longest_idle = self._longest_idle()
            if longest_idle is None:
                return False
            self._idle.pop(longest_idle)  # it counts as open until the event loop has closed it
            longest_idle.transport.abort()
        self._idle[connection] = None
        return True

    def _longest_idle(self) -> "HttpProtocol | None":
        """Return the connection that waits longest and has nothing left to send; None: none has."""
        for connection in self._idle:
            if connection.transport.get_write_buffer_size() == 0:
                return connection
        return None

    def mark(self, connection: "HttpProtocol", is_idle: bool) -> None:
        """Note whether a connection waits for a request, since now if it did not before."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif not connection.transport.is_closing():
            self._idle.setdefault(connection)

    def close(self, connection: "HttpProtocol") -> None:
        """Count a connection no more."""
        self._num_open -= 1
        self._idle.pop(connection, None)


class _OneLength(h11.Connection):
    """HTTP that rejects requests which give their body's length in two ways.

    A proxy may have read such a request as two (request smuggling), so the connection must end (RFC
    9112, 6.1).
    """

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name.lower() for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


class HttpProtocol(H11Protocol):
    """HTTP with a bound on connections, a timeout for request headers, and strict lengths.

    Uvicorn has none of these.

    Args:
        connections: the open connections of its server.
        uvicorn_arguments: the arguments that uvicorn passes.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *, connections: Connections, **uvicorn_arguments: Any):
        super().__init__(**uvicorn_arguments)
        self._connections = connections
        max_bytes = self.config.h11_max_incomplete_event_size
        if max_bytes is None:
            self.conn = _OneLength(h11.SERVER)
        else:
            self.conn = _OneLength(h11.SERVER, max_incomplete_event_size=max_bytes)

    # As uvicorn declares it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.open(self):
            transport.write(_BUSY)
            transport.close()
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._connections.mark(self, self.conn.their_state is h11.IDLE)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._connections.close(self)
        if self._timer is not None:
            self._timer.cancel()

    def _await_headers(self) -> None:
        """Close the connection if request headers do not arrive in time."""
        is_waiting = self.conn.their_state is h11.IDLE
        self._connections.mark(self, is_waiting)
        if is_waiting and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not is_waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None


def log_in_one_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an event loop's exception, without a traceback for each connection not accepted."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
        logger.warning("connections cannot be accepted for a second: %s", error.strerror)
    else:
        loop.default_exception_handler(context)
