"""Turns the answers of a speculative-decoding benchmark into records, tables and a plot."""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from apbv import Engine, GenerateResult, SpeculativeConfig

from ..plots import import_pyplot, legend_above, save
from ..records import made_by
from ..tables import markdown_table
from . import theory


@dataclass
class Way:
    """One way to decode, and its answers.

    Attributes:
        label: its name in tables.
        config: its speculation; None for autoregressive decoding.
        engine: None on a host that takes no part.
        answers: by task.
    """

    label: str
    config: SpeculativeConfig | None
    engine: Engine | None
    answers: dict[str, list[GenerateResult]] = field(default_factory=dict)


@dataclass
class Runs:
    """The answers of one way to the questions of one task."""

    way: Way
    task: str

    @property
    def answers(self) -> list[GenerateResult]:
        """Return the answers."""
        return self.way.answers[self.task]

    @property
    def stats(self) -> list[dict]:
        """Return the figures of the answers."""
        return [answer.stats for answer in self.answers]

    def total(self, name: str) -> float | None:
        """Sum a figure of the speculation over all runs; None if a run lacks it."""
        values = [stats["speculation"][name] for stats in self.stats]
        return None if None in values else sum(values)

    def milliseconds(self, name: str) -> float:
        """Sum the milliseconds of a stage, or of the whole request (``total``), over all runs."""
        return sum(s["total_ms"] if name == "total" else s["stages_ms"][name] for s in self.stats)


def records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """Yield one JSON-ready record per task and way; speed-ups are ratios of sums over the same questions."""
    for task in ways[0].answers:
        alone = Runs(ways[0], task)
        new_tokens = sum(len(stats["token_ids"]) for stats in alone.stats)
        forwards = new_tokens - len(alone.stats)  # the first token of every answer comes out of the prefill
        target_ms = alone.milliseconds("decode") / max(1, forwards)
        for way in ways:
            runs = Runs(way, task)
            first = runs.stats[0]
            identical = all(a["token_ids"] == b["token_ids"] for a, b in zip(runs.stats, alone.stats, strict=True))
            decode, total = (alone.milliseconds(name) / runs.milliseconds(name) for name in ("decode", "total"))
            yield {
                "benchmark": "speculative",
                "preset": options.preset,
                "label": way.label,
                "task": task,
                "model": options.model,
                "scale": options.scale,
                "hosts": first["hosts"],
                "kv": options.kv,
                "method": first["method"],
                "num_input_tokens": statistics.mean(stats["num_input_tokens"] for stats in runs.stats),
                "answers": len(runs.stats),
                "new_tokens": new_tokens,
                "identical": identical,
                "decode_ms": [stats["stages_ms"]["decode"] for stats in runs.stats],
                "draft_prefill_ms": [stats["stages_ms"]["draft"] for stats in runs.stats],
                "total_ms": [stats["total_ms"] for stats in runs.stats],
                "breakdown_ms": breakdown(runs),
                "target_ms_per_token": target_ms,
                "decode_speedup": decode if identical else None,
                "end_to_end_speedup": total if identical else None,
                "speculation": None if way.config is None else speculation(runs, target_ms, forwards),
                "device": first["device"],
                "dtype": first["dtype"],
                **made_by("speculative.py"),
            }


def breakdown(runs: Runs) -> dict[str, float | None]:
    """Compute HIPPO's Table 2: an answer's mean milliseconds by operation; a draft host's overlap the target's."""
    timelines = [answer.timeline for answer in runs.answers]
    config = runs.way.config
    drafting = "draft host" if config is not None and config.draft_host else "host 0"

    def mean(host: str, track: str, *names: str) -> float | None:
        if (config is None and names[0] in ("draft", "prune")) or not all(host in line for line in timelines):
            return None
        spans = [span for line in timelines for span in line[host] if span.track == track and span.name in names]
        return 1e3 * sum(span.seconds for span in spans) / len(timelines)

    return {
        "target prefill": mean("host 0", "stages", "encode", "exchange", "prefill", "handoff"),
        "target decoding": mean("host 0", "stages", "decode"),
        "draft prefill": mean(drafting, "stages", "draft"),
        "draft decoding": mean(drafting, "decoding", "draft"),
        "pruning": mean(drafting, "decoding", "prune"),
    }


