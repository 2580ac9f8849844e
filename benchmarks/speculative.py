"""Compare speculative with autoregressive decoding on the same questions in one run.

    python benchmarks/speculative.py --scale 6
    python benchmarks/speculative.py --strategies specvlm hippo --keep-ratio 0.1 0.3 \
        --num-draft-tokens 3 5 auto
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --strategies vanilla \
        --draft-host
    torchrun --nproc-per-node 2 benchmarks/speculative.py --scale 6 --preset hippo1 \
        --tasks describe ordering
    python benchmarks/speculative.py --model PATH --draft-model PATH --prompts prompts.jsonl
    python benchmarks/speculative.py --scale 6 --batch 1 4 16 --clips 16 --strategies vanilla hippo

Each line of such a file is an object with a "prompt", the path of a "video", those of an "image" or
of several, or of a "context" (texts one after the other, of which "characters" are read), relative
to the file, and the "task" by which answers are summed up.

The demo model is asked about clips of its test split; --scale repeats the target's layers without
changing its output, so that target and draft differ in cost as real pairs do. All variants are
interleaved on every question. Answers are greedy, and each is compared with the autoregressive one,
which uses the same attention: a variant whose answer differs anywhere is reported without a speed.
With --draft-host the last host drafts in parallel in some variants and idles in the others; on a
single host a thread drafts. A preset is one of the papers' tables (support/presets.toml), at the
first of --keep-ratio. With --batch the first questions are answered together, and drafts that do
not pay are dropped.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)
from apbv.decode.answer import begin_answer

# isort: split
from tqdm import tqdm

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig
from apbv.config import KEEP_POLICIES, PRUNINGS
from apbv.decode.batch import Batch
from apbv.input.request import Question, Request
from apbv.input.video import probe
from apbv.speculate import STRATEGIES, prunes
from apbv.stats import StageTimer

from support.arguments import parser_of, presets_of
from support.drafting import Way, build_ways
from support.exams import Exam
from support.records import columns_of, fields_of, measure_on_hosts, read_records

PRESETS = presets_of("speculative")


def configs_of(preset: str, keep_ratio: float) -> dict[str, SpeculativeConfig]:
    """Return a preset's ways by label, at a share of visual tokens kept where they do not have
    their own."""
    found = {}
    for label, settings in PRESETS[preset].items():
        prunes_some = (
            prunes(SpeculativeConfig(strategy=settings["strategy"]))
            and "keep_tokens" not in settings
        )
        amount = {"keep_ratio": keep_ratio} if prunes_some else {}
        terms = {"hippo_terms": tuple(settings["hippo_terms"])} if "hippo_terms" in settings else {}
        found[label] = SpeculativeConfig(**settings | amount | terms)
    return found


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
                for prune in (
                    options.prune
                    if is_pruned and not STRATEGIES[strategy].runs_target
                    else ["prompt"]
                ):
                    for gamma in options.num_draft_tokens:
                        kinds = [
                            strategy,
                            name,
                            size,
                            prune if prune != "prompt" else None,
                            f"γ = {gamma}",
                        ]
                        config = SpeculativeConfig(
                            **way, **kept, prune=prune, num_draft_tokens=gamma
                        )
                        found[", ".join(kind for kind in kinds if kind)] = config
    return found


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[tuple[str, dict]]:
    """Yield (task, what ``Engine.generate`` gets); of several questions of a task about a clip, the
    first."""
    if options.prompts:
        for given in read_records([options.prompts]):
            folder = options.prompts.parent
            asked = {"prompt": given["prompt"]}
            if "context" in given:
                text = "\n".join(
                    (folder / path).read_text(encoding="utf-8") for path in given["context"]
                )
                asked["context"] = text[: given.get("characters")]
            elif "image" in given:
                names = given["image"]
                files = [names] if isinstance(names, str) else names
                asked["images"] = [folder / name for name in files]
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


class Together(NamedTuple):
    """Answers that were decoded in one batch: their tokens, their drafts' metrics, and the seconds
    of decoding."""

    prompt_lens: list[int]
    tokens: list[list[int]]
    figures: list[dict | None]
    seconds: float


def decode_together(
    engine: Engine, batch: Batch, questions: Sequence[dict], max_new_tokens: int
) -> Together:
    """Prefill questions, and decode their answers in a batch, on host 0; collective."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    begun = [
        engine.begin(Request(Question(**given), StageTimer(engine.hosts), sampling=sampling))
        for given in questions
    ]
    began = time.perf_counter()
    with engine.attention():
        members = [
            batch.join(begin_answer(engine.parts, state, read.request), draft)
            for read, state, draft in begun
            if engine.hosts.is_leader
        ]
        prompt_lens = [member.answer.prompt_len for member in members]
        while len(batch):
            batch.step()
    seconds = time.perf_counter() - began
    return Together(
        prompt_lens,
        [each.tokens for each in members],
        [each.summary() for each in members],
        seconds,
    )


