"""Measure the server under load beside the engine without it: answers per second and time to first token.

    torchrun --nproc-per-node 2 benchmarks/serving.py --requests 64 --concurrency 1 4 16 --json serving.jsonl
    python benchmarks/serving.py --model Qwen/Qwen2.5-VL-7B-Instruct --video clip.mp4 --frames 256    (on a GPU)

Every client asks the same question about the same video, over and over, and streams the answer; the first token's
time is the client's, so it includes the queue. The engine alone answers the same question one time after another.
Answers that differ from the engine's are an error.
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
from arguments import add_json_option, command_line
from summaries import percentiles

from apbv import Engine, HostGroup, demo
from apbv.allocator import keep_freed_memory
from apbv.hosts import run_on_hosts
from apbv.serve.media import MediaSettings
from apbv.serve.reading import RequestSettings
from apbv.serve.server import ServerSettings, bind, serve
from apbv.stats import append_json_lines, device_name, markdown_table, provenance


@dataclass(frozen=True)
class Answer:
    """An answer as a client saw it: times in seconds since it asked, and the text."""

    first_token: float
    end: float
    text: str


def ask_engine(engine: Engine, options: argparse.Namespace) -> Answer:
    """Ask the engine without the server; collective."""
    began, first = time.perf_counter(), []

    def note(_: int) -> None:
        if not first:
            first.append(time.perf_counter())

    result = engine.generate(
        options.prompt,
        video=options.video,
        num_frames=options.frames,
        max_new_tokens=options.max_new_tokens,
        on_token=note,
    )
    return Answer(first[0] - began, time.perf_counter() - began, result.text)


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
        "stream": True,
    }
    began, first, text = time.perf_counter(), None, ""
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
                text += event["choices"][0]["delta"].get("content", "")
                first = first or (time.perf_counter() if text else None)
    finally:
        connection.close()
    end = time.perf_counter()
    return Answer((first or end) - began, end - began, text)


def under_load(ask: Callable[[], Answer], requests: int, concurrency: int) -> tuple[list[Answer], float]:
    """Collect answers by clients that ask again as soon as they have one; return them and the seconds it took."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        answers = list(clients.map(lambda _: ask(), range(requests)))
    return answers, time.perf_counter() - began


def run(options: argparse.Namespace, hosts: HostGroup) -> list[dict]:
    """Measure the engine and the server; return the records, on host 0."""
    with hosts.local_stage("opening a port"):
        sock = bind("127.0.0.1", 0) if hosts.is_leader else None
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    ask_engine(engine, options)  # a warm-up
    began = time.perf_counter()
    alone = [ask_engine(engine, options) for _ in range(options.requests)]
    records = [record(options, hosts, "engine", 1, alone, time.perf_counter() - began)]
    media = MediaSettings(folder=Path(options.video).resolve().parent)
    limits = RequestSettings(max_frames=max(options.frames, 1), media=media)
    settings = ServerSettings(model="benchmark", max_queue=max(options.concurrency), requests=limits)
    failures: list[BaseException] = []

    def clients() -> None:
        try:
            port = sock.getsockname()[1]
            _wait_until_ready(port)
            ask_server(port, options)  # a warm-up
            for concurrency in options.concurrency:
                answers, seconds = under_load(lambda: ask_server(port, options), options.requests, concurrency)
                if any(answer.text != alone[0].text for answer in answers):
                    raise ValueError("the server does not answer as the engine does")
                records.append(record(options, hosts, "server", concurrency, answers, seconds))
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the server gracefully

    if hosts.is_leader:
        threading.Thread(target=clients, daemon=True).start()
    serve(engine, hosts, sock, settings)
    with hosts.local_stage("asking the server"):
        if failures:
            raise failures[0]
    return records


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


def record(
    options: argparse.Namespace,
    hosts: HostGroup,
    way: str,
    concurrency: int,
    answers: list[Answer],
    seconds: float,
) -> dict:
    """Return a JSON-ready record."""
    first = [answer.first_token * 1e3 for answer in answers]
    total = [answer.end * 1e3 for answer in answers]
    return {
        "benchmark": "serving",
        "model": options.model,
        "way": way,
        "hosts": hosts.size,
        "concurrency": concurrency,
        "num_requests": len(answers),
        "num_frames": options.frames,
        "request_throughput": len(answers) / seconds,
        "ttft_ms": percentiles(first),
        "latency_ms": percentiles(total),
        "samples": {"ttft_ms": first, "latency_ms": total},
        "device": device_name(hosts.device),
        "command": command_line("serving.py"),
        **provenance(),
    }


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table."""
    lines = [
        [row["way"], row["concurrency"], f"{row['request_throughput']:.1f}"]
        + [f"{value:.0f}" for times in ("ttft_ms", "latency_ms") for value in row[times].values()]
        for row in rows
    ]
    names = [f"{time} {at} ms" for time in ("TTFT", "answer") for at in rows[0]["ttft_ms"]]
    return markdown_table(["", "clients", "answers/s", *names], lines)


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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for another host")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if min(options.requests, options.frames, options.max_new_tokens, *options.concurrency) < 1:
        parser.error("--requests, --frames, --max-new-tokens and --concurrency must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def body(hosts: HostGroup) -> None:
        if hosts.device.type == "cpu":
            keep_freed_memory()
        rows = run(options, hosts)
        with hosts.local_stage("writing the figures"):
            if hosts.is_leader:
                print(table(rows), flush=True)
                if options.json:
                    append_json_lines(options.json, rows)

    return run_on_hosts(body, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
