"""Compare speculative with autoregressive decoding on the same questions in one run.

    python benchmarks/speculative.py --scale 6
    python benchmarks/speculative.py --strategies specvlm hippo --keep-ratio 0.1 0.3 --num-draft-tokens 3 5 auto
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --strategies vanilla --draft-host
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --preset hippo1 --tasks describe ordering
    python benchmarks/speculative.py --model PATH --draft-model PATH --prompts prompts.jsonl
    python benchmarks/speculative.py --scale 6 --batch 1 4 16 --clips 16 --strategies vanilla hippo

Each line of such a file is an object with a "prompt", the path of a "video" or the paths of a "context" (texts one
after the other, of which "characters" are read), relative to the file, and the "task" by which answers are summed up.

The demo model is asked about clips of its test split; --scale repeats the target's layers without changing its
output, so that target and draft differ in cost as real pairs do. All variants are
interleaved on every question. Answers are greedy, and each is compared with the autoregressive one, which uses the
same attention: a variant whose answer differs anywhere is reported without a speed. With --draft-host the last
host drafts in parallel in some variants and idles in the others; on a single host a thread drafts. A preset is one
of the papers' tables (support/draft_presets.toml), at the first of --keep-ratio. With --batch the first questions
are answered together, and drafts that do not pay are dropped.
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm

from apbv import HostGroup, SpeculativeConfig
from apbv.config import KEEP_POLICIES, PRUNINGS
from apbv.input.video import probe
from apbv.speculate import STRATEGIES, prunes

from support import clips
from support.arguments import COUNT, add_clip_options, add_pair, add_shared
from support.drafting import batch_records, build_ways, records
from support.exams import Exam
from support.records import measure_on_hosts, read_records

PRESETS = tomllib.loads((Path(__file__).parent / "support" / "draft_presets.toml").read_text(encoding="utf-8"))


def configs_of(preset: str, keep_ratio: float) -> dict[str, SpeculativeConfig]:
    """Return a preset's ways by label, at a share of visual tokens kept where they do not have their own."""
    found = {}
    for label, settings in PRESETS[preset].items():
        prunes_some = prunes(SpeculativeConfig(strategy=settings["strategy"])) and "keep_tokens" not in settings
        amount = {"keep_ratio": keep_ratio} if prunes_some else {}
        amount |= {"hippo_terms": tuple(settings["hippo_terms"])} if "hippo_terms" in settings else {}
        found[label] = SpeculativeConfig(**settings | amount)
    return found


def draft_tokens(text: str) -> int | str:
    """Read a number, or ``auto``."""
    return text if text == "auto" else int(text)


def configurations(options: argparse.Namespace) -> dict[str, SpeculativeConfig]:
    """Return the requested ways by label."""
    if options.preset is not None:
        return configs_of(options.preset, options.keep_ratio[0])
    sizes = {f"{ratio}": {"keep_ratio": ratio} for ratio in options.keep_ratio}
    if options.keep_tokens:
        sizes = {f"{count} tokens": {"keep_tokens": count} for count in options.keep_tokens}
    found = {}
    for strategy in options.strategies:
        for name in options.keep if strategy == "specvlm" else [None]:
            way = {"strategy": strategy, "keep": name}
            is_pruned = prunes(SpeculativeConfig(**way))
            for size, kept in sizes.items() if is_pruned else [("", {})]:
                for prune in options.prune if is_pruned and not STRATEGIES[strategy].runs_target else ["prompt"]:
                    for gamma in options.num_draft_tokens:
                        kinds = [strategy, name, size, prune if prune != "prompt" else None, f"γ = {gamma}"]
                        config = SpeculativeConfig(**way, **kept, prune=prune, num_draft_tokens=gamma)
                        found[", ".join(kind for kind in kinds if kind)] = config
    return found


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[tuple[str, dict]]:
    """Yield (task, what ``Engine.generate`` gets); of several questions of a task about a clip, the first."""
    if options.prompts:
        for given in read_records([options.prompts]):
            folder, asked = options.prompts.parent, {"prompt": given["prompt"]}
            if "context" in given:
                text = "\n".join((folder / path).read_text(encoding="utf-8") for path in given["context"])
                asked["context"] = text[: given.get("characters")]
            else:
                asked["video"] = folder / given["video"]
            yield given["task"], asked
        return
    exam = Exam.of(options, tuple(options.tasks))
    for seed in range(options.clips):
        file = exam.file(seed, hosts)
        asked = dict(reversed([(task, question) for task, question, _ in exam.questions(seed)]))
        for task in options.tasks:
            yield task, {"prompt": asked[task], "video": file, "num_frames": probe(file).num_frames}


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer every question in all ways in turn, after a warm-up with the first; yield the records, on host 0."""
    # A way that loses must be seen to lose.
    configs = {label: replace(each, keep_losing_draft=True) for label, each in configurations(options).items()}
    ways, asked = build_ways(options, configs, hosts), list(questions(options, hosts))
    rounds = [(asked[0], False), *((question, True) for _ in range(options.rounds) for question in asked)]
    with tqdm(total=len(rounds) * len(ways), unit="answer", disable=None if hosts.rank == 0 else True) as bar:
        for (task, given), counts in rounds:
            for way in ways:
                bar.set_postfix_str(way.label, refresh=True)
                hosts.barrier()
                if way.engine is not None:
                    answer = way.engine.generate(**given, max_new_tokens=options.max_new_tokens)
                    if counts:
                        way.stats.setdefault(task, []).append(answer.stats)
                bar.update()
    if hosts.rank == 0:
        yield from records(options, ways)


def measure_batches(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer the first questions in batches of all sizes, in all ways; yield the records, on host 0.

    Raises:
        ValueError: there are fewer questions than a batch has answers.
    """
    asked = list(questions(options, hosts))
    if max(options.batch) > len(asked):
        raise ValueError(
            f"--batch {max(options.batch)} needs as many questions, but there are {len(asked)}: --clips"
        )
    ways = build_ways(options, configurations(options), hosts)
    for size in tqdm(options.batch, unit="batch", disable=None if hosts.rank == 0 else True):
        yield from batch_records(options, ways, [given for _, given in asked[:size]])