def batch_records(
    options: argparse.Namespace, ways: Sequence[Way], questions: Sequence[dict]
) -> Iterator[dict]:
    """Answer questions in one batch, in all ways in turn, after a warm-up; yield a record per way,
    on host 0."""
    engines = [(way.engine, way.engine.batch()) for way in ways]
    rounds = [
        [decode_together(*each, questions, options.max_new_tokens) for each in engines]
        for _ in range(1 + options.rounds)
    ]
    measured = list(zip(*rounds[1:], strict=True)) if engines[0][0].hosts.is_leader else []
    for way, runs in zip(ways, measured, strict=False):
        figures = [each for run in runs for each in run.figures if each]
        drafted = sum(each["num_drafted"] for each in figures)
        seconds = sum(run.seconds for run in runs)
        new_tokens = sum(len(tokens) for run in runs for tokens in run.tokens)
        yield {
            "benchmark": "batch_speculative",
            "label": way.label,
            **fields_of(options, "model", "scale", "dtype"),
            "num_input_tokens": statistics.mean(runs[0].prompt_lens),
            "answers": len(questions),
            "new_tokens": new_tokens,
            "identical": [run.tokens for run in runs] == [run.tokens for run in measured[0]],
            "acceptance_rate": sum(each["num_accepted"] for each in figures) / drafted
            if drafted
            else None,
            "drafted_per_token": drafted / new_tokens,
            "tokens_per_s": new_tokens / seconds,
            "speedup": sum(run.seconds for run in measured[0]) / seconds,
            "samples": {"seconds": [run.seconds for run in runs]},
        }


def task_records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """Yield a record per task and way; speedups are ratios of sums over the same questions."""
    for task, alone in ways[0].stats.items():
        new_tokens = sum(len(stats["token_ids"]) for stats in alone)
        # The first token of every answer comes out of the prefill.
        forwards = new_tokens - len(alone)
        decode_ms = sum(s["stages_ms"]["decode"] for s in alone)
        total_ms = sum(s["total_ms"] for s in alone)
        target_ms = decode_ms / max(1, forwards)
        is_whole = options.reuse == "off"  # else the ways' prefills are not alike
        for way in ways:
            runs = way.stats[task]
            identical = all(
                a["token_ids"] == b["token_ids"] for a, b in zip(runs, alone, strict=True)
            )
            times = {
                "decode_ms": [stats["stages_ms"]["decode"] for stats in runs],
                "draft_prefill_ms": [stats["stages_ms"]["draft"] for stats in runs],
                "total_ms": [stats["total_ms"] for stats in runs],
            }
            figures = (
                None if way.config is None else speculation(way.config, runs, target_ms, forwards)
            )
            yield {
                "benchmark": "speculative",
                "label": way.label,
                "task": task,
                **fields_of(options, "preset", "model", "scale", "kv", "reuse"),
                **fields_of(runs[0], "hosts", "method", "dtype"),
                "num_input_tokens": statistics.mean(stats["num_input_tokens"] for stats in runs),
                "answers": len(runs),
                "new_tokens": new_tokens,
                "identical": identical,
                **times,
                "target_ms_per_token": target_ms,
                "decode_speedup": decode_ms / sum(times["decode_ms"]) if identical else None,
                "end_to_end_speedup": total_ms / sum(times["total_ms"])
                if identical and is_whole
                else None,
                "speculation": figures,
            }


