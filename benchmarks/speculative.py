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
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.decode.answer import begin_answer
from apbv.errors import InvalidRequestError

# isort: split
from tqdm import tqdm

from apbv import Engine, HostGroup, SamplingParams, SpeculativeConfig
from apbv.config import KEEP_POLICIES, PRUNINGS
from apbv.decode.batch import Batch
from apbv.input.media.video import probe
from apbv.request.request import Question, Request, RequestSettings
from apbv.speculate import STRATEGIES, prunes
from apbv.stats import StageTimer

from support.arguments import parser_of, presets_of
from support.drafting import Way, build_ways, speculative_config
from support.exams import Exam
from support.records import columns_of, fields_of, measure_on_hosts, read_records

PRESETS = presets_of("speculative")


def configs_of(preset: str, keep_ratio: float) -> dict[str, SpeculativeConfig]:
    """Return a preset's ways by label.

    Args:
        keep_ratio: the share of visual tokens kept by ways that do not say how many they keep.
    """
    configs = {}
    for label, settings in PRESETS[preset].items():
        fields = dict(settings)
        if prunes(SpeculativeConfig(strategy=fields["strategy"])) and "keep_tokens" not in fields:
            fields["keep_ratio"] = keep_ratio
        configs[label] = speculative_config(fields)
    return configs


def configurations(options: argparse.Namespace) -> dict[str, SpeculativeConfig]:
    """Return the requested ways by label."""
    if options.preset is not None:
        return configs_of(options.preset, options.keep_ratio[0])
    # How many visual tokens a draft that prunes keeps, by what a label says of it.
    sizes = {}
    if options.keep_tokens:
        for count in options.keep_tokens:
            sizes[f"{count} tokens"] = {"keep_tokens": count}
    else:
        for ratio in options.keep_ratio:
            sizes[f"{ratio}"] = {"keep_ratio": ratio}
    whole = {"": {}}
    configs = {}
    for strategy in options.strategies:
        policies = options.keep if strategy == "specvlm" else [None]
        for policy in policies:
            is_pruned = prunes(SpeculativeConfig(strategy=strategy, keep=policy))
            prunings = ["prompt"]
            if is_pruned and not STRATEGIES[strategy].facts.runs_target:
                prunings = options.prune
            sizes_of_way = sizes if is_pruned else whole
            for (size, kept), pruning, gamma in product(
                sizes_of_way.items(), prunings, options.num_draft_tokens
            ):
                shown_pruning = None if pruning == "prompt" else pruning
                names = [strategy, policy, size, shown_pruning, f"γ = {gamma}"]
                label = ", ".join(name for name in names if name)
                configs[label] = SpeculativeConfig(
                    strategy=strategy, keep=policy, prune=pruning, num_draft_tokens=gamma, **kept
                )
    return configs


def questions(options: argparse.Namespace, hosts: HostGroup) -> Iterator[tuple[str, dict]]:
    """Yield (task, arguments of ``Engine.generate``).

    Of several questions of a task about a clip it is the first.
    """
    if options.prompts:
        for entry in read_records([options.prompts]):
            yield entry["task"], request_of(entry, options.prompts.parent)
        return
    exam = Exam.of(options, tuple(options.tasks))
    for seed in range(options.clips):
        file = exam.file(seed, hosts)
        prompts: dict[str, str] = {}
        for task, question, _ in exam.questions(seed):
            prompts.setdefault(task, question)
        num_frames = probe(file).num_frames
        for task in options.tasks:
            yield task, {"prompt": prompts[task], "video": file, "num_frames": num_frames}


def request_of(entry: dict, folder: Path) -> dict:
    """Return a line of a file of prompts as arguments of ``Engine.generate``.

    Args:
        folder: of the file, to which paths are relative.
    """
    request = {"prompt": entry["prompt"]}
    if "context" in entry:
        texts = [(folder / path).read_text(encoding="utf-8") for path in entry["context"]]
        request["context"] = "\n".join(texts)[: entry.get("characters")]
    elif "image" in entry:
        names = entry["image"]
        if isinstance(names, str):
            names = [names]
        request["images"] = [folder / name for name in names]
    elif "video" in entry:
        request["video"] = folder / entry["video"]
    return request


class Together(NamedTuple):
    """Answers that were decoded in one batch.

    Attributes:
        prompt_lens: tokens of the prompts.
        tokens: the answers.
        figures: metrics of their drafts; None of an answer without one.
        seconds: of decoding.
    """

    prompt_lens: list[int]
    tokens: list[list[int]]
    figures: list[dict | None]
    seconds: float


