"""Measure KV transfer over TCP from the hosts that prefilled to another process.

    torchrun --nproc-per-node 2 benchmarks/kv_transfer.py --tokens 8192

The KV is synthetic, with the shapes of a real model. The consumer is a separate process without the
engine, which copies every layer to its own memory as it arrives, one ticket a line. In an extra
first round it compares digests.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext

import torch
from torch import Tensor

from apbv import HostGroup
from apbv.input.model_inputs import ModelInputs
from apbv.kv.cache import ShardedCache
from apbv.kv.facts import ModelIdentity
from apbv.kv.offers import Offers
from apbv.kv.placement import ShardedKV
from apbv.kv.remote import RemoteKV
from apbv.kv.ticket import Ticket
from apbv.layout import plan_layout
from apbv.prefilling.result import PrefillResult
from apbv.stats import StageTimer

from support.arguments import parser_of
from support.records import columns_of, measure_on_hosts

QUESTION_LEN = 32
HEAD_DIM = 128
# Decoder layers and KV heads, in bf16.
SHAPES = {"qwen2.5-vl-3b": (36, 2), "qwen2.5-vl-7b": (28, 4)}

WAIT = 600.0  # seconds, for the consumer to end


def digest_of(layers: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Compute the SHA-256 of keys and values ``[H, T, D]``, layer by layer."""
    digest = hashlib.sha256()
    for states in layers:
        for tensor in states:
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def consume(ticket: Ticket, cache: dict, digests: bool) -> dict:
    """Fetch everything into memory that is kept from one call to the next, and confirm it.

    Returns:
        The milliseconds until the first layer and until all layers had arrived, and a digest if
        requested.
    """
    shape = ticket.num_layers, 2, ticket.num_kv_heads, ticket.num_tokens, ticket.head_dim
    if shape not in cache:
        cache[shape] = torch.zeros(shape, dtype=ticket.torch_dtype)
    kept = cache[shape]
    began = time.perf_counter()
    first = None
    with RemoteKV(ticket) as kv:
        for own, layer in zip(kept, kv.layers(range(ticket.num_tokens)), strict=True):
            first = first or time.perf_counter()
            for states, received in zip(own, layer, strict=True):
                states.copy_(received)
        kv.confirm()
    times = {
        "first_layer_ms": 1e3 * (first - began),
        "fetch_ms": 1e3 * (time.perf_counter() - began),
    }
    return {**times, "digest": digest_of(kept) if digests else None}


def serve_tickets() -> None:
    """Fetch what the lines of standard input name, one after the other: the consumer's process."""
    cache: dict = {}
    for line in sys.stdin:
        order = json.loads(line)
        print(
            json.dumps(consume(Ticket.from_params(order["params"]), cache, order["digests"])),
            flush=True,
        )


class Consumer:
    """Fetches KV in a process of its own, on the leader's machine."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--consume"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fetch(self, ticket: Ticket, digests: bool) -> dict:
        """Have it fetch everything, and return the figures of :func:`consume`."""
        json.dump({"params": ticket.to_params(), "digests": digests}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("the consumer has ended: its error is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(WAIT)


def made_up_prefill(
    hosts: HostGroup, num_layers: int, num_kv_heads: int, num_tokens: int
) -> PrefillResult:
    """Return the result of a prefill on these hosts, with random KV sharded as by APB-V."""
    lengths = {
        "num_tokens": num_tokens,
        "context_start": 0,
        "query_start": num_tokens - QUESTION_LEN,
    }
    layout = plan_layout(
        num_hosts=hosts.size, anchor_len=None, passing_len=None, zigzag=True, **lengths
    )
    num_rows = sum(map(len, layout.cache_spans(hosts.rank)))
    random = torch.Generator().manual_seed(hosts.rank)
    size = (2, 1, num_kv_heads, num_rows, HEAD_DIM)
    layers = [
        tuple(torch.randn(size, generator=random, dtype=torch.bfloat16).unbind())
        for _ in range(num_layers)
    ]
    positions = torch.arange(num_tokens)[None]
    identity = ModelIdentity(
        model="made up", revision=None, family="qwen2_5_vl", config_sha256="", weights_sha256=""
    )
    return PrefillResult(
        logits=torch.zeros(1, 1),
        layout=layout,
        method="apbv",
        exact=False,
        inputs=ModelInputs(torch.zeros_like(positions), positions, 0, layout.query.start),
        timer=StageTimer(hosts),
        kv=ShardedKV(ShardedCache.of_shares(layers, layout, hosts.rank), hosts),
        model=lambda: identity,
    )


def transfer(
    state: PrefillResult, offers: Offers, consumer: Consumer | None, digests: bool = False
) -> dict:
    """Offer the KV and have it fetched, and return the times, on the leader all of them;
    collective."""
    hosts = state.kv.hosts
    hosts.barrier()
    began = hosts.clock()
    ticket = state.offer(offers)
    offered = hosts.clock()
    consumed = (
        consumer.fetch(ticket, digests) | {"num_bytes": ticket.num_bytes} if hosts.is_leader else {}
    )
    ended = hosts.clock()
    hosts.barrier()
    return {**consumed, "offer_ms": 1e3 * (offered - began), "total_ms": 1e3 * (ended - began)}


def measure(hosts: HostGroup, name: str, options: argparse.Namespace) -> list[dict]:
    """Return the rounds on the leader; collective."""
    state = made_up_prefill(hosts, *SHAPES[name], options.tokens)
    with (
        Offers(hosts) as offers,
        closing(Consumer()) if hosts.is_leader else nullcontext() as consumer,
    ):
        whole = state.to_dynamic_cache()
        checked = transfer(state, offers, consumer, digests=True)
        sent = whole and digest_of((layer.keys[0], layer.values[0]) for layer in whole.layers)
        if hosts.is_leader and checked["digest"] != sent:
            raise ValueError("what came is not what was sent")
        del whole
        return [transfer(state, offers, consumer) for _ in range(options.rounds)]


def records(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield the medians of each model's KV, on the leader; collective."""
    for name in options.shapes:
        rounds = measure(hosts, name, options)
        if not hosts.is_leader:
            continue
        times = ("offer_ms", "first_layer_ms", "fetch_ms", "total_ms")
        samples = {key: [each[key] for each in rounds] for key in times}
        medians = {key: statistics.median(values) for key, values in samples.items()}
        num_bytes = rounds[0]["num_bytes"]
        yield {
            "benchmark": "kv_transfer",
            "shape": name,
            "hosts": hosts.size,
            "num_tokens": options.tokens,
            "num_bytes": num_bytes,
            **medians,
            "gigabytes_per_second": num_bytes / medians["total_ms"] / 1e6,
            "samples": samples,
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("kv_transfer", __doc__, {"shapes": SHAPES})
    parser.add_argument("--consume", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.consume:
        serve_tickets()
        return 0
    return measure_on_hosts(options, records, columns_of("kv_transfer"))


if __name__ == "__main__":
    sys.exit(main())
