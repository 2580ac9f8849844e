"""Speculative against autoregressive decoding: the same answers, side by side in one run.

    python benchmarks/speculative.py --scale 6
    python benchmarks/speculative.py --strategies specvlm hippo --keep-ratio 0.1 0.3 --num-draft-tokens 3 5 auto
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --strategies vanilla --draft-host
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --preset hippo1 --tasks describe ordering
    torchrun --nproc-per-node 2 benchmarks/speculative.py --kv sharded --json figures.jsonl --plot speed.png
    python benchmarks/speculative.py --model PATH --draft-model PATH --video clip.mp4 --question "…"

With the demo model questions about clips of its test split are asked; --scale repeats the target's layers without
changing what it says (apbv.demo.scale), so that target and draft differ in cost as real pairs do. All ways take
every question in turn. Answers are greedy, and each is compared with the autoregressive one, which uses the same
attention: a way whose answer differs anywhere is reported without a speed. With --draft-host the last host drafts
beside the others in some ways, and has no part in the rest; on a single host a thread does. A preset is a paper's
table (speculative_presets.py), at the first of --keep-ratio; "std1" keeps as many tokens as its paper does.
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
from figures import import_pyplot, legend_above, save
from speculative_presets import PRESETS
from tqdm import tqdm

from apbv import Engine, GenerateResult, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.allocator import keep_freed_memory
from apbv.config import KEEP_POLICIES, KV_PLACEMENTS, PRUNINGS
from apbv.demo import clips
from apbv.demo.evaluate import Exam, clips_folder
from apbv.demo.scale import scale_model
from apbv.hosts import run_on_hosts
from apbv.input.rendering import RenderedPrompt
from apbv.input.video import probe
from apbv.launch.options import draft_tokens
from apbv.prefilling.methods import METHODS
from apbv.speculate import STRATEGIES, draft_tree, prunes, theory
from apbv.stats import append_json_lines, markdown_table, provenance

BASELINE = "autoregressive"


@dataclass
class Way:
    """One way to decode, and what its answers of each task took; without an engine on a host that has no part."""

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
        return self.way.answers[self.task]

    @property
    def stats(self) -> list[dict]:
        return [answer.stats for answer in self.answers]

    def total(self, name: str) -> float | None:
        """A figure of the speculation, summed over all runs; None where one has none."""
        values = [stats["speculation"][name] for stats in self.stats]
        return None if None in values else sum(values)

    def milliseconds(self, name: str) -> float:
        """Of a stage, or of the whole request (``total``), summed over all runs."""
        return sum(s["total_ms"] if name == "total" else s["stages_ms"][name] for s in self.stats)


def configurations(options: argparse.Namespace) -> Iterator[tuple[str, SpeculativeConfig]]:
    """What was asked for, without what would be the same twice."""
    if options.preset is not None:
        yield from PRESETS[options.preset](options.keep_ratio[0])
        return
    sizes = [(str(ratio), {"keep_ratio": ratio}) for ratio in options.keep_ratio]
    if options.keep_tokens:
        sizes = [(f"{count} tokens", {"keep_tokens": count}) for count in options.keep_tokens]
    for strategy in options.strategies:
        for keep in options.keep if strategy == "specvlm" else [None]:
            way = {"strategy": strategy, "keep": keep}
            is_pruned = prunes(SpeculativeConfig(**way))
            for size, kept in sizes if is_pruned else [("", {})]:
                for prune in options.prune if is_pruned and not STRATEGIES[strategy].prunes_kv else ["prompt"]:
                    for gamma in options.num_draft_tokens:
                        kinds = [strategy, keep, size, prune if prune != "prompt" else None, f"γ = {gamma}"]
                        config = SpeculativeConfig(**way, **kept, prune=prune, num_draft_tokens=gamma)
                        yield ", ".join(kind for kind in kinds if kind), config


def build_ways(options: argparse.Namespace, hosts: HostGroup) -> list[Way]:
    """The ways, on one target and one draft."""
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    # A layer of the target stands so many times as deep in the scaled one; a way that loses is to be seen losing.
    wanted = [
        (label, replace(config, uv_layer=options.scale * config.uv_layer, keep_losing_draft=True))
        for label, config in configurations(options)
    ]
    if options.draft_host and options.preset is None:
        wanted += [(f"{label}, draft host", replace(c, draft_host=True)) for label, c in wanted if may_move_out(c)]
    needs_draft = options.draft_host or any(STRATEGIES[config.strategy].needs_draft_model for _, config in wanted)
    last = hosts.size - 1
    moves_out = options.draft_host and hosts.size > 1  # else a thread drafts
    targets = hosts.subgroup(range(last)) if moves_out else hosts
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

    def caption(prompt: RenderedPrompt) -> str:
        """What the draft makes of a short question: a captioner is to be cheap."""
        frames = options.frames or probe(prompt.video).num_frames
        return drafting.generate(clips.ORDERING_QUESTION, video=prompt.video, num_frames=frames).text

    def engine(group: HostGroup | None, config: SpeculativeConfig | None) -> Engine | None:
        if group is None:
            return None
        beside = config is not None and config.draft_host and hosts.size > 1
        return Engine(
            model,
            processor,
            group,
            prefill,
            options.model,
            config,
            draft if not beside or hosts.rank == last else None,
            caption,
        )

    ways = [Way(BASELINE, None, engine(targets, None))]
    return ways + [Way(label, c, engine(hosts if c.draft_host else targets, c)) for label, c in wanted]


def may_move_out(config: SpeculativeConfig) -> bool:
    """Whether its draft can work on a host of its own."""
    strategy = STRATEGIES[config.strategy]
    return strategy.needs_draft_model and not strategy.needs_verdicts and draft_tree(config) is None


@dataclass(frozen=True)
class Question:
    task: str
    file: Path
    text: str
    num_frames: int


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[Question]:
    """What is asked; of tasks with several questions about a clip the first."""
    if options.video is not None:
        yield Question("video", options.video, options.question, options.frames or 64)
        return
    exam = Exam(options.grid, options.shots, options.clips, tuple(options.tasks))
    folder = clips_folder(options.folder)
    for seed in range(options.clips):
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0:
                exam.file(seed, folder)
        file = exam.file(seed, folder)
        asked = dict(reversed([(task, question) for task, question, _ in exam.questions(seed)]))
        for task in options.tasks:
            yield Question(task, file, options.question or asked[task], options.frames or probe(file).num_frames)


def measure(options: argparse.Namespace, hosts: HostGroup) -> list[Way]:
    """All ways on every question, in turn; the first question once more before, to warm up."""
    ways = build_ways(options, hosts)
    asked = list(questions(options, hosts))
    rounds = [(asked[0], False), *((question, True) for _ in range(options.rounds) for question in asked)]
    with tqdm(total=len(rounds) * len(ways), unit="answer", disable=None if hosts.rank == 0 else True) as bar:
        for question, counts in rounds:
            for way in ways:
                bar.set_postfix_str(way.label, refresh=True)
                hosts.barrier()
                if way.engine is not None:
                    answer = way.engine.generate(
                        question.text,
                        video=question.file,
                        num_frames=question.num_frames,
                        max_new_tokens=options.max_new_tokens,
                        timeline=True,
                    )
                    if counts:
                        way.answers.setdefault(question.task, []).append(answer)
                bar.update()
    return ways


def records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """One JSON-ready record per task and way; speed-ups are ratios of sums over the same questions of one run."""
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
                "command": " ".join(["benchmarks/speculative.py", *sys.argv[1:]]),
                **provenance(),
            }


def breakdown(runs: Runs) -> dict[str, float | None]:
    """HIPPO's Table 2: what an answer took on either side, on average; a draft host's overlaps the target's."""
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
    """What was drafted and accepted, the costs on both sides, and what the theory makes of these."""
    drafted, accepted, rounds = (runs.total(name) for name in ("num_drafted", "num_accepted", "rounds"))
    config = runs.way.config
    # A draft host writes more than is ever looked at.
    written = runs.total("num_written") if config.draft_host else drafted
    seconds = runs.total("draft_seconds")
    draft_ms = 1e3 * seconds / max(1, written) if seconds is not None else None
    tau, c = accepted / max(1, drafted), target_ms / draft_ms if draft_ms else None
    # Theorem 6 is about tokens that are accepted one by one until the first is not, Theorems 4 and 5 about shares.
    chance = accepted / max(1, accepted + runs.total("num_rejections"))
    gamma = drafted / max(1, rounds)  # a lookup may find less than was asked for
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
    """How much denser kept tokens lie at the frames' borders than anywhere: 1 where it makes no difference."""
    masks = [answer.kept for answer in answers]
    if any(mask is None or min(mask.shape[1:]) < 3 for mask in masks):
        return None
    kept, size = sum(mask.sum().item() for mask in masks), sum(mask.numel() for mask in masks)
    inside = [mask[:, 1:-1, 1:-1] for mask in masks]
    at_border = kept - sum(mask.sum().item() for mask in inside)
    return at_border / (size - sum(mask.numel() for mask in inside)) / (kept / size)


