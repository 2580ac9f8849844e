"""The server's process on every host, from a loaded engine to its end."""

import asyncio
import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass, field

import uvicorn

from ..engine import Engine
from ..hosts import HostGroup
from .app import build_app
from .log import OncePerPeriod
from .metrics import Metrics
from .order import follow
from .private_files import PrivateFiles
from .reading import Reader, RequestSettings
from .worker import Worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_RESPONSES_SECONDS = 5
_WARNING_SECONDS = 60.0  # anybody can cause uvicorn's warnings, as often as they like


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server.

    Attributes:
        model: the name that requests give.
        max_queue: how many requests may wait.
        max_body_bytes: the largest body of a request.
        grace: seconds that a running answer may take once the server was asked to end.
        api_key: the bearer token that /v1/* wants; None: none.
        requests: the limits on requests.
    """

    model: str
    max_queue: int = 64
    max_body_bytes: int = 96 * 2**20
    grace: float = 20.0
    api_key: str | None = field(default=None, repr=False)
    requests: RequestSettings = field(default_factory=RequestSettings)


def bind(host: str, port: int) -> socket.socket:
    """Make a socket with an address, which does not listen yet; port 0: any that is free.

    Raises:
        ValueError: the address does not exist or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from error


def listen(sock: socket.socket) -> None:
    """Let a socket take connections from now on.

    Raises:
        ValueError: another server, which bound its socket before anybody listened, was first.
    """
    try:
        sock.listen()
    except OSError as error:
        raise ValueError(f"cannot listen on {':'.join(map(str, sock.getsockname()[:2]))}: {error}") from error


def serve(engine: Engine, hosts: HostGroup, sock: socket.socket | None, settings: ServerSettings) -> None:
    """Answer requests until asked to end, by SIGTERM or SIGINT to any host; collective.

    Args:
        sock: from :func:`bind`; on host 0.

    Raises:
        HostError: a host ended, or failed in an exchange.
    """
    with PrivateFiles() as private_files:
        with hosts.local_stage("preparing the server"):
            reader = Reader(engine, settings.requests, private_files) if hosts.is_leader else None
            if sock is not None:
                listen(sock)
        if reader is not None:
            return _lead(engine, hosts, sock, settings, reader)
        wants_to_stop = threading.Event()
        for number in _SIGNALS:
            signal.signal(number, lambda *_: wants_to_stop.set())
        follow(engine, hosts, settings.requests.media.folder, private_files, wants_to_stop)


def _lead(engine: Engine, hosts: HostGroup, sock: socket.socket, settings: ServerSettings, reader: Reader) -> None:
    """Speak HTTP, and lead the other hosts, until asked to end; on host 0."""
    worker = Worker(engine, hosts, reader, Metrics(), settings.max_queue)
    app = build_app(
        worker,
        settings.model,
        reader.max_model_len,
        max_body_bytes=settings.max_body_bytes,
        api_key=settings.api_key,
    )
    asyncio.run(_Server(app, worker, sock, settings, hosts.size).serve([sock]))
    if worker.failure is not None:
        raise worker.failure


class _Server(uvicorn.Server):
    """Uvicorn, which still answers while the engine finishes, to say that it is stopping."""

    def __init__(self, app, worker: Worker, sock: socket.socket, settings: ServerSettings, num_hosts: int):
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_RESPONSES_SECONDS,
            )
        )
        # After uvicorn's own configuration of its loggers.
        logging.getLogger("uvicorn.error").addFilter(OncePerPeriod(_WARNING_SECONDS))
        self._worker, self._settings = worker, settings
        host, port = sock.getsockname()[:2]
        self._greeting = (
            f"serving {settings.model} on {num_hosts} host(s): "
            f"http://{f'[{host}]' if ':' in host else host}:{port}/v1\n"
            f"SIGTERM to process {os.getpid()} finishes the running answer and ends all hosts"
        )
        self._ending: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.start(on_stop=self.end, on_end=self._leave)
        await super().startup(sockets)
        print(self._greeting, flush=True)

    def handle_exit(self, sig: int, frame) -> None:
        self.end()

    def end(self) -> None:
        """Finish the running answer, then exit. From any thread, at once; a second call changes nothing."""
        if self._ending is None:
            self._ending = threading.Thread(target=self._end, daemon=True)
            self._ending.start()

    def _end(self) -> None:
        self._worker.stop()
        self._worker.join(self._settings.grace)

    def _leave(self) -> None:
        self.should_exit = True