def decode_together(
    engine: Engine, batch: Batch, questions: Sequence[dict], max_new_tokens: int
) -> Together:
    """Prefill questions, and decode their answers in a batch, on host 0; collective."""
    # Prefill.
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    prefilled = []
    for question in questions:
        request = Request(
            Question(**question), StageTimer(engine.hosts), RequestSettings(sampling=sampling)
        )
        prefilled.append(engine.begin(request))

    # Decode.
    began = time.perf_counter()
    members = []
    prompt_lens = []
    with engine.attention():
        if engine.hosts.is_leader:
            for read, state, draft in prefilled:
                answer = begin_answer(engine.parts, state, read.request)
                member = batch.join(answer, draft)
                members.append(member)
                prompt_lens.append(member.answer.prompt_len)
        while len(batch):
            batch.step()
    seconds = time.perf_counter() - began
    tokens = [member.tokens for member in members]
    figures = [member.summary() for member in members]
    return Together(prompt_lens, tokens, figures, seconds)


def batch_records(
    options: argparse.Namespace, ways: Sequence[Way], questions: Sequence[dict]
) -> Iterator[dict]:
    """Answer questions in one batch, in all ways in turn, after a warm-up.

    It yields a record per way, on host 0.
    """
    # Measure, after a first round that warms up.
    batches = [way.engine.batch() for way in ways]
    runs_of_ways: list[list[Together]] = [[] for _ in ways]
    for number in range(1 + options.rounds):
        for way, batch, runs in zip(ways, batches, runs_of_ways, strict=True):
            run = decode_together(way.engine, batch, questions, options.max_new_tokens)
            if number > 0:
                runs.append(run)
    if not ways[0].engine.hosts.is_leader:
        return

    # Make the records; the first way has no draft.
    expected = [run.tokens for run in runs_of_ways[0]]
    plain_seconds = sum(run.seconds for run in runs_of_ways[0])
    for way, runs in zip(ways, runs_of_ways, strict=True):
        seconds = sum(run.seconds for run in runs)
        new_tokens = 0
        num_drafted = 0
        num_accepted = 0
        for run in runs:
            new_tokens += sum(len(tokens) for tokens in run.tokens)
            for figures in run.figures:
                if figures:
                    num_drafted += figures["num_drafted"]
                    num_accepted += figures["num_accepted"]
        yield {
            "benchmark": "batch_speculative",
            "label": way.label,
            **fields_of(options, "model", "scale", "dtype"),
            "num_input_tokens": statistics.mean(runs[0].prompt_lens),
            "answers": len(questions),
            "new_tokens": new_tokens,
            "identical": [run.tokens for run in runs] == expected,
            "acceptance_rate": num_accepted / num_drafted if num_drafted else None,
            "drafted_per_token": num_drafted / new_tokens,
            "tokens_per_s": new_tokens / seconds,
            "speedup": plain_seconds / seconds,
            "samples": {"seconds": [run.seconds for run in runs]},
        }