def table(rows: list[dict]) -> str:
    """The figures for people, as Markdown."""
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
    """Which of ParallelVLM's theorems is about this way: 4 in turn, 6 beside each other."""
    beside = figures["config"]["draft_host"]
    return "predicted_parallel_speedup_with_rollback" if beside else "predicted_decode_speedup"


def breakdown_table(rows: list[dict]) -> str:
    """Milliseconds of an answer on both sides, as Markdown."""
    lines = []
    for operation in rows[0]["breakdown_ms"]:
        taken = [row["breakdown_ms"][operation] for row in rows]
        lines.append([operation, *("–" if ms is None else f"{ms:.1f}" for ms in taken)])
    return markdown_table(["ms", *(f"{row['label']} ({row['task']})" for row in rows)], lines)


def plot(rows: list[dict], path: Path) -> None:
    """Measured decode speed-up of every way, beside what the theory makes of its costs and acceptance."""
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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--draft-model", help="likewise (demo: the packaged one)")
    parser.add_argument(
        "--scale", type=int, default=1, help="repeat the target's layers so many times (Qwen2.5-VL)"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", choices=METHODS, default="apbv", help="how prompts are prefilled")
    parser.add_argument("--kv", choices=KV_PLACEMENTS, default="gathered")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a paper's table, instead of --strategies")
    parser.add_argument("--strategies", nargs="+", choices=sorted(STRATEGIES), help="default: all that fit")
    parser.add_argument("--num-draft-tokens", type=draft_tokens, nargs="+", default=[5], metavar="N|auto")
    parser.add_argument(
        "--draft-host", action="store_true", help="and once more with the last host drafting beside"
    )
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=["specvlm"])
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1], help="of visual tokens (0.1)")
    amount.add_argument("--keep-tokens", type=int, nargs="+", metavar="N", help="of the prompt, text included")
    parser.add_argument("--prune", nargs="+", choices=PRUNINGS, default=["prompt"])
    parser.add_argument(
        "--tasks", nargs="+", choices=clips.TASKS, default=["describe"], help="of the demo's clips"
    )
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
    try:
        if options.preset is not None:
            options.draft_host = any(config.draft_host for _, config in configurations(options))
    except ValueError as error:
        parser.error(str(error))
    if options.strategies is None:
        num_targets = int(os.environ.get("WORLD_SIZE", 1)) - options.draft_host
        passes = num_targets > 1 and METHODS[options.method].passes_on
        options.strategies = [name for name, way in STRATEGIES.items() if passes or not way.needs_passing]
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
        if options.preset == "hippo2":
            print(breakdown_table(rows))
        if options.json:
            append_json_lines(options.json, rows)
        if options.plot:
            plot(rows, options.plot)


if __name__ == "__main__":
    sys.exit(main())
