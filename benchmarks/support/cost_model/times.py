"""This module predicts the time of one prefill from its cost and the rates of a machine."""

from collections import Counter
from dataclasses import dataclass

from apbv.layout import ContextLayout

from .costs import ATTENTION, PARTS, HostCost, flop_ratio, work_ratio


@dataclass(frozen=True)
class Machine:
    """The rates of a host and of its links.

    Attributes:
        matmul_flops: FLOPs per second of everything but attention.
        attention_flops: FLOPs per second of the decoder's attention.
        memory_bytes: bytes per second.
        link_bytes, link_latency: bytes received per second; seconds per exchange.
        group_size: hosts with equal h // group_size form a group (a node); None for one group. Data from another
            group comes over a link of ``group_link_bytes`` and ``group_link_latency`` that each host has.
    """

    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    link_bytes: float
    link_latency: float = 0.0
    group_size: int | None = None
    group_link_bytes: float | None = None
    group_link_latency: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of one prefill.

    Attributes:
        parts: computing, by part, of every host.
        links: receiving, by kind, of every host.
        slowest: the host that computes longest.
        compute_seconds: the time of its parts one after another.
        communication_seconds: the time of the host that receives longest.
        floor_seconds: the time with perfect overlap: the vision tower, the exchanges before and after the decoder,
            and in the decoder whatever takes longer, computing or receiving.
        total_seconds: the time of the slowest host without any overlap.
    """

    parts: tuple[dict[str, float], ...]
    links: tuple[dict[str, float], ...]
    slowest: int
    compute_seconds: float
    communication_seconds: float
    floor_seconds: float
    total_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """Return the communication that remains visible with perfect overlap."""
        return self.floor_seconds - self.compute_seconds


def predict(host_costs: list[HostCost], machine: Machine) -> Prediction:
    """Predict times; a part takes as long as its arithmetic or its memory traffic, whichever is longer."""
    parts = tuple({part: max(_part_seconds(host, part, machine)) for part in PARTS} for host in host_costs)
    links = tuple(_link_seconds(host_costs, host, machine) for host in range(len(host_costs)))
    floors = []
    for part, link in zip(parts, links, strict=True):
        around = part["vision"] + link["embeddings"] + link["logits"]
        inside = sum(link.values()) - link["embeddings"] - link["logits"]
        floors.append(around + max(sum(part.values()) - part["vision"], inside))
    computing, receiving = ([sum(host.values()) for host in hosts] for hosts in (parts, links))
    return Prediction(
        parts=parts,
        links=links,
        slowest=computing.index(max(computing)),
        compute_seconds=max(computing),
        communication_seconds=max(receiving),
        floor_seconds=max(floors),
        total_seconds=max(map(sum, zip(computing, receiving, strict=True))),
    )


def _part_seconds(host_cost: HostCost, part: str, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a part's arithmetic and of its memory traffic."""
    rate = machine.attention_flops if part in ATTENTION else machine.matmul_flops
    return host_cost.flops[part] / rate, host_cost.memory[part] / machine.memory_bytes


def _link_seconds(host_costs: list[HostCost], host: int, machine: Machine) -> dict[str, float]:
    others, size = max(1, len(host_costs) - 1), machine.group_size or len(host_costs)
    outside = sum(other // size != host // size for other in range(len(host_costs)))
    # A link between groups without a rate of its own is like any other.
    far_bytes = machine.group_link_bytes or machine.link_bytes
    seconds = {}
    for kind, count in host_costs[host].received.items():
        # A ring receives everything from the host before; other exchanges receive about as much from every host.
        share = outside / others if kind != "ring" else float(outside > 0 and host % size == 0)
        latency = max(machine.link_latency, machine.group_link_latency) if share else machine.link_latency
        transfer = count * ((1 - share) / machine.link_bytes + share / far_bytes)
        seconds[kind] = transfer + host_costs[host].exchanges[kind] * latency
    return seconds


def explain(
    method: str, layout: ContextLayout, machine: Machine, costs: list[HostCost], full: list[HostCost]
) -> str:
    """Format where the slowest host of a prefill must spend its time.

    Args:
        layout: of the first of its layers.
        costs: what it costs every host.
        full: what full attention on one host costs.
    """
    times, full_times = predict(costs, machine), predict(full, machine)
    mine, bounds = costs[times.slowest], Counter(links=times.exposed_seconds)
    table = []
    for part, seconds in times.parts[times.slowest].items():
        arithmetic, memory = _part_seconds(mine, part, machine)
        bound = "memory" if memory > arithmetic else "attention" if part in ATTENTION else "matrix products"
        bounds[bound] += seconds
        share, tflops = seconds / times.compute_seconds, mine.flops[part] / 1e12
        if seconds:
            table.append(f"  {part:<17}{tflops:>12.4f}{seconds * 1e3:>12.2f}{share:>8.1%}  {bound}")
    received = ", ".join(f"{kind} {count / 1e6:.2f} MB" for kind, count in mine.received.items() if count)
    lines = [
        f"{method}, {layout.num_hosts} hosts, {layout.num_tokens} tokens: anchor {layout.anchor_len}, "
        f"{len(layout.blocks)} blocks, passing {layout.passing_len}, query {len(layout.query)}",
        f"  {f'on host {times.slowest}':<17}{'TFLOP':>12}{'ms':>12}{'share':>8}  bound by",
        *table,
        f"FLOPs of full over this: busiest host {flop_ratio(full, costs):.2f}, "
        f"all hosts together {work_ratio(full, costs):.2f}",
        f"time: {_ms(times.floor_seconds)} with perfect overlap, {_ms(times.total_seconds)} without; "
        f"full on one host {_ms(full_times.total_seconds)}",
        f"KV: {', '.join(f'{host.kv_bytes / 1e6:.1f}' for host in costs)} MB per host, beside "
        f"{mine.weight_bytes / 1e6:.1f} MB of weights",
        f"received: {received or 'nothing'}; at most {_ms(times.communication_seconds)}, of which "
        f"{_ms(times.exposed_seconds)} cannot be hidden",
        f"bound by {max(bounds, key=bounds.get)}",
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