def task_records(options: argparse.Namespace, ways: list[Way]) -> Iterator[dict]:
    """Yield a record per task and way; speedups are ratios of sums over the same questions."""
    for task, alone in ways[0].stats.items():
        new_tokens = sum(len(stats["token_ids"]) for stats in alone)
        # The first token of every answer comes out of the prefill.
        forwards = new_tokens - len(alone)
        decode_ms = sum(stats["stages_ms"]["decode"] for stats in alone)
        total_ms = sum(stats["total_ms"] for stats in alone)
        target_ms = decode_ms / max(1, forwards)
        expected = [stats["token_ids"] for stats in alone]
        for way in ways:
            runs = way.stats[task]
            identical = [stats["token_ids"] for stats in runs] == expected
            times = {
                "decode_ms": [stats["stages_ms"]["decode"] for stats in runs],
                "draft_prefill_ms": [stats["stages_ms"]["draft"] for stats in runs],
                "total_ms": [stats["total_ms"] for stats in runs],
            }
            # A way whose answers differ has no speed.
            decode_speedup = None
            end_to_end_speedup = None
            if identical:
                decode_speedup = decode_ms / sum(times["decode_ms"])
                # With --reuse the ways' prefills are not alike.
                if options.reuse == "off":
                    end_to_end_speedup = total_ms / sum(times["total_ms"])
            figures = None
            if way.config is not None:
                figures = speculation(way.config, runs, target_ms, forwards)
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
                "decode_speedup": decode_speedup,
                "end_to_end_speedup": end_to_end_speedup,
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

    drafted = total("num_drafted")
    accepted = total("num_accepted")
    rejections = total("num_rejections")
    rounds = total("rounds")

    # The costs of a drafted token. A draft host writes more tokens than are ever verified.
    written = total("num_written") if config.draft_host else drafted
    draft_seconds = total("draft_seconds")
    draft_ms = None
    if draft_seconds is not None:
        draft_ms = 1e3 * draft_seconds / max(1, written)
    ratio = None
    if draft_ms:
        ratio = target_ms / draft_ms

    # What they gain.
    in_a_row = accepted / (rejections + len(runs))
    per_forward = num_tokens / max(1, total("num_target_forwards"))
    # A lookup may find fewer tokens than requested.
    gamma = drafted / max(1, rounds)
    predicted = None
    if ratio and config.draft_host:
        # Theorem 6 takes the chance that one more token is accepted.
        chance = accepted / max(1, accepted + rejections)
        predicted = beside_speedup(gamma, ratio, chance)
    elif ratio:
        # Theorem 4 takes the share of accepted tokens.
        predicted = in_turn_speedup(gamma, ratio, accepted / max(1, drafted))
    return {
        "config": config.shared,
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
    """Predict what drafting and verifying in turn gains over autoregressive decoding.

    This is ParallelVLM's Theorem 4.

    Args:
        gamma: tokens drafted per round.
        c: T_p / T_q, how many tokens the draft drafts during one pass of the target.
        tau: the acceptance rate.
    """
    return c * (tau * gamma + 1) / (gamma + c)


def beside_speedup(gamma: float, c: float, tau: float) -> float:
    """Predict what drafting while verifying gains, with the rounds that rejections cost.

    These are ParallelVLM's Theorem 6 and Lemma 1; see :func:`in_turn_speedup`.
    """
    accepted = gamma if tau == 1 else tau * (1 - tau**gamma) / (1 - tau)
    return c * (1 + tau**gamma) * accepted / (2 * max(gamma, c))


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer every question in all ways in turn, after a warm-up with the first question.

    It yields the records, on host 0.
    """
    configs = {}
    for label, config in configurations(options).items():
        # A way that loses must be seen to lose.
        ablation = replace(config.ablation, keep_losing_draft=True)
        configs[label] = replace(config, ablation=ablation)
    ways = build_ways(options, configs, hosts)
    asked = list(questions(options, hosts))
    num_answers = (1 + options.rounds * len(asked)) * len(ways)
    with tqdm(total=num_answers, unit="answer", disable=_hides_progress(hosts)) as bar:

        def answer_in_all_ways(task: str, request: dict, is_measured: bool) -> None:
            for way in ways:
                bar.set_postfix_str(way.label, refresh=True)
                hosts.barrier()
                if way.engine is not None:
                    answer = way.engine.generate(**request, max_new_tokens=options.max_new_tokens)
                    if is_measured:
                        way.stats.setdefault(task, []).append(answer.stats)
                bar.update()

        # Warm up.
        task, request = asked[0]
        answer_in_all_ways(task, request, is_measured=False)
        # Measure.
        for _ in range(options.rounds):
            for task, request in asked:
                answer_in_all_ways(task, request, is_measured=True)
    if hosts.rank == 0:
        yield from task_records(options, ways)


def measure_batches(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Answer the first questions in batches of all sizes, in all ways.

    It yields the records, on host 0.

    Raises:
        InvalidRequestError: there are fewer questions than a batch has answers.
    """
    asked = list(questions(options, hosts))
    if max(options.batch) > len(asked):
        raise InvalidRequestError(
            f"--batch {max(options.batch)} needs as many questions, but there are {len(asked)}: "
            "--clips"
        )
    ways = build_ways(options, configurations(options), hosts)
    requests = [request for _, request in asked]
    for size in tqdm(options.batch, unit="batch", disable=_hides_progress(hosts)):
        yield from batch_records(options, ways, requests[:size])


def _hides_progress(hosts: HostGroup) -> bool | None:
    """Return tqdm's ``disable``: None shows progress only in a terminal."""
    return None if hosts.rank == 0 else True


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
    if options.batch:
        return measure_on_hosts(options, measure_batches, columns_of("batch_speculative"))
    return measure_on_hosts(options, measure, columns_of("speculative"))


if __name__ == "__main__":
    sys.exit(main())
