"""The server process on every host, from a loaded engine to shutdown."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import uvicorn
from transformers import PreTrainedModel

from ..engine import Engine
from ..errors import InvalidConfigError
from ..hosts import HostGroup
from ..kv.cache import GROWTH_ROWS
from ..kv.offers import Offers
from ..model.families import DecoderSizes
from ..reporting import raised_as
from ..speculate import STRATEGIES
from ..stats import free_memory_bytes
from .control.executor import Executor, follow
from .control.links import connect_to_hosts, connect_to_leader
from .control.scheduler import Limits, Scheduler
from .control.worker import Worker
from .http.app import build_app
from .http.connections import (
    ACCEPTED_AT_ONCE,
    WAITING_IN_SYSTEM,
    Connections,
    HttpProtocol,
    log_in_one_line,
    most_connections,
)
from .media.files import PrivateFiles
from .metrics.log import OncePerPeriod
from .metrics.prometheus import Metrics
from .protocols.request_reader import Reader
from .settings import ServerSettings

LAST_PORT = 65_535
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Ctrl-C reaches the processes from the terminal and from torchrun: that is one signal.
SAME_SIGNAL_SECONDS = 1.0
_AT_ONCE_SECONDS = 3.0  # to tell clients and other hosts, after a second signal
_LAST_RESPONSES_SECONDS = 5
_FEWEST_TOKENS = 64  # of a prompt and its answer, without an explicit limit
_WARNING_SECONDS = 60.0  # clients can cause these warnings at any rate


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address, without listening yet; port 0: any free port.

    Raises:
        InvalidConfigError: the address does not exist or is in use.
    """
    if not 0 <= port <= LAST_PORT:  # others would be taken modulo 65536
        raise InvalidConfigError(f"cannot listen on {host}:{port}: ports lie in 0 .. {LAST_PORT}")
    failure = f"cannot listen on {host}:{port}"
    with raised_as(InvalidConfigError, failure, OSError, OverflowError, UnicodeError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock


def listen(sock: socket.socket) -> None:
    """Start to listen on a socket.

    Raises:
        InvalidConfigError: another server that bound the same address listened first.
    """
    host, port = sock.getsockname()[:2]
    with raised_as(InvalidConfigError, f"cannot listen on {host}:{port}", OSError):
        sock.listen()


def serve(
    engine: Engine, hosts: HostGroup, sock: socket.socket | None, settings: ServerSettings
) -> None:
    """Serve HTTP requests until SIGTERM or SIGINT on any host; collective.

    Args:
        sock: from :func:`bind`; on host 0.

    Raises:
        HostError: a host ended, or failed in an exchange.
    """

    def open_http(worker: Worker, scheduler: Scheduler, reader: Reader) -> Callable[[], None]:
        assert sock is not None, "host 0 has bound a socket"
        listen(sock)
        app = build_app(worker, scheduler, reader, settings)
        server = _Server(app, worker, sock, settings, hosts.size)
        return lambda: asyncio.run(server.serve([sock]))

    run_worker(engine, hosts, settings, open_http)


def run_worker(
    engine: Engine,
    hosts: HostGroup,
    settings: ServerSettings,
    open_source: Callable[[Worker, Scheduler, Reader], Callable[[], None]] | None = None,
) -> None:
    """Answer requests until their source ends; collective.

    Args:
        open_source: on host 0, returns the function that starts the worker, gives it requests, and
            returns when the worker has ended. Signals are left to it; on other hosts they ask the
            worker to stop.

    Raises:
        HostError: a host ended, or failed in an exchange.
    """
    num_decode_hosts = engine.num_decode_hosts
    if settings.max_kv_bytes is None:
        settings = replace(settings, max_kv_bytes=_least_free_bytes(hosts) // 2)
    with ExitStack() as stack:
        private_files = stack.enter_context(closing(PrivateFiles()))
        scheduler = None
        with hosts.local_stage("preparing the server"):
            if hosts.is_leader:
                limits = limits_of(engine, settings)
                scheduler = Scheduler(limits, Metrics(settings.model), max(num_decode_hosts, 1))

        # Connect the hosts; collective over those that prefill, and those that decode alone.
        offers = None
        if settings.kv_transfer is not None and engine.prefills:
            offers = Offers(
                engine.hosts,
                host=settings.kv_transfer.host,
                port=settings.kv_transfer.port,
                seconds=settings.kv_transfer.seconds,
                on_end=None if scheduler is None else scheduler.end_offer,
            )
            stack.enter_context(offers)
        links = link = None
        if num_decode_hosts > 1 and hosts.is_leader:
            links = connect_to_hosts(hosts, stack)
        elif num_decode_hosts > 1:
            link = connect_to_leader(hosts, stack)
        executor = Executor(engine, hosts, offers)

        # Lead, or follow.
        worker: Worker | None = None
        with hosts.local_stage("opening the server"):
            if scheduler is not None:
                assert open_source is not None, "host 0 has a source of requests"
                reader = Reader(engine, settings, private_files, scheduler.limits.max_tokens)
                worker = Worker(executor, scheduler, private_files, links)
                run = open_source(worker, scheduler, reader)
        if worker is not None:
            run()
            if worker.failure is not None:
                raise worker.failure
            return
        wants_to_stop = threading.Event()
        stop = _StopAfterSignals(wants_to_stop, private_files)
        for number in SIGNALS:
            signal.signal(number, stop)
        follow(executor, settings.media_dir, private_files, wants_to_stop, link)


class _StopAfterSignals:
    """Signal handler of the hosts that follow.

    The first signal asks all hosts to stop, a second one ends this process.
    """

    def __init__(self, wants_to_stop: threading.Event, private_files: PrivateFiles):
        self._wants_to_stop = wants_to_stop
        self._private_files = private_files
        self._first_at = 0.0

    def __call__(self, number: int, _) -> None:
        if not self._wants_to_stop.is_set():
            self._first_at = time.monotonic()
            self._wants_to_stop.set()
        elif time.monotonic() - self._first_at > SAME_SIGNAL_SECONDS:
            # In a thread: this one may hold the lock that closing needs.
            arguments = (number, self._private_files.close)
            threading.Thread(target=end_at_once, args=arguments, daemon=True).start()


def _least_free_bytes(hosts: HostGroup) -> int:
    """Return the free memory of the host that has least; collective.

    Processes on one machine's CPU have an equal part of its memory each.
    """
    num_bytes: float = free_memory_bytes(hosts.device)
    if hosts.device.type == "cpu":
        num_bytes /= int(os.environ.get("LOCAL_WORLD_SIZE", hosts.num_processes))
    bytes_of_hosts = [host_bytes for (host_bytes,) in hosts.gather_floats([num_bytes])]
    return int(min(bytes_of_hosts))


def limits_of(engine: Engine, settings: ServerSettings) -> Limits:
    """Compute the request limits from the KV cache limit.

    Raises:
        InvalidConfigError: the KV of ``max_model_len`` tokens exceeds the KV cache limit.
    """
    # The KV of one token.
    assert engine.model is not None, "host 0 runs the model"
    token_bytes, answer_bytes = _bytes_of_answer(engine.model)
    if engine.draft_model is not None:
        draft_token_bytes, draft_answer_bytes = _bytes_of_answer(engine.draft_model)
        token_bytes += draft_token_bytes
        answer_bytes += draft_answer_bytes
    speculate = engine.speculative_config
    if speculate is not None and STRATEGIES[speculate.strategy].facts.runs_target:
        # At most as much of the prompt is copied for the draft.
        token_bytes *= 2
        answer_bytes *= 2

    # The KV of the longest request that must run.
    max_bytes = settings.max_kv_bytes
    assert max_bytes is not None, "the caller sets the default"
    num_tokens = settings.max_model_len or _FEWEST_TOKENS
    required_bytes = (num_tokens + GROWTH_ROWS) * token_bytes + answer_bytes
    if max_bytes < required_bytes:
        raise InvalidConfigError(
            f"the KV of {num_tokens} tokens takes up to {required_bytes / 2**20:.1f} MiB, but at "
            f"most {max_bytes / 2**20:.1f} MiB are allowed (--max-kv-mib)"
        )
    return Limits(
        max_queue=settings.max_queue,
        max_kv_bytes=max_bytes,
        token_bytes=token_bytes,
        answer_bytes=answer_bytes,
        spare_tokens=GROWTH_ROWS,
        max_running=settings.max_running,
        max_answers=1 if engine.batching_obstacle else None,
        split_tokens=settings.min_host_tokens * engine.hosts.size if engine.can_work_alone else 0,
    )


def _bytes_of_answer(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of a token's KV in all layers of a model, and of an answer's states.

    A hybrid's states are kept behind the prompt, behind the last token that certainly stays, and
    behind the newest.
    """
    sizes = DecoderSizes.from_config(model.config)
    itemsize = model.dtype.itemsize
    return sizes.kv_token * itemsize, 3 * sizes.state_bytes(itemsize)


class _Server(uvicorn.Server):
    """Uvicorn server that keeps replying during shutdown, with errors that say so."""

    def __init__(
        self, app, worker: Worker, sock: socket.socket, settings: ServerSettings, num_hosts: int
    ):
        protocol = partial(HttpProtocol, connections=Connections(most_connections()))
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
                backlog=ACCEPTED_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_RESPONSES_SECONDS,
            )
        )
        for name in ("uvicorn.error", "apbv.serve.http.connections", "apbv.serve.fields"):
            logging.getLogger(name).addFilter(OncePerPeriod(_WARNING_SECONDS))
        self._worker = worker
        self._grace = settings.grace
        host, port = sock.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        self._greeting = (
            f"serving {settings.model} on {num_hosts} host(s): http://{url_host}:{port}/v1\n"
            f"SIGTERM to process {os.getpid()} finishes running requests and stops all hosts"
        )
        if worker.batching_obstacle:
            self._greeting += f"\none answer at a time: {worker.batching_obstacle}"
        self._ending: threading.Thread | None = None
        self._ending_since = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(log_in_one_line)
        self._worker.start(on_stop=self.end, on_end=self._exit)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING_IN_SYSTEM)
        print(self._greeting, flush=True)

    def _exit(self) -> None:
        """Have the server leave its loop."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame) -> None:
        """Finish running requests after the first signal; end at once after a second one."""
        if self._ending is None:
            self.end()
        elif time.monotonic() - self._ending_since > SAME_SIGNAL_SECONDS:
            self.force_exit = True
            arguments = (sig, self._worker.cut_short)
            threading.Thread(target=end_at_once, args=arguments, daemon=True).start()

    def end(self) -> None:
        """Finish running requests, then exit; idempotent.

        Any thread may call this. It returns at once.
        """
        if self._ending is None:
            self._ending_since = time.monotonic()
            self._ending = threading.Thread(
                target=self._worker.finish, args=(self._grace,), daemon=True
            )
            self._ending.start()


def end_at_once(number: int, prepare: Callable[[], None]) -> None:
    """End this process within seconds, whatever its other threads do.

    Args:
        number: the signal that asks for it.
        prepare: called first; it may end the process by itself.
    """
    timer = threading.Timer(_AT_ONCE_SECONDS, os._exit, [128 + number])
    timer.daemon = True
    timer.start()
    prepare()
