"""Clients that ask a server, or the engine without it, and time their answers."""

import argparse
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import mock

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import Engine, HostGroup
from apbv.config import SamplingParams
from apbv.serve.batch import Batch
from apbv.serve.batch_files import Answers, Requests
from apbv.serve.job import DURATIONS
from apbv.serve.log import FIELDS
from apbv.serve.report import report
from apbv.serve.server import bind, run_worker, serve
from apbv.serve.settings import ServerSettings

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Answer:
    """An answer as a client saw it: times in seconds since it asked, the text and how many tokens it has."""

    first_token: float
    end: float
    text: str
    num_tokens: int


def ask_engine(engine: Engine, options: argparse.Namespace) -> Answer:
    """Ask the engine without the server; collective."""
    began = time.perf_counter()
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos)
    result = engine.generate(options.prompt, video=options.video, num_frames=options.frames, sampling=sampling)
    first_token, end = result.stats["ttft_ms"] / 1e3, time.perf_counter() - began
    return Answer(first_token, end, result.text, len(result.token_ids))


def ask_server(port: int, options: argparse.Namespace, asked: float | None = None) -> Answer:
    """Ask the server over HTTP, and stream the answer.

    Args:
        asked: when the request was to be sent, by which its times count; None: now.
    """
    return stream_answer(port, request_of(options), options.timeout, asked)


def request_of(options: argparse.Namespace) -> dict:
    """Return the body of the chat request that the options describe."""
    content = [{"type": "text", "text": options.prompt}]
    if options.video:
        content.insert(0, {"type": "video_url", "video_url": {"url": Path(options.video).name}})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": options.max_new_tokens,
        "num_frames": options.frames,
        "ignore_eos": options.ignore_eos,
    }


def stream_answer(port: int, body: dict, timeout: float, asked: float | None = None) -> Answer:
    """Send a chat request, and stream the answer.

    Args:
        asked: as of :func:`ask_server`.

    Raises:
        ValueError: the server answers with an error.
    """
    body = {"model": "benchmark", **body, "stream": True, "stream_options": {"include_usage": True}}
    began, first, text, num_tokens = asked or time.perf_counter(), None, "", 0
    url, data = f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode()
    try:
        response = _OPEN(url, data, timeout)
    except urllib.error.HTTPError as error:
        raise ValueError(f"the server answers {error.code}: {error.read().decode()}") from error
    with response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(f"the server fails: {event['error']['message']}")
                for choice in event["choices"]:
                    text += choice["delta"].get("content", "")
                num_tokens = num_tokens or (event["usage"] or {}).get("completion_tokens", 0)
                first = first or (time.perf_counter() if text else None)
    end = time.perf_counter()
    return Answer((first or end) - began, end - began, text, num_tokens)


@dataclass(frozen=True)
class Way:
    """A workload, and what answers it.

    Attributes:
        way: "engine", "server" or "batch".
        concurrency: number of clients, each with one request at a time; None: requests arrive at a rate.
        rate: requests per second.
        max_running: the limit of each host's decoding batch; None: all.
        homes: how many hosts decode; None: all.
        speculate: the drafting strategy; None: there is no draft.
    """

    way: str
    concurrency: int | None = None
    rate: float | None = None
    max_running: int | None = None
    homes: int | None = None
    speculate: str | None = None

    def ask(self, port: int, options: argparse.Namespace) -> list[Answer]:
        """Send all requests: each client its next after an answer, or by a Poisson process of the rate."""
        random, answers = Random(0), []
        with ThreadPoolExecutor(self.concurrency or options.requests) as pool:
            for _ in range(options.requests):
                arrived = time.perf_counter() if self.rate else None
                answers.append(pool.submit(ask_server, port, options, arrived))
                if self.rate:
                    time.sleep(random.expovariate(self.rate))
            return [answer.result() for answer in answers]


def ask_a_server(
    engine: Engine, hosts: HostGroup, ways: Sequence[Way], expected: str, options: argparse.Namespace
) -> list[tuple[Way, list[Answer], float]]:
    """Start a server, ask it in ways that differ in the load alone, and end it; collective.

    Returns:
        For each way the answers, and the seconds that they took all together; on host 0.
    """
    folder, limits = Path(options.video or ".").resolve().parent, {"max_frames": options.frames}
    limits |= {"max_queue": options.requests, "max_running": ways[0].max_running}
    measured: list[tuple[Way, list[Answer], float]] = []

    def ask(port: int) -> None:
        ask_server(port, options)  # a warm-up
        for way in ways:
            began = time.perf_counter()
            answers = way.ask(port, options)
            seconds = time.perf_counter() - began
            if any(answer.text != expected for answer in answers):
                raise ValueError("the server does not answer as the engine does")
            measured.append((way, answers, seconds))

    homes = min(ways[0].homes or hosts.size, engine.num_homes)
    with mock.patch.object(Engine, "num_homes", homes):
        serve_while(engine, hosts, ServerSettings(model="benchmark", media_dir=folder, **limits), ask)
    return measured


def ask_a_batch(
    engine: Engine, hosts: HostGroup, expected: str, options: argparse.Namespace
) -> tuple[list[Answer], float]:
    """Answer a file of the requests without HTTP; collective.

    Returns:
        The answers, whose times count since they were read, and the seconds that they took together; on host 0.

    Raises:
        ValueError: an answer is not the expected one.
    """
    media = Path(options.video or ".").resolve().parent
    settings = ServerSettings(model="benchmark", media_dir=media, max_frames=options.frames)
    if not hosts.is_leader:
        run_worker(engine, hosts, settings)
        return [], 0.0
    with TemporaryDirectory() as folder:
        asked, out = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
        line = {"method": "POST", "url": "/v1/chat/completions", "body": request_of(options)}
        lines = [json.dumps({"custom_id": str(number), **line}) for number in range(options.requests)]
        asked.write_text("\n".join(lines))
        with closing(Answers(out)) as answers:
            batch = Batch(Requests(asked), answers, settings, lambda _: None)
            with _durations() as durations:
                run_worker(engine, hosts, settings, batch.open)
        seconds = batch.seconds
        bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    if any("error" in body or body["choices"][0]["message"]["content"] != expected for body in bodies):
        raise ValueError("the batch is not answered as by the engine")
    num_tokens = (body["usage"]["completion_tokens"] for body in bodies)
    times = zip(durations["time_to_first_token"], durations["total"], num_tokens, strict=True)
    return [Answer(first, end, expected, number) for first, end, number in times], seconds


@contextmanager
def _durations() -> Iterator[dict[str, list[float]]]:
    """Collect the durations (:data:`apbv.serve.job.DURATIONS`) of the requests that finish in the block."""
    logger, handler = logging.getLogger(report.__module__), logging.Handler()
    durations: dict[str, list[float]] = {name: [] for name in DURATIONS}

    def note(record: logging.LogRecord) -> None:
        told = getattr(record, FIELDS)
        for name, known in durations.items():
            if (seconds := told[f"{name}_seconds"]) is not None:
                known.append(seconds)

    handler.emit = note
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield durations
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def serve_while(engine: Engine, hosts: HostGroup, settings: ServerSettings, ask: Callable[[int], None]) -> None:
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
        os.kill(os.getpid(), signal.SIGTERM)  # ends the server gracefully

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
