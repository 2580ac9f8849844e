"""Measure the server under load, a batch and the engine alone: requests/s, goodput, TTFT and ITL.

    torchrun --nproc-per-node 2 benchmarks/serving.py --requests 64 --concurrency 1 4 16 \
        --json serving.jsonl
    torchrun --nproc-per-node 2 benchmarks/serving.py --max-running 1 all --concurrency 16 \
        --ignore-eos
    torchrun --nproc-per-node 2 benchmarks/serving.py --decode-hosts 1 all --rate 2 4 8 \
        --limits 500 20 --ignore-eos
    torchrun --nproc-per-node 2 benchmarks/serving.py --scale 6 --speculate off vanilla --ignore-eos
    torchrun --nproc-per-node 2 benchmarks/serving.py --batch --concurrency 16 32 \
        --requests 200 --rounds 3
    python benchmarks/serving.py --model Qwen/Qwen2.5-VL-7B-Instruct --video clip.mp4 \
        --frames 256  # on a GPU

Every client repeats the same question about the same video and streams the answer; TTFT is the
client's, so it includes queueing. With --rate requests do not wait for answers: they arrive by a
Poisson process (an open loop), and their times count from then on. Goodput is the number of
requests per second that keep both --limits. The engine alone answers it sequentially, an eighth as
often. With --batch a file of the requests is answered without HTTP, too; their times count since
they were read. Answers that differ from the engine's are an error. Servers that differ in
--max-running, in --decode-hosts (how many hosts decode) or in their draft alternate, also with a
batch, for --rounds rounds.
"""

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import TestCase, mock

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig, demo
from apbv.serve.batch_files import Answers, Requests
from apbv.serve.log import FIELDS
from apbv.serve.openai_batch import Batch
from apbv.serve.report import report
from apbv.serve.server import run_worker
from apbv.serve.settings import ServerSettings
from apbv.speculate import STRATEGIES

from support.arguments import parser_of
from support.clients import Answer, serve_while, stream_answer
from support.drafting import build_ways
from support.records import columns_of, fields_of, measure_on_hosts
from support.summaries import percentiles


def ask_engine(engine: Engine, options: argparse.Namespace) -> Answer:
    """Ask the engine without the server; collective."""
    began = time.perf_counter()
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos)
    result = engine.generate(
        options.prompt, video=options.video, num_frames=options.frames, sampling=sampling
    )
    first_token = result.stats["ttft_ms"] / 1e3
    end = time.perf_counter() - began
    return Answer(first_token, end, result.text, len(result.token_ids))


def ask_server(port: int, options: argparse.Namespace, asked: float | None = None) -> Answer:
    """Ask the server over HTTP, see :func:`.clients.stream_answer`."""
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


@dataclass(frozen=True)
class Way:
    """A workload, and what answers it.

    Attributes:
        way: "engine", "server" or "batch".
        concurrency: number of clients, each with one request at a time; None: requests arrive at a
            rate.
        rate: requests per second.
        max_running: the limit of each host's decoding batch; None: all.
        decode_hosts: how many hosts decode; None: all.
        speculate: the drafting strategy; None: there is no draft.
    """

    way: str
    concurrency: int | None = None
    rate: float | None = None
    max_running: int | None = None
    decode_hosts: int | None = None
    speculate: str | None = None

    def ask(self, port: int, options: argparse.Namespace) -> list[Answer]:
        """Send all requests: each client its next after an answer, or by a Poisson process of the
        rate."""
        random = Random(0)
        answers = []
        with ThreadPoolExecutor(self.concurrency or options.requests) as pool:
            for _ in range(options.requests):
                arrived = time.perf_counter() if self.rate else None
                answers.append(pool.submit(ask_server, port, options, arrived))
                if self.rate:
                    time.sleep(random.expovariate(self.rate))
            return [answer.result() for answer in answers]


def ask_a_server(
    engine: Engine,
    hosts: HostGroup,
    ways: Sequence[Way],
    expected: str,
    options: argparse.Namespace,
) -> list[tuple[Way, list[Answer], float]]:
    """Start a server, ask it in ways that differ in the load alone, and end it; collective.

    Returns:
        For each way the answers, and the seconds that they took all together; on host 0.
    """
    folder = Path(options.video or ".").resolve().parent
    limits = {"max_frames": options.frames}
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

    decode_hosts = min(ways[0].decode_hosts or hosts.size, engine.num_decode_hosts)
    with mock.patch.object(Engine, "num_decode_hosts", decode_hosts):
        serve_while(
            engine, hosts, ServerSettings(model="benchmark", media_dir=folder, **limits), ask
        )
    return measured


