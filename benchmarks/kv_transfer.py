"""Measure how KV gets from the hosts that prefilled it to another process: over TCP, and by a directory.

    torchrun --nproc-per-node 2 benchmarks/kv_transfer.py --tokens 8192 --directory /dev/shm

The KV is made up, of the shapes of a real model. Both ways go through the same offer and the same consumer, a
process of its own without the engine, which copies every layer to memory of its own as it comes. They take turns,
round by round. In an extra first round the consumer compares digests of what it got.
"""

import argparse
import statistics
import sys
from pathlib import Path

from apbv import HostGroup
from apbv.hosts import run_on_hosts
from apbv.kv.offers import Offers
from apbv.prefilling.result import PrefillResult
from apbv.stats import device_name

from support.arguments import add_json_option
from support.kv_transfer.consumer import Consumer, consumer_of, digest_of
from support.kv_transfer.made_up import SHAPES, Shape, made_up_prefill
from support.records import made_by, write_by_host_0
from support.tables import markdown_table

WAYS = ("tcp", "directory")


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
                    **made_by("kv_transfer.py"),
                }
            )
    write_by_host_0(hosts, options, records, markdown)


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
