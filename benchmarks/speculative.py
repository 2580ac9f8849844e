"""Speculative against autoregressive decoding: the same answers, side by side in one run.

    python benchmarks/speculative.py --scale 6
    python benchmarks/speculative.py --strategies specvlm --keep attention hippo random --keep-ratio 0.1 0.3 1.0
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --strategies vanilla --draft-host
    torchrun --nproc-per-node 2 benchmarks/speculative.py --num-draft-tokens 1 3 5 9 --kv sharded
    python benchmarks/speculative.py --model PATH --draft-model PATH --video clip.mp4 --question "…"

With the demo model clips of its test split are described shot by shot; --scale repeats the target's layers without
changing what it says (apbv.demo.scale), so that target and draft differ in cost as real pairs do. All ways take
every clip in turn. Answers are greedy, and each is compared with the autoregressive one, which uses the same
attention: a way whose answer differs anywhere is reported without a speed. With --draft-host the last host drafts
beside the others in some ways, and has no part in the rest.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.allocator import keep_freed_memory
from apbv.config import KEEP_POLICIES, KV_PLACEMENTS
from apbv.demo import clips
from apbv.demo.evaluate import Exam, clips_folder
from apbv.demo.scale import scale_model
from apbv.hosts import run_on_hosts
from apbv.speculate import STRATEGIES, theory
from apbv.stats import append_json_lines, markdown_table, provenance
from apbv.video import probe

BASELINE = "autoregressive"


@dataclass
class Way:
    """One way to decode, and what its runs took; without an engine on a host that has no part in it."""

    label: str
    config: SpeculativeConfig | None
    engine: Engine | None
    stats: list[dict] = field(default_factory=list)

    def total(self, name: str) -> float:
        """A figure of the speculation, summed over all runs."""
        return sum(stats["speculation"][name] for stats in self.stats)

    def milliseconds(self, name: str) -> float:
        """Of a stage, or of the whole request (``total``), summed over all runs."""
        return sum(s["total_ms"] if name == "total" else s["stages_ms"][name] for s in self.stats)


def configurations(options: argparse.Namespace) -> Iterator[tuple[str, SpeculativeConfig]]:
    """What was asked for, without what would be the same twice."""
    for strategy in options.strategies:
        keeps = options.keep if strategy == "specvlm" else [None]
        for keep in keeps:
            prunes = strategy in ("std", "streaming") or keep not in (None, "full")
            for ratio in options.keep_ratio if prunes else [None]:
                for gamma in options.num_draft_tokens:
                    chosen = {"keep": keep, "keep_ratio": ratio}
                    chosen = {name: value for name, value in chosen.items() if value is not None}
                    parts = [strategy, *(str(value) for value in chosen.values()), f"γ = {gamma}"]
                    yield ", ".join(parts), SpeculativeConfig(strategy=strategy, num_draft_tokens=gamma, **chosen)


def build_ways(options: argparse.Namespace, hosts: HostGroup) -> list[Way]:
    """The ways, on one target and one draft."""
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    wanted = list(configurations(options))
    needs_draft = options.draft_host or any(STRATEGIES[config.strategy].needs_draft_model for _, config in wanted)
    last = hosts.size - 1
    targets = hosts.subgroup(range(last)) if options.draft_host else hosts
    model = draft = None
    if targets is not None:
        loaded = Engine.from_pretrained(options.model, hosts=targets, dtype=options.dtype)
        model = scale_model(loaded.model, options.scale) if options.scale > 1 else loaded.model
    with hosts.local_stage("loading the draft"):
        if needs_draft:
            if options.draft_model is None and options.model != "demo":
                raise ValueError("these strategies need a --draft-model")
            path = options.draft_model or demo.draft_path()
            drafting = Engine.from_pretrained(path, hosts=HostGroup.single(hosts.device), dtype=options.dtype)
            draft = drafting.model
        processor = (drafting if targets is None else loaded).processor

    def engine(group: HostGroup | None, config: SpeculativeConfig | None) -> Engine | None:
        if group is None:
            return None
        beside = config is not None and config.draft_host
        return Engine(
            model,
            processor,
            group,
            prefill,
            options.model,
            config,
            draft if not beside or hosts.rank == last else None,
        )

    ways = [Way(BASELINE, None, engine(targets, None))]
    ways += [Way(label, config, engine(targets, config)) for label, config in wanted]
    if options.draft_host:
        for label, config in wanted:
            if STRATEGIES[config.strategy].needs_draft_model:
                beside = replace(config, draft_host=True)
                ways.append(Way(f"{label}, draft host", beside, engine(hosts, beside)))
    return ways


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[tuple[Path, str, int]]:
    """(file, question, frames)"""
    if options.video is not None:
        yield options.video, options.question, options.frames or 64
        return
    exam = Exam(options.grid, options.shots, options.clips, ("describe",))
    folder = clips_folder(options.folder)
    for seed in range(options.clips):
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0:
                exam.file(seed, folder)
        file = exam.file(seed, folder)
        yield file, options.question or clips.DESCRIBE_QUESTION, options.frames or probe(file).num_frames


def measure(options: argparse.Namespace, hosts: HostGroup) -> list[Way]:
    """All ways on every question, in turn; the first question once more before, to warm up."""
    ways = build_ways(options, hosts)
    asked = list(questions(options, hosts))
    rounds = [(asked[0], False), *((question, True) for _ in range(options.rounds) for question in asked)]
    with tqdm(total=len(rounds) * len(ways), unit="answer", disable=None if hosts.rank == 0 else True) as bar:
        for (file, question, frames), counts in rounds:
            for way in ways:
                bar.set_postfix_str(way.label, refresh=True)
                hosts.barrier()
                if way.engine is not None:
                    answer = way.engine.generate(
                        question, video=file, num_frames=frames, max_new_tokens=options.max_new_tokens
                    )
                    if counts:
                        way.stats.append(answer.stats)
                bar.update()
    return ways


def records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """One JSON-ready record per way; speed-ups are ratios of sums over the same questions of the same run."""
    alone = ways[0]
    new_tokens = sum(len(stats["token_ids"]) for stats in alone.stats)
    forwards = new_tokens - len(alone.stats)  # the first token of every answer comes out of the prefill
    target_ms = alone.milliseconds("decode") / max(1, forwards)
    for way in ways:
        first = way.stats[0]
        identical = all(a["token_ids"] == b["token_ids"] for a, b in zip(way.stats, alone.stats, strict=True))
        record = {
            "benchmark": "speculative",
            "label": way.label,
            "model": options.model,
            "scale": options.scale,
            "hosts": first["hosts"],
            "kv": options.kv,
            "method": first["method"],
            "num_input_tokens": statistics.mean(stats["num_input_tokens"] for stats in way.stats),
            "answers": len(way.stats),
            "new_tokens": new_tokens,
            "identical": identical,
            "decode_ms": [stats["stages_ms"]["decode"] for stats in way.stats],
            "draft_prefill_ms": [stats["stages_ms"]["draft"] for stats in way.stats],
            "total_ms": [stats["total_ms"] for stats in way.stats],
            "target_ms_per_token": target_ms,
            "decode_speedup": alone.milliseconds("decode") / way.milliseconds("decode") if identical else None,
            "end_to_end_speedup": alone.milliseconds("total") / way.milliseconds("total") if identical else None,
            "speculation": None if way.config is None else speculation(way, target_ms, forwards),
            "device": first["device"],
            "dtype": first["dtype"],
            "command": " ".join(["benchmarks/speculative.py", *sys.argv[1:]]),
            **provenance(),
        }
        yield record


def speculation(way: Way, target_ms: float, num_tokens: int) -> dict:
    """What was drafted and accepted, the costs on both sides, and what the theory makes of these."""
    drafted, accepted, rounds = (way.total(name) for name in ("num_drafted", "num_accepted", "rounds"))
    beside = way.config.draft_host
    # What a draft host takes is not seen from here; what is, is how long the target waited for it.
    draft_ms = None if beside else 1e3 * way.total("draft_seconds") / max(1, drafted)
    verify_ms = 1e3 * way.total("verify_seconds") / max(1, rounds)
    tau, c = accepted / max(1, drafted), target_ms / draft_ms if draft_ms else None
    gamma = drafted / max(1, rounds)  # a lookup may find less than was asked for
    return {
        **asdict(way.config),
        "num_tree_nodes": way.stats[0]["speculation"]["num_tree_nodes"],
        "acceptance_rate": tau,
        "tokens_per_target_forward": num_tokens / max(1, way.total("num_target_forwards")),
        "draft_ms_per_token": draft_ms,
        "target_waited_ms": 1e3 * way.total("draft_seconds") if beside else None,
        "verify_ms_per_round": verify_ms,
        "cost_ratio": c,
        "predicted_decode_speedup": theory.serial(gamma, c, tau) if c else None,
        "predicted_parallel_speedup": theory.parallel(gamma, c, tau) if c else None,
        "predicted_parallel_speedup_with_rollback": theory.parallel_with_rollback(gamma, c, tau) if c else None,
    }


def table(rows: list[dict]) -> str:
    """The figures for people, as Markdown."""
    header = ["way", "accepted", "tokens / target pass", "T_p / T_q", "draft prefill ms", "decode ms"]
    header += ["decode speed-up", "by Theorem 4", "end to end"]
    lines = []
    for row in rows:
        figures = row["speculation"]
        times = [f"{statistics.mean(row[name]):.1f}" for name in ("draft_prefill_ms", "decode_ms")]
        speeds = [
            row["decode_speedup"],
            figures and figures["predicted_decode_speedup"],
            row["end_to_end_speedup"],
        ]
        shares = ["–", "1.00", "–"]
        if figures:
            ratio = figures["cost_ratio"]
            shares = [f"{figures['acceptance_rate']:.2f}", f"{figures['tokens_per_target_forward']:.2f}"]
            shares.append("–" if ratio is None else f"{ratio:.1f}")
        speeds = ["–" if speed is None else f"{speed:.2f} ×" for speed in speeds]
        lines.append([row["label"], *shares, *times, *speeds])
    return markdown_table(header, lines)


def plot(rows: list[dict], path: Path) -> None:
    """Measured decode speed-up of every way, beside what the theory makes of its costs and acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["speculation"] and row["decode_speedup"]]
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.3 * len(shown)))
    places = range(len(shown))
    axes.barh(places, [row["decode_speedup"] for row in shown], height=0.6, label="measured")
    predicted = [row["speculation"]["predicted_decode_speedup"] for row in shown]
    axes.plot([p or float("nan") for p in predicted], places, "k|", markersize=14, label="ParallelVLM's Theorem 4")
    axes.set_yticks(places, [row["label"] for row in shown])
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("decode speed-up over autoregressive")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--draft-model", help="likewise (demo: the packaged one)")
    parser.add_argument(
        "--scale", type=int, default=1, help="repeat the target's layers so many times (Qwen2.5-VL)"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", default="apbv", help="how prompts are prefilled")
    parser.add_argument("--kv", choices=KV_PLACEMENTS, default="gathered")
    parser.add_argument("--strategies", nargs="+", choices=sorted(STRATEGIES), help="default: all that fit --kv")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[5])
    parser.add_argument(
        "--draft-host", action="store_true", help="and once more with the last host drafting beside"
    )
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=["attention"])
    parser.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1])
    parser.add_argument("--video", type=Path, help="instead of the demo's clips")
    parser.add_argument("--question", help="instead of a description shot by shot")
    parser.add_argument("--frames", type=int, help="sampled from a clip (default: all of the demo's, else 64)")
    parser.add_argument("--shots", type=int, default=32, help="length of the demo's clips")
    parser.add_argument("--grid", type=int, choices=clips.GRIDS, default=2, help="tokens per side of their frames")
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the clips' files are kept (default: temporary)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")
    options = parser.parse_args(arguments)
    if min(options.clips, options.rounds, options.scale) < 1:
        parser.error("--clips, --rounds and --scale must be at least 1")
    if options.video is not None and options.question is None:
        parser.error("--video needs a --question")
    if options.draft_host and int(os.environ.get("WORLD_SIZE", 1)) < 2:
        parser.error("--draft-host needs torchrun and 2 processes at least")
    if options.strategies is None:
        fits = options.kv == "gathered"
        options.strategies = [name for name, way in STRATEGIES.items() if fits or not way.needs_gathered_kv]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_on_hosts(lambda hosts: run(options, hosts))


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Measure, and print or write what came of it."""
    if hosts.device.type == "cpu":
        keep_freed_memory()
    ways = measure(options, hosts)
    if hosts.rank == 0:
        rows = list(records(options, ways))
        print(table(rows))
        if options.json:
            append_json_lines(options.json, rows)
        if options.plot:
            plot(rows, options.plot)


if __name__ == "__main__":
    sys.exit(main())