def ask_a_batch(
    engine: Engine, hosts: HostGroup, expected: str, options: argparse.Namespace
) -> tuple[list[Answer], float]:
    """Answer a file of the requests without HTTP; collective.

    Returns:
        The answers, whose times count since they were read, and the seconds that they took
        together; on host 0.

    Raises:
        ValueError: an answer is not the expected one.
    """
    media = Path(options.video or ".").resolve().parent
    settings = ServerSettings(model="benchmark", media_dir=media, max_frames=options.frames)
    if not hosts.is_leader:
        run_worker(engine, hosts, settings)
        return [], 0.0
    with TemporaryDirectory() as folder:
        asked = Path(folder, "requests.jsonl")
        out = Path(folder, "answers.jsonl")
        line = {"method": "POST", "url": "/v1/chat/completions", "body": request_of(options)}
        lines = [
            json.dumps({"custom_id": str(number), **line}) for number in range(options.requests)
        ]
        asked.write_text("\n".join(lines))
        with closing(Answers(out)) as answers:
            batch = Batch(Requests(asked), answers, settings, lambda _: None)
            with TestCase().assertLogs(report.__module__, logging.INFO) as logged:
                run_worker(engine, hosts, settings, batch.open)
        seconds = batch.seconds
        bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    if any(
        "error" in body or body["choices"][0]["message"]["content"] != expected for body in bodies
    ):
        raise ValueError("the batch is not answered as by the engine")
    num_tokens = (body["usage"]["completion_tokens"] for body in bodies)
    # Of each request, when it had finished.
    told = [getattr(record, FIELDS) for record in logged.records]
    times = [(each["time_to_first_token_seconds"], each["total_seconds"]) for each in told]
    return [
        Answer(*each, expected, number) for each, number in zip(times, num_tokens, strict=True)
    ], seconds


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Measure the engine and the servers; yield the records, on host 0."""
    configs = {
        name: SpeculativeConfig(strategy=name) for name in options.speculate if name != "off"
    }
    built = build_ways(options, configs, hosts)
    engines = {each.label: each.engine for each in built} | {"off": built[0].engine}
    ask_engine(engines["off"], options)  # a warm-up
    began = time.perf_counter()
    # It takes longest.
    alone = [ask_engine(engines["off"], options) for _ in range(-(-options.requests // 8))]
    yield record(options, hosts, Way("engine", 1), alone, time.perf_counter() - began)
    loads = [{"rate": rate} for rate in options.rate] or [
        {"concurrency": each} for each in options.concurrency
    ]
    measured: dict[Way, tuple[list[Answer], float]] = {}
    servers = options.speculate, options.decode_hosts or [None], options.max_running or [None]
    for _ in range(options.rounds):
        figures = []
        for speculate, decode_hosts, most in itertools.product(*servers):
            ways = [
                Way(
                    "server",
                    max_running=most,
                    decode_hosts=decode_hosts,
                    speculate=speculate,
                    **load,
                )
                for load in loads
            ]
            figures += ask_a_server(engines[speculate], hosts, ways, alone[0].text, options)
        for speculate in options.speculate if options.batch else ():
            way = Way("batch", speculate=speculate)
            figures.append((way, *ask_a_batch(engines[speculate], hosts, alone[0].text, options)))
        for way, answers, seconds in figures:
            before, past = measured.get(way, ([], 0.0))
            measured[way] = [*before, *answers], past + seconds
    if hosts.is_leader:
        yield from (record(options, hosts, way, *each) for way, each in measured.items())


def record(
    options: argparse.Namespace, hosts: HostGroup, way: Way, answers: list[Answer], seconds: float
) -> dict:
    """Return a JSON-ready record."""
    samples = {
        "ttft_ms": [answer.first_token * 1e3 for answer in answers],
        "tpot_ms": [(a.end - a.first_token) * 1e3 / max(a.num_tokens - 1, 1) for a in answers],
        "latency_ms": [answer.end * 1e3 for answer in answers],
    }
    in_time = [
        ttft <= options.limits[0] and tpot <= options.limits[1]
        for ttft, tpot in zip(samples["ttft_ms"], samples["tpot_ms"], strict=True)
    ]
    return {
        "benchmark": "serving",
        **fields_of(options, "model", "scale"),
        "hosts": hosts.size,
        **asdict(way),
        "num_requests": len(answers),
        "num_frames": options.frames,
        "request_throughput": len(answers) / seconds,
        "goodput": sum(in_time) / seconds,
        "limits_ms": options.limits,
        "output_throughput": sum(answer.num_tokens for answer in answers) / seconds,
        **{name: percentiles(values) for name, values in samples.items()},
        "samples": samples,
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("serving", __doc__, {"speculate": ("off", *STRATEGIES)})
    parser.set_defaults(video=str(demo.video_path()), draft_host=False, preset=None, reuse="off")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measure, columns_of("serving"))


if __name__ == "__main__":
    sys.exit(main())
