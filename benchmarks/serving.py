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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import TestCase, mock

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig, demo
from apbv.serve.batch.files import Answers, Requests
from apbv.serve.batch.runner import Batch
from apbv.serve.metrics.log import FIELDS
from apbv.serve.metrics.report import report
from apbv.serve.server import run_worker
from apbv.serve.settings import MediaLimits, ServerSettings
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
        """Send all requests, and return the answers.

        Each client sends its next request after an answer, or requests arrive by a Poisson process.
        """
        random = Random(0)
        futures = []
        with ThreadPoolExecutor(self.concurrency or options.requests) as pool:
            for _ in range(options.requests):
                arrived = time.perf_counter() if self.rate else None
                futures.append(pool.submit(ask_server, port, options, arrived))
                if self.rate:
                    time.sleep(random.expovariate(self.rate))
            return [future.result() for future in futures]


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
    settings = ServerSettings(
        model="benchmark",
        media_dir=Path(options.video or ".").resolve().parent,
        media=MediaLimits(max_frames=options.frames),
        max_queue=options.requests,
        max_running=ways[0].max_running,
    )
    measured: list[tuple[Way, list[Answer], float]] = []

    def ask(port: int) -> None:
        # Warm up.
        ask_server(port, options)
        # Measure.
        for way in ways:
            began = time.perf_counter()
            answers = way.ask(port, options)
            seconds = time.perf_counter() - began
            if any(answer.text != expected for answer in answers):
                raise ValueError("the server does not answer as the engine does")
            measured.append((way, answers, seconds))

    decode_hosts = min(ways[0].decode_hosts or hosts.size, engine.num_decode_hosts)
    with mock.patch.object(Engine, "num_decode_hosts", decode_hosts):
        serve_while(engine, hosts, settings, ask)
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
    limits = MediaLimits(max_frames=options.frames)
    settings = ServerSettings(model="benchmark", media_dir=media, media=limits)
    if not hosts.is_leader:
        run_worker(engine, hosts, settings)
        return [], 0.0
    with TemporaryDirectory() as folder:
        # Write the requests.
        requests_file = Path(folder, "requests.jsonl")
        answers_file = Path(folder, "answers.jsonl")
        body = request_of(options)
        lines = []
        for number in range(options.requests):
            request = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            lines.append(json.dumps(request))
        requests_file.write_text("\n".join(lines))

        # Answer them. The server's log has the times.
        with closing(Answers(answers_file)) as answers:
            batch = Batch(Requests(requests_file), answers, settings, _ignore)
            with TestCase().assertLogs(report.__module__, logging.INFO) as log:
                run_worker(engine, hosts, settings, batch.open)

        # Check the answers.
        num_tokens = []
        for line in answers_file.read_text().splitlines():
            body = json.loads(line)["response"]["body"]
            if "error" in body or body["choices"][0]["message"]["content"] != expected:
                raise ValueError("the batch is not answered as by the engine")
            num_tokens.append(body["usage"]["completion_tokens"])

    # The log has a record of each request, from when it had finished.
    answers = []
    for log_record, count in zip(log.records, num_tokens, strict=True):
        fields = getattr(log_record, FIELDS)
        answers.append(
            Answer(fields["time_to_first_token_seconds"], fields["total_seconds"], expected, count)
        )
    return answers, batch.seconds


def _ignore(_: object) -> None:
    """Do nothing with a batch's progress."""


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Measure the engine and the servers; yield the records, on host 0."""
    # The engines, by strategy.
    configs = {}
    for name in options.speculate:
        if name != "off":
            configs[name] = SpeculativeConfig(strategy=name)
    autoregressive, *with_draft = build_ways(options, configs, hosts)
    engines = {"off": autoregressive.engine}
    for decoding in with_draft:
        engines[decoding.label] = decoding.engine

    # The engine alone, after a warm-up. It takes longest, and is asked an eighth as often.
    ask_engine(engines["off"], options)
    began = time.perf_counter()
    alone = [ask_engine(engines["off"], options) for _ in range(-(-options.requests // 8))]
    yield record(options, hosts, Way("engine", 1), alone, time.perf_counter() - began)
    expected = alone[0].text

    # The servers and batches in turn, round after round.
    answers_of: dict[Way, list[Answer]] = defaultdict(list)
    seconds_of: dict[Way, float] = defaultdict(float)
    for _ in range(options.rounds):
        measured = []
        for ways in servers_of(options):
            engine = engines[ways[0].speculate]
            measured += ask_a_server(engine, hosts, ways, expected, options)
        if options.batch:
            for speculate in options.speculate:
                answers, seconds = ask_a_batch(engines[speculate], hosts, expected, options)
                measured.append((Way("batch", speculate=speculate), answers, seconds))
        for way, answers, seconds in measured:
            answers_of[way] += answers
            seconds_of[way] += seconds
    if hosts.is_leader:
        for way, answers in answers_of.items():
            yield record(options, hosts, way, answers, seconds_of[way])


def servers_of(options: argparse.Namespace) -> Iterator[list[Way]]:
    """Yield for each server the ways in which it is asked, which differ in the load alone."""
    for speculate, decode_hosts, max_running in itertools.product(
        options.speculate, options.decode_hosts or [None], options.max_running or [None]
    ):
        server = Way(
            "server",
            max_running=max_running,
            decode_hosts=decode_hosts,
            speculate=speculate,
        )
        if options.rate:
            yield [replace(server, rate=rate) for rate in options.rate]
        else:
            yield [replace(server, concurrency=count) for count in options.concurrency]


def record(
    options: argparse.Namespace, hosts: HostGroup, way: Way, answers: list[Answer], seconds: float
) -> dict:
    """Return a JSON-ready record.

    Args:
        seconds: that all answers took together.
    """
    max_ttft_ms, max_tpot_ms = options.limits
    samples = {"ttft_ms": [], "tpot_ms": [], "latency_ms": []}
    num_in_time = 0
    num_tokens = 0
    for answer in answers:
        ttft_ms = answer.first_token * 1e3
        # The first token has a time of its own.
        tpot_ms = (answer.end - answer.first_token) * 1e3 / max(answer.num_tokens - 1, 1)
        samples["ttft_ms"].append(ttft_ms)
        samples["tpot_ms"].append(tpot_ms)
        samples["latency_ms"].append(answer.end * 1e3)
        num_tokens += answer.num_tokens
        if ttft_ms <= max_ttft_ms and tpot_ms <= max_tpot_ms:
            num_in_time += 1
    return {
        "benchmark": "serving",
        **fields_of(options, "model", "scale"),
        "hosts": hosts.size,
        **asdict(way),
        "num_requests": len(answers),
        "num_frames": options.frames,
        "request_throughput": len(answers) / seconds,
        "goodput": num_in_time / seconds,
        "limits_ms": options.limits,
        "output_throughput": num_tokens / seconds,
        "ttft_ms": percentiles(samples["ttft_ms"]),
        "tpot_ms": percentiles(samples["tpot_ms"]),
        "latency_ms": percentiles(samples["latency_ms"]),
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
