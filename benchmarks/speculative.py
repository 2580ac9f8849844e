"""Compare speculative with autoregressive decoding on the same questions, side by side in one run.

    python benchmarks/speculative.py --scale 6
    python benchmarks/speculative.py --strategies specvlm hippo --keep-ratio 0.1 0.3 --num-draft-tokens 3 5 auto
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --strategies vanilla --draft-host
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --preset hippo1 --tasks describe ordering
    torchrun --nproc-per-node 2 benchmarks/speculative.py --kv sharded --json figures.jsonl --plot speed.png
    python benchmarks/speculative.py --model PATH --draft-model PATH --video clip.mp4 --question "…"

The demo model is asked about clips of its test split; --scale repeats the target's layers without changing what it
says (as scaled_model.py does), so that target and draft differ in cost as real pairs do. All ways answer every
question in turn. Answers are greedy, and each is compared with the autoregressive one, which uses the same
attention: a way whose answer differs anywhere is reported without a speed. With --draft-host the last host drafts
beside the others in some ways, and takes no part in the rest; on a single host a thread does. A preset is one of
the papers' tables (support/speculation/presets.py), at the first of --keep-ratio; "std1" keeps its own number of
tokens.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.allocator import keep_freed_memory
from apbv.config import KEEP_POLICIES, KV_PLACEMENTS, PRUNINGS
from apbv.hosts import run_on_hosts
from apbv.input.rendering import RenderedPrompt
from apbv.input.video import probe
from apbv.prefilling.methods import METHODS
from apbv.speculate import STRATEGIES, prunes
from apbv.speculate.strategies import draft_tree

from support import clips
from support.arguments import add_clip_options, add_json_option, add_plot_option
from support.exams.exam import Exam, clips_folder
from support.records import write_by_host_0
from support.speculation.presets import PRESETS
from support.speculation.report import Way, breakdown_table, plot, records, table
from support.speculation.scaled_model import scale_model

BASELINE = "autoregressive"


def draft_tokens(text: str) -> int | str:
    """Read a number, or ``auto``."""
    return text if text == "auto" else int(text)


def configurations(options: argparse.Namespace) -> Iterator[tuple[str, SpeculativeConfig]]:
    """Yield the requested ways with their labels, each once."""
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
    """Build the ways to decode, on one target and one draft."""
    prefill = PrefillConfig(method=options.method, kv=options.kv)
    # A layer of the target lies --scale times as deep in the scaled one. A way that loses must be seen to lose.
    wanted = [
        (label, replace(config, uv_layer=options.scale * config.uv_layer, keep_losing_draft=True))
        for label, config in configurations(options)
    ]
    if options.draft_host and options.preset is None:
        wanted += [(f"{label}, draft host", replace(c, draft_host=True)) for label, c in wanted if may_move_out(c)]
    needs_draft = options.draft_host or any(STRATEGIES[config.strategy].needs_draft_model for _, config in wanted)
    last = hosts.size - 1
    moves_out = options.draft_host and hosts.size > 1  # on one host a thread drafts
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
        """Let the draft answer a short question, because a captioner must be cheap."""
        frames = options.frames or probe(prompt.videos[0]).num_frames
        return drafting.generate(clips.ORDERING_QUESTION, video=prompt.videos[0], num_frames=frames).text

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
    """Tell whether a way's draft can work on a host of its own."""
    strategy = STRATEGIES[config.strategy]
    return strategy.needs_draft_model and not strategy.needs_verdicts and draft_tree(config) is None


@dataclass(frozen=True)
class Question:
    """A question about a file."""

    task: str
    file: Path
    text: str
    num_frames: int


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[Question]:
    """Yield the questions; a task with several about a clip asks the first."""
    if options.video is not None:
        yield Question("video", options.video, options.question, options.frames or 64)
        return
    exam = Exam(options.grid, options.shots, options.clips, tuple(options.tasks))
    folder = clips_folder(options.folder)
    for seed in range(options.clips):
        file = exam.shared_file(seed, folder, hosts)
        asked = dict(reversed([(task, question) for task, question, _ in exam.questions(seed)]))
        for task in options.tasks:
            yield Question(task, file, options.question or asked[task], options.frames or probe(file).num_frames)


def measure(options: argparse.Namespace, hosts: HostGroup) -> list[Way]:
    """Answer every question in all ways in turn, after a warm-up with the first question."""
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
    parser.add_argument("--clips", type=int, default=4)
    add_clip_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    add_json_option(parser)
    add_plot_option(parser)
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
    """Measure, and print and write the figures."""
    if hosts.device.type == "cpu":
        keep_freed_memory()
    ways = measure(options, hosts)
    rows = list(records(options, ways)) if hosts.rank == 0 else []
    tables = [table, breakdown_table] if options.preset == "hippo2" else [table]
    write_by_host_0(hosts, options, rows, lambda rows: "\n".join(each(rows) for each in tables), plot)


if __name__ == "__main__":
    sys.exit(main())
