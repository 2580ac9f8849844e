"""Measure follow-up questions about a clip with prefix and embedding caches: TTFT and exact match.

    python benchmarks/reuse.py --hosts 1 4 --shots 256 --clips 40 --json reuse.jsonl
    torchrun --nproc-per-node 2 benchmarks/reuse.py --shots 1024 --clips 4 --passing-len 16

Every clip is asked several questions, by engines that cache nothing, embeddings ("exact"), or KV
("kv"); the first question, which fills the cache, differs from clip to clip and is not scored.
Clips are held-out, as real H.264 files. Without torchrun the hosts are simulated
(apbv.testing.simulated).
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
from transformers import PreTrainedModel

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
        # Another question fills the cache of each clip.
        questions = questions[first:] + questions[:first]
        for number, (task, question, expected) in enumerate(questions):
            answer = engine.generate(
                question,
                video=file,
                num_frames=2 * exam.num_shots,
                max_new_tokens=LONGEST_ANSWER,
            )
            if number > 0:
                answers.append({"task": task, "right": answer.text == expected, **answer.stats})
    return answers


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield a record for every number of hosts and way.

    Speedups are over the engine that keeps nothing.
    """
    engine = load_demo(hosts=hosts)
    exam = Exam.of(options)
    config = prefill_config(options)
    numbers_of_hosts = [hosts.size] if hosts.size > 1 else options.hosts
    for num_hosts in numbers_of_hosts:
        baseline = None
        for way in WAYS:
            reuse = None if way == "none" else ReuseConfig(mode=way)

            def job(group: HostGroup, model: PreTrainedModel, reuse=reuse) -> list[dict]:
                engine_of_host = Engine(
                    model, engine.processor, group, config, engine.name, reuse=reuse
                )
                return ask(engine_of_host, exam, options.clips)

            answers = run_on(num_hosts, hosts, engine.model, job)
            if baseline is None:
                baseline = answers
            ttft_ms = [answer["ttft_ms"] for answer in answers]
            plain_ms = [answer["ttft_ms"] for answer in baseline]
            num_reused = 0
            num_same = 0
            tasks = {task: [0, 0] for task in EXACT_TASKS}
            for answer, plain_answer in zip(answers, baseline, strict=True):
                if answer["reused"] is not None:
                    num_reused += 1
                if answer["token_ids"] == plain_answer["token_ids"]:
                    num_same += 1
                tasks[answer["task"]][1] += 1
                if answer["right"]:
                    tasks[answer["task"]][0] += 1
            yield {
                "benchmark": "reuse",
                "way": way,
                "hosts": num_hosts,
                "simulated": num_hosts > hosts.size,
                **fields_of(options, "shots", "grid", "clips"),
                **fields_of(answers[0], "method", "num_input_tokens", "anchor_len", "passing_len"),
                "ttft_ms": statistics.median(ttft_ms),
                "speedup": statistics.median(plain_ms) / statistics.median(ttft_ms),
                "reused": num_reused,
                "same_answer": num_same,
                "total": len(answers),
                "tasks": tasks,
                "samples": {"ttft_ms": ttft_ms},
            }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("reuse", __doc__).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measure, columns_of("reuse"))


if __name__ == "__main__":
    sys.exit(main())
