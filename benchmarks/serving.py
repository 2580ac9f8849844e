"""Measure the server under load beside the engine without it: answers per second, times to and between tokens.

    torchrun --nproc-per-node 2 benchmarks/serving.py --requests 64 --concurrency 1 4 16 --json serving.jsonl
    torchrun --nproc-per-node 2 benchmarks/serving.py --max-running 1 all --concurrency 16 --ignore-eos
    python benchmarks/serving.py --model Qwen/Qwen2.5-VL-7B-Instruct --video clip.mp4 --frames 256  # on a GPU

Every client asks the same question about the same video, over and over, and streams the answer; the first token's
time is the client's, so it includes the queue. The engine alone answers the same question one time after another.
Answers that differ from the engine's are an error. With ``--max-running 1 all`` a server that decodes one answer
at a time and one that decodes them together take turns, ``--rounds`` times.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import Engine, HostGroup, demo
from apbv.allocator import keep_freed_memory
from apbv.config import SamplingParams
from apbv.hosts import run_on_hosts
from apbv.input.request import Question, Request
from apbv.serve.media import MediaSettings
from apbv.serve.reading import RequestSettings
from apbv.serve.server import ServerSettings, bind, serve
from apbv.stats import StageTimer, device_name

from support.arguments import add_json_option
from support.records import made_by, write_by_host_0
from support.summaries import percentiles
from support.tables import markdown_table


@dataclass(frozen=True)
class Answer:
    """An answer as a client saw it: times in seconds since it asked, the text and how many tokens it has."""

    first_token: float
    end: float
    text: str
    num_tokens: int

    @property
    def per_token(self) -> float:
        """The mean seconds from one token to the next."""
        return (self.end - self.first_token) / max(self.num_tokens - 1, 1)


def ask_engine(engine: Engine, options: argparse.Namespace) -> Answer:
    """Ask the engine without the server; collective."""
    began, first = time.perf_counter(), []

    def note(_: int) -> None:
        if not first:
            first.append(time.perf_counter())

    request = Request(
        Question(options.prompt, options.video, num_frames=options.frames),
        StageTimer(engine.hosts),
        sampling=SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos),
        on_token=note,
    )
    result = engine.answer(request)
    return Answer(first[0] - began, time.perf_counter() - began, result.text, len(result.token_ids))


def ask_server(port: int, options: argparse.Namespace) -> Answer:
    """Ask the server over HTTP, and stream the answer."""
    content = [
        {"type": "video_url", "video_url": {"url": Path(options.video).name}},
        {"type": "text", "text": options.prompt},
    ]
    body = {
        "model": "benchmark",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": options.max_new_tokens,
        "num_frames": options.frames,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, text, num_tokens = time.perf_counter(), None, "", 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=options.timeout)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the server answers {response.status}: {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ValueError(f"the server fails: {event['error']['message']}")
                for choice in event["choices"]:
                    text += choice["delta"].get("content", "")
                num_tokens = num_tokens or (event["usage"] or {}).get("completion_tokens", 0)
                first = first or (time.perf_counter() if text else None)
    finally:
        connection.close()
    end = time.perf_counter()
    return Answer((first or end) - began, end - began, text, num_tokens)


def under_load(ask: Callable[[], Answer], requests: int, concurrency: int) -> tuple[list[Answer], float]:
    """Collect answers by clients that ask again as soon as they have one; return them and the seconds it took."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        answers = list(clients.map(lambda _: ask(), range(requests)))
    return answers, time.perf_counter() - began


