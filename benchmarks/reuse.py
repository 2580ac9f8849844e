"""Measure further questions about the same clip, by what is kept of the first: time to first token, exact match.

    python benchmarks/reuse.py --hosts 1 4 --shots 256 --clips 40 --json reuse.jsonl
    torchrun --nproc-per-node 2 benchmarks/reuse.py --shots 1024 --clips 4 --passing-len 16

Every clip is asked several questions, by engines that keep nothing, embeddings ("exact"), or KV ("kv"); the first
question, after which the KV is kept, differs from clip to clip, and is not scored. Clips are held-out ones,
as real H.264 files. Without torchrun the hosts are simulated (support.simulated).
"""

import argparse
import statistics
import sys
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig
from apbv.config import REUSE_MODES
from apbv.hosts import run_on_hosts
from apbv.stats import device_name

from support.arguments import add_clip_options, add_json_option
from support.exams.exam import EXACT_TASKS, Exam, clips_folder
from support.on_hosts import run_on
from support.records import made_by, write_by_host_0
from support.summaries import percent_cell
from support.tables import markdown_table

WAYS = ("none", *REUSE_MODES)
LONGEST_ANSWER = 24  # tokens


def measure(engine: Engine, exam: Exam, folder: Path) -> list[dict]:
    """Ask all questions about every clip; return one record for each but the first. Collective."""
    hosts, answers = engine.hosts, []
    for seed in range(exam.num_clips):
        file = exam.shared_file(seed, folder, hosts)
        questions = exam.questions(seed)
        first = seed % len(questions)
        for number, (task, question, expected) in enumerate(questions[first:] + questions[:first]):
            answer = engine.generate(
                question,
                video=file,
                num_frames=2 * exam.num_shots,
                max_new_tokens=LONGEST_ANSWER,
            )
            if number:
                answers.append({"task": task, "right": answer.text == expected, **answer.stats})
    return answers


def measure_on(num_hosts: int, engine: Engine, way: str, exam: Exam, folder: Path) -> list[dict]:
    """Run :func:`measure` on so many hosts, which :func:`run_on` chooses."""
    reuse = None if way == "none" else ReuseConfig(mode=way)

    def job(hosts: HostGroup, model) -> list[dict]:
        config = engine.prefill_config
        return measure(Engine(model, engine.processor, hosts, config, engine.name, reuse=reuse), exam, folder)

    return run_on(num_hosts, engine.hosts, engine.model, job)


def figures_of(answers: list[dict], baseline: list[dict]) -> dict:
    """Summarise a way's answers, beside those of the engine that keeps nothing."""
    times, plain = ([answer["ttft_ms"] for answer in each] for each in (answers, baseline))
    return {
        "ttft_ms": statistics.median(times),
        "speedup": statistics.median(plain) / statistics.median(times),
        "reused": sum(answer["reused"] is not None for answer in answers),
        "same_answer": sum(a["token_ids"] == b["token_ids"] for a, b in zip(answers, baseline, strict=True)),
        "total": len(answers),
        "tasks": {
            task: [sum(a["right"] for a in answers if a["task"] == task), sum(a["task"] == task for a in answers)]
            for task in EXACT_TASKS
        },
        "stages_ms": {
            name: statistics.median(answer["stages_ms"][name] for answer in answers)
            for name in answers[0]["stages_ms"]
        },
        "samples": {"ttft_ms": times},
    }


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Measure, and print and write the figures."""
    disable_progress_bar()
    config = PrefillConfig(method=options.method, passing_len=options.passing_len, anchor_len=options.anchor_len)
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", prefill=config)
    exam = Exam(options.grid, options.shots, options.clips, EXACT_TASKS)
    folder, records = clips_folder(options.folder), []
    for num_hosts in [hosts.size] if hosts.size > 1 else options.hosts:
        answers = {way: measure_on(num_hosts, engine, way, exam, folder) for way in WAYS}
        for way in WAYS:
            records.append(
                {
                    "benchmark": "reuse",
                    "way": way,
                    "hosts": num_hosts,
                    "simulated": num_hosts > hosts.size,
                    "method": answers[way][0]["method"],
                    "shots": options.shots,
                    "grid": options.grid,
                    "clips": options.clips,
                    "num_input_tokens": answers[way][0]["num_input_tokens"],
                    "anchor_len": answers[way][0]["anchor_len"],
                    "passing_len": answers[way][0]["passing_len"],
                    **figures_of(answers[way], answers["none"]),
                    "device": device_name(hosts.device),
                    **made_by("reuse.py"),
                }
            )
    write_by_host_0(hosts, options, records, markdown)


def markdown(records: list[dict]) -> str:
    """Format records as a Markdown table."""
    header = ["hosts", "method", "tokens", "kept", "TTFT (ms)", "speed-up", "same answer", *EXACT_TASKS]
    rows = [
        [
            record["hosts"],
            record["method"],
            record["num_input_tokens"],
            record["way"],
            f"{record['ttft_ms']:.1f}",
            f"{record['speedup']:.2f}",
            f"{record['same_answer']}/{record['total']}",
            *(_share(*record["tasks"][task]) for task in EXACT_TASKS),
        ]
        for record in records
    ]
    return markdown_table(header, rows)


def _share(right: int, total: int) -> str:
    return percent_cell(right, total) if total else ""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4], help="simulated; not under torchrun")
    parser.add_argument("--method", default="apbv")
    parser.add_argument("--anchor-len", type=int)
    parser.add_argument("--passing-len", type=int)
    parser.add_argument("--shots", type=int, default=256, help="length of the clips")
    parser.add_argument("--clips", type=int, default=40)
    add_clip_options(parser)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if min(options.hosts) < 1 or options.clips < 1:
        parser.error("--hosts and --clips must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_on_hosts(lambda hosts: run(options, hosts))


if __name__ == "__main__":
    sys.exit(main())
