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
from apbv.errors import InvalidRequestError
from apbv.input.prompts.model_inputs import ModelInputs
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
    shape = (ticket.num_layers, 2, ticket.num_kv_heads, ticket.num_tokens, ticket.head_dim)
    if shape not in cache:
        cache[shape] = torch.zeros(shape, dtype=ticket.torch_dtype)
    buffer = cache[shape]
    began = time.perf_counter()
    first_arrived = None
    with RemoteKV(ticket) as kv:
        for layer, (keys, values) in enumerate(kv.layers(range(ticket.num_tokens))):
            if first_arrived is None:
                first_arrived = time.perf_counter()
            buffer[layer, 0].copy_(keys)
            buffer[layer, 1].copy_(values)
        kv.confirm()
    all_arrived = time.perf_counter()
    return {
        "first_layer_ms": 1e3 * (first_arrived - began),
        "fetch_ms": 1e3 * (all_arrived - began),
        "digest": digest_of(buffer) if digests else None,
    }


def serve_tickets() -> None:
    """Fetch what the lines of standard input name, one after the other: the consumer's process."""
    cache: dict = {}
    for line in sys.stdin:
        order = json.loads(line)
        ticket = Ticket.from_params(order["params"])
        figures = consume(ticket, cache, order["digests"])
        print(json.dumps(figures), flush=True)


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
            raise InvalidRequestError("the consumer has ended: its error is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(WAIT)


def made_up_prefill(
    hosts: HostGroup, num_layers: int, num_kv_heads: int, num_tokens: int
) -> PrefillResult:
    """Return the result of a prefill on these hosts, with random KV sharded as by APB-V."""
    layout = plan_layout(
        num_hosts=hosts.size,
        num_tokens=num_tokens,
        context_start=0,
        query_start=num_tokens - QUESTION_LEN,
        anchor_len=None,
        passing_len=None,
        zigzag=True,
    )
    num_rows = sum(len(span) for span in layout.cache_spans(hosts.rank))
    generator = torch.Generator().manual_seed(hosts.rank)
    shape = (2, 1, num_kv_heads, num_rows, HEAD_DIM)
    layers = []
    for _ in range(num_layers):
        keys, values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        layers.append((keys, values))
    positions = torch.arange(num_tokens)[None]
    identity = ModelIdentity(
        model="made up",
        revision=None,
        family="qwen2_5_vl",
        config_sha256="",
        weights_sha256="",
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
        num_kv_heads=num_kv_heads,
    )


def transfer(
    state: PrefillResult, offers: Offers, consumer: Consumer | None, digests: bool = False
) -> dict:
    """Offer the KV and have it fetched, and return the figures; collective.

    The consumer's figures, and the bytes, are on the leader only.
    """
    hosts = state.kv.hosts
    hosts.barrier()
    began = hosts.clock()
    ticket = state.offer(offers)
    offered = hosts.clock()
    figures = {}
    if hosts.is_leader:
        figures = consumer.fetch(ticket, digests)
        figures["num_bytes"] = ticket.num_bytes
    ended = hosts.clock()
    hosts.barrier()
    figures["offer_ms"] = 1e3 * (offered - began)
    figures["total_ms"] = 1e3 * (ended - began)
    return figures


def measure(hosts: HostGroup, name: str, options: argparse.Namespace) -> list[dict]:
    """Return the rounds on the leader; collective."""
    num_layers, num_kv_heads = SHAPES[name]
    state = made_up_prefill(hosts, num_layers, num_kv_heads, options.tokens)
    with (
        Offers(hosts) as offers,
        closing(Consumer()) if hosts.is_leader else nullcontext() as consumer,
    ):
        # Compare what is fetched once, which also warms up. Only the leader has the whole cache.
        whole = state.to_dynamic_cache()
        figures = transfer(state, offers, consumer, digests=True)
        if hosts.is_leader:
            sent = digest_of((layer.keys[0], layer.values[0]) for layer in whole.layers)
            if figures["digest"] != sent:
                raise ValueError("what came is not what was sent")
        del whole
        # Measure.
        return [transfer(state, offers, consumer) for _ in range(options.rounds)]


def records(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield the medians of each model's KV, on the leader; collective."""
    for name in options.shapes:
        rounds = measure(hosts, name, options)
        if not hosts.is_leader:
            continue
        samples = {}
        medians = {}
        for time_name in ("offer_ms", "first_layer_ms", "fetch_ms", "total_ms"):
            times = [figures[time_name] for figures in rounds]
            samples[time_name] = times
            medians[time_name] = statistics.median(times)
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
