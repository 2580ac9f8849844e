"""Measure how KV gets from the hosts that prefilled it to another process: over TCP, and by a directory.

    torchrun --nproc-per-node 2 benchmarks/kv_transfer.py --tokens 8192 --directory /dev/shm

The KV is made up, of the shapes of a real model. Both ways go through the same offer and the same consumer, a
process of its own without the engine, which copies every layer to memory of its own as it comes. They take turns,
round by round. In an extra first round the consumer compares digests of what it got.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from arguments import add_json_option, command_line
from kv_consumer import Consumed, digest_of

from apbv import HostGroup
from apbv.hosts import run_on_hosts
from apbv.input.model_inputs import ModelInputs
from apbv.kv.cache import ShardedCache
from apbv.kv.manifest import ModelIdentity
from apbv.kv.offers import Offers
from apbv.kv.placement import ShardedKV
from apbv.kv.ticket import Ticket
from apbv.layout import plan_layout
from apbv.prefilling.result import PrefillResult
from apbv.stats import StageTimer, append_json_lines, device_name, markdown_table, provenance

WAYS = ("tcp", "directory")
QUESTION_LEN = 32  # tokens
WAIT = 600.0  # seconds


@dataclass(frozen=True)
class Shape:
    """The KV of a model, in bf16: decoder layers, KV heads, and numbers of a head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int = 128


SHAPES = {"qwen2.5-vl-3b": Shape(36, 2), "qwen2.5-vl-7b": Shape(28, 4)}


def made_up_prefill(hosts: HostGroup, shape: Shape, num_tokens: int) -> PrefillResult:
    """Return what a prefill on these hosts would leave, with random KV that is spread as APB-V spreads it."""
    layout = plan_layout(
        num_hosts=hosts.size,
        num_tokens=num_tokens,
        context_start=0,
        query_start=num_tokens - QUESTION_LEN,
        anchor_len=None,
        passing_len=None,
        zigzag=True,
    )
    num_rows = sum(map(len, layout.cache_spans(hosts.rank)))
    random = torch.Generator().manual_seed(hosts.rank)
    size = 2, 1, shape.num_kv_heads, num_rows, shape.head_dim
    layers = [
        tuple(torch.randn(size, generator=random, dtype=torch.bfloat16).unbind()) for _ in range(shape.num_layers)
    ]
    positions = torch.arange(num_tokens)[None]
    return PrefillResult(
        logits=torch.zeros(1, 1),
        layout=layout,
        method="apbv",
        exact=False,
        inputs=ModelInputs(torch.zeros_like(positions), positions, 0, layout.query.start),
        timer=StageTimer(hosts),
        kv=ShardedKV(ShardedCache.of_shares(layers, layout, hosts.rank), hosts),
        model=lambda: ModelIdentity("made up", None, "qwen2_5_vl", "", ""),
    )


class Consumer:
    """A Consumer fetches KV in a process of its own, on the leader's machine."""

    def __init__(self):
        script = Path(__file__).with_name("kv_consumer.py")
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fetch(self, ticket: Ticket, digests: bool = False) -> Consumed:
        """Have it fetch everything, and return what it tells."""
        json.dump({"params": ticket.to_params(), "digests": digests}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("the consumer has ended: its error is above")
        return Consumed(**json.loads(line))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(WAIT)


@contextmanager
def consumer_of(hosts: HostGroup) -> Iterator[Consumer | None]:
    """Run a consumer beside the leader."""
    consumer = Consumer() if hosts.is_leader else None
    try:
        yield consumer
    finally:
        if consumer is not None:
            consumer.close()


def transfer(state: PrefillResult, offers: Offers, consumer: Consumer | None, digests: bool) -> dict | None:
    """Offer the KV and have it fetched, and return the times on the leader; collective."""
    hosts = state.kv.hosts
    hosts.barrier()
    began = hosts.clock()
    ticket = state.offer(offers)
    offered = hosts.clock()
    if not hosts.is_leader:
        hosts.barrier()
        return None
    consumed = consumer.fetch(ticket, digests)
    ended = hosts.clock()
    hosts.barrier()
    return {
        "offer_ms": 1e3 * (offered - began),
        "first_layer_ms": 1e3 * consumed.first_layer_seconds,
        "fetch_ms": 1e3 * consumed.seconds,
        "total_ms": 1e3 * (ended - began),
        "digest": consumed.digest,
        "num_bytes": ticket.num_bytes,
    }


def measure(hosts: HostGroup, shape: Shape, options: argparse.Namespace) -> dict[str, list[dict]] | None:
    """Return each way's rounds on the leader; collective."""
    state = made_up_prefill(hosts, shape, options.tokens)
    rounds: dict[str, list[dict]] = {way: [] for way in WAYS}
    with (
        Offers(hosts) as memory,
        Offers(hosts, directory=options.directory) as folder,
        consumer_of(hosts) as consumer,
    ):
        ways = {"tcp": memory, "directory": folder}
        whole = state.to_dynamic_cache()
        layers = whole and [(layer.keys[0], layer.values[0]) for layer in whole.layers]
        for way, offers in ways.items():
            checked = transfer(state, offers, consumer, digests=True)
            if hosts.is_leader and checked["digest"] != digest_of(layers):
                raise ValueError(f"what came by {way} is not what was sent")
        del whole, layers
        for number in range(options.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                rounds[way].append(transfer(state, ways[way], consumer, digests=False))
    return rounds if hosts.is_leader else None


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Measure, and print and write the figures."""
    records = []
    for name in options.shapes:
        rounds = measure(hosts, SHAPES[name], options)
        for way in WAYS if rounds else ():
            times = [key for key in rounds[way][0] if key.endswith("_ms")]
            samples = {key: [each[key] for each in rounds[way]] for key in times}
            medians = {key: statistics.median(values) for key, values in samples.items()}
            num_bytes = rounds[way][0]["num_bytes"]
            records.append(
                {
                    "benchmark": "kv_transfer",
                    "way": way,
                    "shape": name,
                    "hosts": hosts.size,
                    "num_tokens": options.tokens,
                    "num_bytes": num_bytes,
                    **medians,
                    "gigabytes_per_second": num_bytes / medians["total_ms"] / 1e6,
                    "samples": samples,
                    "device": device_name(hosts.device),
                    "command": command_line("kv_transfer.py"),
                    **provenance(),
                }
            )
    with hosts.local_stage("writing the figures"):
        if hosts.is_leader:
            if options.json:
                append_json_lines(options.json, records)
            print(markdown(records))


def markdown(records: list[dict]) -> str:
    """Format records as a Markdown table."""
    header = ["KV of", "tokens", "MB", "way", "offer (ms)", "first layer", "fetch (ms)", "total (ms)", "GB/s"]
    rows = [
        [
            record["shape"],
            record["num_tokens"],
            f"{record['num_bytes'] / 1e6:.0f}",
            record["way"],
            *(f"{record[name]:.0f}" for name in ("offer_ms", "first_layer_ms", "fetch_ms", "total_ms")),
            f"{record['gigabytes_per_second']:.2f}",
        ]
        for record in records
    ]
    return markdown_table(header, rows)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm/apbv-kv-transfer"))
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.tokens < 512 or options.rounds < 1:
        parser.error("--tokens must be at least 512, and --rounds at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_on_hosts(lambda hosts: run(options, hosts))


if __name__ == "__main__":
    sys.exit(main())
