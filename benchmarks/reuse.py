"""Measure follow-up questions about a clip with prefix and embedding caches: TTFT and exact match.

    python benchmarks/reuse.py --hosts 1 4 --shots 256 --clips 40 --json reuse.jsonl
    torchrun --nproc-per-node 2 benchmarks/reuse.py --shots 1024 --clips 4 --passing-len 16

Every clip is asked several questions, by engines that cache nothing, embeddings ("exact"), or KV
("kv"); the first question, which fills the cache, differs from clip to clip and is not scored.
Clips are held-out, as real H.264 files. Without torchrun the hosts are simulated
(support.simulated).
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv import Engine, HostGroup, ReuseConfig
from apbv.config import REUSE_MODES
from apbv.launch.options import prefill_config

from support.arguments import parser_of
from support.exams import EXACT_TASKS, Exam, load_demo, run_on
from support.records import columns_of, fields_of, measure_on_hosts

WAYS = ("none", *REUSE_MODES)
LONGEST_ANSWER = 24  # tokens


def ask(engine: Engine, exam: Exam, num_clips: int) -> list[dict]:
    """Ask all questions about every clip; return the figures of each but the first. Collective."""
    answers = []
    for seed in range(num_clips):
        file = exam.file(seed, engine.hosts)
        questions = exam.questions(seed)
        first = seed % len(questions)
        for number, (task, question, expected) in enumerate(questions[first:] + questions[:first]):
            limits = {"num_frames": 2 * exam.num_shots, "max_new_tokens": LONGEST_ANSWER}
            answer = engine.generate(question, video=file, **limits)
            if number:
                answers.append({"task": task, "right": answer.text == expected, **answer.stats})
    return answers


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield a record for every number of hosts and way; speedups are over the engine that keeps
    nothing."""
    engine, exam, config = load_demo(hosts=hosts), Exam.of(options), prefill_config(options)
    for number in [hosts.size] if hosts.size > 1 else options.hosts:
        baseline = None
        for way in WAYS:
            reuse = None if way == "none" else ReuseConfig(mode=way)

            def job(group: HostGroup, model, reuse=reuse) -> list[dict]:
                own = Engine(model, engine.processor, group, config, engine.name, reuse=reuse)
                return ask(own, exam, options.clips)

            answers = run_on(number, hosts, engine.model, job)
            baseline = baseline or answers
            times, plain = ([answer["ttft_ms"] for answer in each] for each in (answers, baseline))
            of_task = {
                task: [a["right"] for a in answers if a["task"] == task] for task in EXACT_TASKS
            }
            yield {
                "benchmark": "reuse",
                "way": way,
                "hosts": number,
                "simulated": number > hosts.size,
                **fields_of(options, "shots", "grid", "clips"),
                **fields_of(answers[0], "method", "num_input_tokens", "anchor_len", "passing_len"),
                "ttft_ms": statistics.median(times),
                "speedup": statistics.median(plain) / statistics.median(times),
                "reused": sum(answer["reused"] is not None for answer in answers),
                "same_answer": sum(
                    a["token_ids"] == b["token_ids"] for a, b in zip(answers, baseline, strict=True)
                ),
                "total": len(answers),
                "tasks": {task: [sum(rights), len(rights)] for task, rights in of_task.items()},
                "samples": {"ttft_ms": times},
            }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("reuse", __doc__).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measure, columns_of("reuse"))


if __name__ == "__main__":
    sys.exit(main())
