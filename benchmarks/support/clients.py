"""Clients that ask a server, and time its answers."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
from apbv import Engine, HostGroup
from apbv.serve.server import bind, serve
from apbv.serve.settings import ServerSettings

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Answer:
    """An answer as a client saw it.

    Attributes:
        first_token, end: seconds from the request to the first text, and to the end.
        text: the answer.
        num_tokens: of the answer, by the server's count.
    """

    first_token: float
    end: float
    text: str
    num_tokens: int


def stream_answer(port: int, body: dict, timeout: float, asked: float | None = None) -> Answer:
    """Send a chat request, and stream the answer.

    Args:
        asked: when the request was to be sent, by which its times count; None: now.

    Raises:
        InvalidRequestError: the server answers with an error.
    """
    began = time.perf_counter() if asked is None else asked
    body = {
        "model": "benchmark",
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    data = json.dumps(body).encode()
    try:
        response = _OPEN(url, data, timeout)
    except urllib.error.HTTPError as error:
        raise InvalidRequestError(
            f"the server answers {error.code}: {error.read().decode()}"
        ) from error
    first = None
    text = ""
    num_tokens = 0
    with response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise InvalidRequestError(f"the server fails: {event['error']['message']}")
            for choice in event["choices"]:
                text += choice["delta"].get("content", "")
            if event["usage"] and num_tokens == 0:
                num_tokens = event["usage"].get("completion_tokens", 0)
            if text and first is None:
                first = time.perf_counter()
    end = time.perf_counter()
    if first is None:
        first = end
    return Answer(first - began, end - began, text, num_tokens)


def serve_while(
    engine: Engine, hosts: HostGroup, settings: ServerSettings, ask: Callable[[int], None]
) -> None:
    """Start a server, call a function with its port on host 0, and end the server; collective.

    Raises:
        Exception: what the function raised; on other hosts a HostError.
    """
    with hosts.local_stage("opening a port"):
        sock = bind("127.0.0.1", 0) if hosts.is_leader else None
    failures: list[BaseException] = []

    def clients() -> None:
        try:
            port = sock.getsockname()[1]
            while is_healthy(port) is None:
                time.sleep(0.05)
            ask(port)
        except BaseException as error:
            failures.append(error)
        # This ends the server gracefully.
        os.kill(os.getpid(), signal.SIGTERM)

    if hosts.is_leader:
        threading.Thread(target=clients, daemon=True).start()
    serve(engine, hosts, sock, settings)
    with hosts.local_stage("asking the server"):
        if failures:
            raise failures[0]


def is_healthy(port: int) -> bool | None:
    """Return whether the server says that it can answer; None where it does not reply."""
    try:
        with _OPEN(f"http://127.0.0.1:{port}/health", timeout=10):
            return True
    except urllib.error.HTTPError:
        return False
    except OSError:
        return None