def speculation(runs: Runs, target_ms: float, num_tokens: int) -> dict:
    """Return what was drafted and accepted, the costs on both sides, and the speed-ups that theory predicts."""
    drafted, accepted, rounds = (runs.total(name) for name in ("num_drafted", "num_accepted", "rounds"))
    config = runs.way.config
    # A draft host writes more tokens than are ever verified.
    written = runs.total("num_written") if config.draft_host else drafted
    seconds = runs.total("draft_seconds")
    draft_ms = 1e3 * seconds / max(1, written) if seconds is not None else None
    tau, c = accepted / max(1, drafted), target_ms / draft_ms if draft_ms else None
    # Theorem 6 takes the chance that one more token is accepted, Theorems 4 and 5 the share of accepted tokens.
    chance = accepted / max(1, accepted + runs.total("num_rejections"))
    gamma = drafted / max(1, rounds)  # a lookup may find fewer tokens than requested
    idle = {f"{side}_idle_ms": runs.total(f"{side}_idle_seconds") for side in ("target", "draft")}
    in_a_row = accepted / (runs.total("num_rejections") + len(runs.stats))
    per_forward = num_tokens / max(1, runs.total("num_target_forwards"))
    return {
        "config": asdict(config),
        "acceptance_rate": tau,
        "tokens_per_target_forward": per_forward,
        "mean_accepted_tokens": in_a_row if config.draft_host else per_forward,
        "accepted_in_a_row": in_a_row,
        "draft_ms_per_token": draft_ms,
        "verify_ms_per_round": 1e3 * runs.total("verify_seconds") / max(1, rounds),
        **{name: None if value is None else 1e3 * value for name, value in idle.items()},
        "kept_near_border": kept_near_border(runs.answers),
        "cost_ratio": c,
        "predicted_decode_speedup": theory.serial(gamma, c, tau) if c else None,
        "predicted_by_block_efficiency": theory.by_block_efficiency(per_forward, gamma, c) if c else None,
        "predicted_parallel_speedup": theory.parallel(gamma, c, tau) if c else None,
        "predicted_parallel_speedup_with_rollback": theory.parallel_with_rollback(gamma, c, chance) if c else None,
    }


def kept_near_border(answers: list[GenerateResult]) -> float | None:
    """Compute how much denser kept tokens lie at the frames' borders than overall; 1 means equally dense."""
    masks = [answer.kept for answer in answers]
    if any(mask is None or min(mask.shape[1:]) < 3 for mask in masks):
        return None
    kept, size = sum(mask.sum().item() for mask in masks), sum(mask.numel() for mask in masks)
    inside = [mask[:, 1:-1, 1:-1] for mask in masks]
    at_border = kept - sum(mask.sum().item() for mask in inside)
    return at_border / (size - sum(mask.numel() for mask in inside)) / (kept / size)


def table(rows: list[dict]) -> str:
    """Format records as a Markdown table."""
    header = ["task", "way", "accepted", "MAT", "tokens / target pass", "T_p / T_q", "T_q ms", "draft prefill ms"]
    header += ["decode ms", "decode speed-up", "by theory", "end to end"]
    return markdown_table(header, [_cells(row) for row in rows])


def _cells(row: dict) -> list[str]:
    figures = row["speculation"]
    prefill = row["breakdown_ms"]["draft prefill"]
    times = ["–" if prefill is None else f"{prefill:.1f}", f"{statistics.mean(row['decode_ms']):.1f}"]
    shares, predicted = ["–", "–", "1.00", "–", "–"], None
    if figures:
        names = ["acceptance_rate", "mean_accepted_tokens", "tokens_per_target_forward"]
        names += ["cost_ratio", "draft_ms_per_token"]
        shares = ["–" if figures[name] is None else f"{figures[name]:.2f}" for name in names]
        predicted = figures[predictor(figures)]
    speeds = [row["decode_speedup"], predicted, row["end_to_end_speedup"]]
    return [row["task"], row["label"], *shares, *times, *("–" if s is None else f"{s:.2f} ×" for s in speeds)]


def predictor(figures: dict) -> str:
    """Return the name of the prediction for a way: by ParallelVLM's Theorem 4 in turn, by 6 with a draft host."""
    beside = figures["config"]["draft_host"]
    return "predicted_parallel_speedup_with_rollback" if beside else "predicted_decode_speedup"


def breakdown_table(rows: list[dict]) -> str:
    """Format the milliseconds of an answer on both sides as a Markdown table."""
    lines = []
    for operation in rows[0]["breakdown_ms"]:
        taken = [row["breakdown_ms"][operation] for row in rows]
        lines.append([operation, *("–" if ms is None else f"{ms:.1f}" for ms in taken)])
    return markdown_table(["ms", *(f"{row['label']} ({row['task']})" for row in rows)], lines)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the measured decode speed-up of every way beside the one that theory predicts."""
    shown = [row for row in rows if row["speculation"] and row["decode_speedup"]]
    figure, axes = import_pyplot().subplots(figsize=(8, 1.5 + 0.3 * len(shown)))
    places = range(len(shown))
    axes.barh(places, [row["decode_speedup"] for row in shown], height=0.6, label="measured")
    predicted = [row["speculation"][predictor(row["speculation"])] for row in shown]
    theorems = "ParallelVLM's Theorems 4 and 6"
    axes.plot([p or float("nan") for p in predicted], places, "k|", markersize=14, label=theorems)
    axes.set_yticks(places, [f"{row['task']}: {row['label']}" for row in shown])
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("decode speed-up over autoregressive")
    legend_above(axes)
    save(figure, path)