def speculation(
    config: SpeculativeConfig, runs: list[dict], target_ms: float, num_tokens: int
) -> dict:
    """Return drafted and accepted tokens, the costs on both sides, and the predicted speedup.

    Args:
        target_ms: of a target's pass over one token.
        num_tokens: of all answers, but their first.
    """

    def total(name: str) -> float | None:
        values = [stats["speculation"][name] for stats in runs]
        return None if None in values else sum(values)

    drafted, accepted, rounds = (total(name) for name in ("num_drafted", "num_accepted", "rounds"))
    # A draft host writes more tokens than are ever verified.
    written = total("num_written") if config.draft_host else drafted
    seconds = total("draft_seconds")
    draft_ms = None if seconds is None else 1e3 * seconds / max(1, written)
    ratio = target_ms / draft_ms if draft_ms else None
    in_a_row = accepted / (total("num_rejections") + len(runs))
    per_forward = num_tokens / max(1, total("num_target_forwards"))
    gamma = drafted / max(1, rounds)  # a lookup may find fewer tokens than requested
    predicted = None
    if ratio and config.draft_host:  # Theorem 6 takes the chance that one more token is accepted
        predicted = beside_speedup(
            gamma, ratio, accepted / max(1, accepted + total("num_rejections"))
        )
    elif ratio:  # Theorem 4 the share of accepted tokens
        predicted = in_turn_speedup(gamma, ratio, accepted / max(1, drafted))
    return {
        "config": asdict(config),
        "acceptance_rate": accepted / max(1, drafted),
        "tokens_per_target_forward": per_forward,
        "mean_accepted_tokens": in_a_row if config.draft_host else per_forward,
        "accepted_in_a_row": in_a_row,
        "draft_ms_per_token": draft_ms,
        "verify_ms_per_round": 1e3 * total("verify_seconds") / max(1, rounds),
        "cost_ratio": ratio,
        "predicted_decode_speedup": predicted,
    }


def in_turn_speedup(gamma: float, c: float, tau: float) -> float:
    """Predict what drafting and verifying in turn gains over autoregressive decoding (ParallelVLM,
    Theorem 4).

    Args:
        gamma: tokens drafted per round.
        c: T_p / T_q, how many tokens the draft drafts during one pass of the target.
        tau: the acceptance rate.
    """
    return c * (tau * gamma + 1) / (gamma + c)


def beside_speedup(gamma: float, c: float, tau: float) -> float:
    """Predict what drafting while verifying gains, with the rounds that rejections cost (Theorem 6,
    Lemma 1)."""
    accepted = gamma if tau == 1 else tau * (1 - tau**gamma) / (1 - tau)
    return c * (1 + tau**gamma) * accepted / (2 * max(gamma, c))


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer every question in all ways in turn, after a warm-up with the first; yield the records,
    on host 0."""
    # A way that loses must be seen to lose.
    configs = {
        label: replace(each, keep_losing_draft=True)
        for label, each in configurations(options).items()
    }
    ways = build_ways(options, configs, hosts)
    asked = list(questions(options, hosts))
    rounds = [
        (asked[0], False),
        *((question, True) for _ in range(options.rounds) for question in asked),
    ]
    with tqdm(
        total=len(rounds) * len(ways), unit="answer", disable=None if hosts.rank == 0 else True
    ) as bar:
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
        yield from task_records(options, ways)


def measure_batches(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer the first questions in batches of all sizes, in all ways; yield the records, on host
    0.

    Raises:
        ValueError: there are fewer questions than a batch has answers.
    """
    asked = list(questions(options, hosts))
    if max(options.batch) > len(asked):
        raise ValueError(
            f"--batch {max(options.batch)} needs as many questions, but there are {len(asked)}: "
            "--clips"
        )
    ways = build_ways(options, configurations(options), hosts)
    for size in tqdm(options.batch, unit="batch", disable=None if hosts.rank == 0 else True):
        yield from batch_records(options, ways, [given for _, given in asked[:size]])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    choices = {
        "preset": PRESETS,
        "strategies": STRATEGIES,
        "keep": KEEP_POLICIES,
        "prune": PRUNINGS,
    }
    parser = parser_of("speculative", __doc__, choices)
    options = parser.parse_args(arguments)
    if options.keep_tokens and options.keep_ratio:
        parser.error("--keep-tokens and --keep-ratio exclude each other")
    options.keep_ratio = options.keep_ratio or [0.1]
    try:
        if options.preset is not None:
            options.draft_host = any(
                config.draft_host for config in configurations(options).values()
            )
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    run, name = (
        (measure_batches, "batch_speculative") if options.batch else (measure, "speculative")
    )
    return measure_on_hosts(options, run, columns_of(name))


if __name__ == "__main__":
    sys.exit(main())
