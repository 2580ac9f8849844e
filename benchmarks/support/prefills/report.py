"""Turns measured prefills into records, a table and a plot."""

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from apbv.stats import device_name

from ..plots import import_pyplot, legend_beside, mark_values, save
from ..records import made_by
from ..summaries import percentiles
from .bench import Bench, Measured
from .presets import SWITCHES
from support.simulated import Network
from support.tables import markdown_table


def records(bench: Bench, measured: list[Measured]) -> Iterator[dict]:
    """Yield one JSON-ready record per case of a workload; speed-ups are ratios within the same run."""
    options = bench.options
    median = {id(entry): statistics.median(entry.ttft_ms) for entry in measured}

    def speedup(entry: Measured, baseline: str) -> float | None:
        """Compute the speed-up of the median time over a baseline on as many hosts, or on one."""
        for other in measured:
            same_hosts = other.case.hosts in (entry.case.hosts, 1) and other.case.network in (
                entry.case.network,
                None,
            )
            if other.case.config.method == baseline and same_hosts:
                return median[id(other)] / median[id(entry)]
        return None

    for entry in measured:
        case, run = entry.case, entry.run
        simulated = bench.simulated and case.hosts > 1
        stages = {
            name: statistics.median(sample["stages_ms"][name] for sample in entry.samples)
            for name in run["stages_ms"]
        }
        ttft = percentiles(entry.ttft_ms)
        yield {
            "benchmark": "throughput",
            "preset": options.preset,
            "label": case.label,
            "method": run["method"],
            "hosts": case.hosts,
            "simulated": simulated,
            "network": network_fields(case.network) if simulated else None,
            "threads_per_host": bench.threads * (bench.hosts.size if case.hosts == 1 else 1),
            "model": options.model,
            "dtype": str(bench.model.dtype).removeprefix("torch."),
            "device": device_name(bench.hosts.device),
            "frames": entry.workload.frames,
            "height": entry.workload.height,
            "width": entry.workload.width,
            "num_input_tokens": run["num_input_tokens"],
            "num_video_tokens": run["num_video_tokens"],
            "anchor_len": run["anchor_len"],
            "passing_len": run["passing_len"],
            "importance": case.config.importance,
            **{switch: getattr(case.config, switch) for switch in SWITCHES.values()},
            "ttft_ms": ttft,
            "request_throughput": 1e3 / ttft["p50"],
            "stages_ms": stages,
            "comm_bytes": run["comm_bytes"],
            # Simulated hosts share one process's memory, which does not tell what each of them would need.
            "peak_memory_bytes": None if simulated else run["peak_memory_bytes"],
            "speedup_vs_full": speedup(entry, "full"),
            "speedup_vs_zigzag_ring": speedup(entry, "zigzag_ring"),
            "samples": {"ttft_ms": entry.ttft_ms},
            "warmup": options.warmup,
            "seed": options.seed,
            **made_by("throughput.py"),
        }


def network_fields(network: Network) -> dict:
    """Return a network's fields for JSON, where an infinite bandwidth is null."""
    fields = asdict(network)
    for name in ("link", "between_groups"):
        if fields[name]["bandwidth"] == float("inf"):
            fields[name]["bandwidth"] = None
    return fields


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table."""
    header = ["tokens", "hosts", "method", "l_a", "l_p", "TTFT p50 ms", "p99 ms", "req/s", "vs full", "vs ring"]
    header += ["encode ms", "prefill ms", "MiB received"]
    lines = []
    for row in rows:
        ratios = [row["speedup_vs_full"], row["speedup_vs_zigzag_ring"]]
        cells = [row["num_input_tokens"], f"{row['hosts']}{' (simulated)' if row['simulated'] else ''}"]
        cells += [row["label"], row["anchor_len"], row["passing_len"]]
        cells += [f"{row['ttft_ms'][name]:.1f}" for name in ("p50", "p99")]
        cells += [f"{row['request_throughput']:.3f}", *("–" if r is None else f"{r:.2f}" for r in ratios)]
        cells += [f"{row['stages_ms'][name]:.1f}" for name in ("encode", "prefill")]
        cells.append(f"{sum(row['comm_bytes']) / 2**20:.1f}")
        lines.append(cells)
    return markdown_table(header, lines)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the speed-up over full attention, or requests per second where it did not run, over what varies."""
    varying = [name for name in ("num_input_tokens", "hosts", "passing_len", "anchor_len")]
    x = next((name for name in varying if len({row[name] for row in rows if row["hosts"] > 1}) > 1), varying[0])
    y = "speedup_vs_full" if all(row["speedup_vs_full"] for row in rows) else "request_throughput"
    figure, axes = import_pyplot().subplots(figsize=(7, 4.5))
    lines: dict[tuple[str, int | None], list[dict]] = {}
    several = len({row["hosts"] for row in rows if row["hosts"] > 1}) > 1
    for row in rows:
        hosts = row["hosts"] if several and x != "hosts" else None
        lines.setdefault((row["label"], hosts), []).append(row)
    # Every label has its colour, and every number of hosts its line style.
    labels = list(dict.fromkeys(label for label, _ in lines))
    numbers = sorted({hosts for _, hosts in lines if hosts is not None}, reverse=True)
    for (label, hosts), points in lines.items():
        points = sorted(points, key=lambda row: row[x])
        axes.plot(
            [row[x] for row in points],
            [row[y] for row in points],
            ("-", "--", "-.", ":")[numbers.index(hosts) % 4 if hosts else 0],
            color=f"C{labels.index(label)}",
            marker="o",
            label=f"{label}, {hosts} host{'s' if hosts > 1 else ''}" if hosts else label,
        )
    mark_values(axes.xaxis, (row[x] for row in rows))
    axes.set_xlabel(x.removeprefix("num_").replace("_", " "))
    axes.set_ylabel("speed-up over full attention" if y.startswith("speedup") else "requests per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    simulated = " (simulated hosts)" if any(row["simulated"] for row in rows) else ""
    axes.set_title(f"{rows[0]['model']}, {rows[0]['device']}{simulated}")
    save(figure, path)