def run(options: argparse.Namespace, hosts: HostGroup) -> list[dict]:
    """Measure the engine and the servers; return the records, on host 0."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    ask_engine(engine, options)  # a warm-up
    began = time.perf_counter()
    alone = [ask_engine(engine, options) for _ in range(options.requests)]
    records = [record(options, hosts, Way("engine"), alone, time.perf_counter() - began)]
    measured: dict[Way, tuple[list[Answer], float]] = {}
    for _ in range(options.rounds):
        for max_running in options.max_running:
            for way, answers, seconds in ask_a_server(engine, hosts, max_running, alone[0].text, options):
                before, past = measured.get(way, ([], 0.0))
                measured[way] = [*before, *answers], past + seconds
    return records + [record(options, hosts, way, *figures) for way, figures in measured.items()]


@dataclass(frozen=True)
class Way:
    """What is asked, by how many clients at a time, and how many answers it decodes at once; None: all."""

    name: str
    concurrency: int = 1
    max_running: int | None = None


def ask_a_server(
    engine: Engine, hosts: HostGroup, max_running: int | None, expected: str, options: argparse.Namespace
) -> list[tuple[Way, list[Answer], float]]:
    """Start a server, ask it, and end it; collective.

    Returns:
        For each number of clients the answers, and the seconds that they took all together; on host 0.
    """
    with hosts.local_stage("opening a port"):
        sock = bind("127.0.0.1", 0) if hosts.is_leader else None
    media = MediaSettings(folder=Path(options.video).resolve().parent)
    limits = RequestSettings(max_frames=max(options.frames, 1), media=media)
    settings = ServerSettings(
        model="benchmark", max_queue=max(options.concurrency), max_running=max_running, requests=limits
    )
    measured: list[tuple[Way, list[Answer], float]] = []
    failures: list[BaseException] = []

    def clients() -> None:
        try:
            port = sock.getsockname()[1]
            _wait_until_ready(port)
            ask_server(port, options)  # a warm-up
            for concurrency in options.concurrency:
                answers, seconds = under_load(lambda: ask_server(port, options), options.requests, concurrency)
                if any(answer.text != expected for answer in answers):
                    raise ValueError("the server does not answer as the engine does")
                measured.append((Way("server", concurrency, max_running), answers, seconds))
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the server gracefully

    if hosts.is_leader:
        threading.Thread(target=clients, daemon=True).start()
    serve(engine, hosts, sock, settings)
    with hosts.local_stage("asking the server"):
        if failures:
            raise failures[0]
    return measured


def _wait_until_ready(port: int) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            connection.close()


def record(options: argparse.Namespace, hosts: HostGroup, way: Way, answers: list[Answer], seconds: float) -> dict:
    """Return a JSON-ready record."""
    samples = {
        "ttft_ms": [answer.first_token * 1e3 for answer in answers],
        "tpot_ms": [answer.per_token * 1e3 for answer in answers],
        "latency_ms": [answer.end * 1e3 for answer in answers],
    }
    return {
        "benchmark": "serving",
        "model": options.model,
        "way": way.name,
        "hosts": hosts.size,
        "concurrency": way.concurrency,
        "max_running": way.max_running,
        "num_requests": len(answers),
        "num_frames": options.frames,
        "request_throughput": len(answers) / seconds,
        "output_throughput": sum(answer.num_tokens for answer in answers) / seconds,
        **{name: percentiles(values) for name, values in samples.items()},
        "samples": samples,
        "device": device_name(hosts.device),
        **made_by("serving.py"),
    }


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table."""
    times, shares = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "answer"}, ("p50", "p90")
    lines = [
        [
            row["way"],
            row["concurrency"],
            row["max_running"] or ("all" if row["way"] == "server" else 1),
            f"{row['request_throughput']:.2f}",
            f"{row['output_throughput']:.0f}",
            *(f"{row[time][share]:.0f}" for time in times for share in shares),
        ]
        for row in rows
    ]
    names = [f"{name} {share} ms" for name in times.values() for share in shares]
    return markdown_table(["", "clients", "at once", "answers/s", "tokens/s", *names], lines)


def answers_at_once(text: str) -> int | None:
    """Read a number, or ``all``."""
    return None if text == "all" else int(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help='"demo" (default), a directory, or a hub id')
    parser.add_argument(
        "--video", default=str(demo.video_path()), metavar="FILE", help="default: the packaged clip"
    )
    parser.add_argument("--prompt", default="name the letters in order")
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64, help="for each figure")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="clients at a time")
    parser.add_argument("--ignore-eos", action="store_true", help="every answer has --max-new-tokens tokens")
    parser.add_argument(
        "--max-running",
        type=answers_at_once,
        nargs="+",
        default=[None],
        metavar="N|all",
        help="how many answers a server decodes at once; of several, each has a server (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each of these servers is asked")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for another host")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    numbers = (options.requests, options.frames, options.max_new_tokens, options.rounds, *options.concurrency)
    if min(*numbers, *filter(lambda number: number is not None, options.max_running)) < 1:
        parser.error("numbers must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def body(hosts: HostGroup) -> None:
        if hosts.device.type == "cpu":
            keep_freed_memory()
        write_by_host_0(hosts, options, run(options, hosts), table)

    return run_on_hosts(body, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
