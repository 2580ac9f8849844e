"""Count what one layer's attention does beside attention itself, on every host: calls of torch, and bytes.

    python benchmarks/layer_traffic.py
    python benchmarks/layer_traffic.py --method zigzag_ring --hosts 4 --dtype bfloat16

A call's bytes are those of its operands and results; views and allocations count for nothing. The hosts are
simulated and compute in turn on this CPU, so that the seconds are of one thread and include counting.
"""

import argparse
import time
from collections import Counter

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apbv import HostGroup, PrefillConfig
from apbv.prefilling.methods import METHODS

from support.arguments import DTYPES
from support.records import table
from support.simulated import simulate

QUERY, HEADS, KV_HEADS, HEAD_DIM = 40, 8, 2, 64
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh")


class Traffic(TorchDispatchMode):
    """Counts the calls of this thread and their bytes, by name."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name not in _FREE and not is_view:
            # What is written in place is an operand, too: it counts once.
            tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
            self.calls[name] += 1
            self.bytes[name] += sum(x.nbytes for x in tensors.values())
        return result


def count(hosts: HostGroup, options: argparse.Namespace) -> dict:
    """Run one layer's attention on this host, on random states."""
    config, kind = PrefillConfig(method=options.method), METHODS[options.method]
    layout = kind.plan(hosts.size, options.tokens, 0, options.tokens - QUERY, config)
    method = kind(layout, hosts, config)
    rows = sum(map(len, layout.local_spans(hosts.rank)))
    generator, dtype = torch.Generator().manual_seed(hosts.rank), getattr(torch, options.dtype)
    q, k, v = (
        torch.randn(1, rows, heads, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    traffic, start = Traffic(), time.thread_time()
    with torch.no_grad(), traffic:
        out = method(q, k, v, HEAD_DIM**-0.5, 0).transpose(1, 2).contiguous()
    seconds = time.thread_time() - start
    attention = sum(calls for name, calls in traffic.calls.items() if "attention" in name)
    others = {name: size for name, size in traffic.bytes.items() if "attention" not in name}
    return {
        "host": hosts.rank,
        "attention_calls": attention,
        "other_calls": traffic.calls.total() - attention,
        "other_bytes": sum(others.values()),
        "output_bytes": out.nbytes,
        "largest": sorted(others, key=others.get, reverse=True)[:3],
        "seconds": seconds,
    }


COLUMNS = {
    "host": "{host}",
    "attention calls": "{attention_calls}",
    "other calls": "{other_calls}",
    "MiB moved": lambda row: f"{row['other_bytes'] / 2**20:.0f}",
    "of the output": lambda row: f"{row['other_bytes'] / row['output_bytes']:.1f} ×",
    "most by": lambda row: ", ".join(row["largest"]),
    "s": "{seconds:.2f}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="apbv")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict]:
    options = parse_arguments(arguments)
    rows = simulate(options.hosts, count, options)
    print(table(rows, COLUMNS))
    return rows


if __name__ == "__main__":
    main()