COLUMNS = {
    "task": "{task}",
    "way": "{label}",
    "accepted": "{speculation[acceptance_rate]:.2f}",
    "MAT": "{speculation[mean_accepted_tokens]:.2f}",
    "tokens / target pass": "{speculation[tokens_per_target_forward]:.2f}",
    "T_p / T_q": "{speculation[cost_ratio]:.2f}",
    "T_q ms": "{speculation[draft_ms_per_token]:.2f}",
    "draft prefill ms": lambda row: f"{statistics.mean(row['draft_prefill_ms']):.1f}",
    "decode ms": lambda row: f"{statistics.mean(row['decode_ms']):.1f}",
    "decode speed-up": "{decode_speedup:.2f} ×",
    "by theory": "{speculation[predicted_decode_speedup]:.2f} ×",
    "end to end": "{end_to_end_speedup:.2f} ×",
}
BATCH_COLUMNS = {
    "prompt": "{num_input_tokens:.0f}",
    "answers": "{answers}",
    "way": "{label}",
    "accepted": "{acceptance_rate:.2f}",
    "drafted per token": "{drafted_per_token:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f} ×",
    "identical": "{identical}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair(parser)
    parser.add_argument("--preset", choices=PRESETS, help="a paper's table, instead of --strategies")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, help="default: all applicable")
    parser.add_argument("--num-draft-tokens", type=draft_tokens, nargs="+", default=[5], metavar="N|auto")
    parser.add_argument("--draft-host", action="store_true", help="also draft in parallel on the last host")
    parser.add_argument("--batch", type=COUNT, nargs="+", default=[], help="answer as many questions together")
    parser.add_argument("--keep", nargs="+", choices=KEEP_POLICIES, default=["specvlm"])
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--keep-ratio", type=float, nargs="+", default=[0.1], help="share of visual tokens (0.1)")
    amount.add_argument("--keep-tokens", type=int, nargs="+", metavar="N", help="prompt tokens, text included")
    parser.add_argument("--prune", nargs="+", choices=PRUNINGS, default=["prompt"])
    parser.add_argument(
        "--tasks", nargs="+", choices=clips.TASKS, default=["describe"], help="tasks on the demo's clips"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="use these prompts instead of the demo's clips"
    )
    add_clip_options(parser, 4, 32)
    add_shared(parser, "json", rounds=1, dtype="float32", max_new_tokens=160)
    options = parser.parse_args(arguments)
    try:
        if options.preset is not None:
            options.draft_host = any(config.draft_host for config in configurations(options).values())
    except ValueError as error:
        parser.error(str(error))
    if options.strategies is None:
        options.strategies = list(STRATEGIES)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    run, columns = (measure_batches, BATCH_COLUMNS) if options.batch else (measure, COLUMNS)
    return measure_on_hosts(options, run, columns)


if __name__ == "__main__":
    sys.exit(main())
