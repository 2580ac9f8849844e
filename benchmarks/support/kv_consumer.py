"""Fetches KV as somebody else's engine would, in a process of its own: one ticket a line.

The process is this file, run as a script.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from apbv.kv.remote import RemoteKV
from apbv.kv.ticket import Ticket

WAIT = 600.0  # seconds, for the process to end


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
        The milliseconds until the first layer and until all layers had arrived, and a digest if requested.
    """
    shape = ticket.num_layers, 2, ticket.num_kv_heads, ticket.num_tokens, ticket.head_dim
    if shape not in cache:
        cache[shape] = torch.zeros(shape, dtype=ticket.torch_dtype)
    kept, began, first = cache[shape], time.perf_counter(), None
    with RemoteKV(ticket) as kv:
        for own, layer in zip(kept, kv.layers(range(ticket.num_tokens)), strict=True):
            first = first or time.perf_counter()
            for states, received in zip(own, layer, strict=True):
                states.copy_(received)
        kv.confirm()
    times = {"first_layer_ms": 1e3 * (first - began), "fetch_ms": 1e3 * (time.perf_counter() - began)}
    return {**times, "digest": digest_of(kept) if digests else None}


class Consumer:
    """Fetches KV in a process of its own, on the leader's machine."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def main() -> None:
    cache: dict = {}
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(consume(Ticket.from_params(order["params"]), cache, order["digests"])), flush=True)


if __name__ == "__main__":
    main()
