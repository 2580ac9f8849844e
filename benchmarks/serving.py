"""Measure the server under load and the engine alone: requests/s, TTFT and ITL.

    torchrun --nproc-per-node 2 benchmarks/serving.py --requests 64 --concurrency 1 4 16 --json serving.jsonl
    torchrun --nproc-per-node 2 benchmarks/serving.py --max-running 1 all --concurrency 16 --ignore-eos
    python benchmarks/serving.py --model Qwen/Qwen2.5-VL-7B-Instruct --video clip.mp4 --frames 256  # on a GPU

Every client repeats the same question about the same video and streams the answer; TTFT is the client's, so it
includes queueing. The engine alone answers the same question sequentially. Answers that differ from the engine's
are an error. With ``--max-running 1 all`` a server without batched decoding and one with it alternate,
``--rounds`` times.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import Engine, HostGroup, demo
from apbv.allocator import keep_freed_memory
from apbv.hosts import run_on_hosts

from support.arguments import COUNT, add_shared
from support.clients import Answer, Way, ask_a_server, ask_engine
from support.records import report
from support.summaries import percentiles


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Measure the engine and the servers; yield the records, on host 0."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    ask_engine(engine, options)  # a warm-up
    began = time.perf_counter()
    alone = [ask_engine(engine, options) for _ in range(options.requests)]
    yield record(options, hosts, Way("engine"), alone, time.perf_counter() - began)
    measured: dict[Way, tuple[list[Answer], float]] = {}
    for _, max_running in itertools.product(range(options.rounds), options.max_running):
        for way, answers, seconds in ask_a_server(engine, hosts, max_running, alone[0].text, options):
            before, past = measured.get(way, ([], 0.0))
            measured[way] = [*before, *answers], past + seconds
    yield from (record(options, hosts, way, *figures) for way, figures in measured.items())


def record(options: argparse.Namespace, hosts: HostGroup, way: Way, answers: list[Answer], seconds: float) -> dict:
    """Return a JSON-ready record."""
    samples = {
        "ttft_ms": [answer.first_token * 1e3 for answer in answers],
        "tpot_ms": [(a.end - a.first_token) * 1e3 / max(a.num_tokens - 1, 1) for a in answers],
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
    }


COLUMNS = {
    "": "{way}",
    "clients": "{concurrency}",
    "at once": lambda row: row["max_running"] or ("all" if row["way"] == "server" else 1),
    "answers/s": "{request_throughput:.2f}",
    "tokens/s": "{output_throughput:.0f}",
    **{
        f"{name} {share} ms": f"{{{time}[{share}]:.0f}}"
        for time, name in {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "answer"}.items()
        for share in ("p50", "p90")
    },
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help='"demo" (default), a directory, or a hub id')
    parser.add_argument(
        "--video", default=str(demo.video_path()), metavar="FILE", help="default: the bundled clip"
    )
    parser.add_argument("--prompt", default="name the letters in order")
    parser.add_argument("--frames", type=COUNT, default=128)
    parser.add_argument("--max-new-tokens", type=COUNT, default=32)
    parser.add_argument("--requests", type=COUNT, default=64, help="requests per measurement (default 64)")
    parser.add_argument("--concurrency", type=COUNT, nargs="+", default=[1, 4, 16], help="concurrent clients")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")
    parser.add_argument(
        "--max-running",
        type=lambda text: None if text == "all" else COUNT(text),
        nargs="+",
        default=[None],
        metavar="N|all",
        help="decoding batch limits, each measured on its own server (default: all)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a host (default 300)")
    add_shared(parser, "json", dtype="float32", rounds=1)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    keep_freed_memory()
    return run_on_hosts(lambda hosts: report(options, measure(options, hosts), COLUMNS, hosts), options.timeout)


if __name__ == "__main__":
    sys.exit(main())
