"""Measure on one GPU what the results need, in stages that have a process and a time limit of their
own.

    python benchmarks/on_gpu.py --minutes 12 --out gpu
    python benchmarks/on_gpu.py --minutes 15 --out gpu --pretrained Qwen/Qwen2.5-Coder-0.5B-Instruct
    python benchmarks/on_gpu.py --rehearse --out rehearsal  # at tiny sizes, on a CPU

A stage that fails or takes too long is recorded, and the next one begins. Checks, whose speed says
nothing, run beside each other, as do the parts of a stage on accuracy. In --out, stages.jsonl says
how stages ended, report.md shows all tables; each stage has a log and records. The same command
goes on with stages that have not ended.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv.stats import append_json_lines

from support.arguments import parser_of, read_toml
from support.records import markdown_table, read_records

ROOT = Path(__file__).parents[1]


def with_options(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return a command line with other options, instead of those of the same names, whose values
    follow them."""
    replaced = {word for word in others if word.startswith("--")}
    kept: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            is_replaced = word in replaced
        if not is_replaced:
            kept.append(word)
    return [*kept, *others]


@dataclass(frozen=True)
class Stage:
    """One measurement; see support/gpu_stages.toml."""

    name: str
    seconds: float
    command: str
    tiny: str = ""
    group: str | None = None
    records: bool = True

    def arguments(self, options: argparse.Namespace) -> list[str]:
        """Return the command line, split."""
        places = {
            "python": sys.executable,
            "{out}": str(options.out.resolve()),
            "{model}": options.pretrained,
        }
        words = shlex.split(self.command)
        if options.rehearse:
            words = with_options(words, shlex.split(self.tiny))
        kept = ["--json", f"{options.out.resolve() / self.name}.jsonl"] if self.records else []
        return [places.get(word, word) for word in words] + kept


def read_stages(path: Path) -> list[Stage]:
    """Read the stages of a file."""
    return [Stage(name, **stage) for name, stage in read_toml(path).items()]


STAGES = read_stages(ROOT / "benchmarks" / "support" / "gpu_stages.toml")


def run(stage: Stage, options: argparse.Namespace, deadline: float, num_beside: int = 1) -> None:
    """Run a stage, and record how it ended; one that ``deadline`` cuts short has not ended.

    Args:
        num_beside: how many stages share the cores.
    """
    own = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"APBV_TEST_ON_GPU": "1"} if stage.name == "tests" else {}
    if num_beside > 1:
        own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_beside))
    if not stage.name.startswith("ruler"):  # which goes on from its records
        (options.out / f"{stage.name}.jsonl").unlink(missing_ok=True)
    command = stage.arguments(options)
    began = time.monotonic()
    with (options.out / f"{stage.name}.log").open("w") as log:
        log.write(f"{shlex.join(command)}\n")
        log.flush()
        same = {
            "cwd": ROOT,
            "env": os.environ | own,
            "stdout": log,
            "stderr": log,
            "start_new_session": True,
        }
        left = max(0.0, deadline - began)
        try:
            process = subprocess.Popen(command, **same)
            status = process.wait(min(stage.seconds, left))
        except FileNotFoundError:
            status = "missing"  # a program that this machine lacks
        except subprocess.TimeoutExpired:
            end(process)
            status = "over" if stage.seconds < left else "cut"
    seconds = round(time.monotonic() - began, 1)
    found = {"stage": stage.name, "status": status, "seconds": seconds, "limit": stage.seconds}
    print(found, flush=True)
    if status != "cut":
        append_json_lines(options.out / "stages.jsonl", [found])


def end(process: subprocess.Popen) -> None:
    """End a stage's processes: by a signal that they can answer, and for good after five
    seconds."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)


def write_report(stages: list[Stage], options: argparse.Namespace) -> str:
    """Write how the stages ended, and the tables that they printed."""
    ended = {each["stage"]: each for each in read_records([options.out / "stages.jsonl"])}
    rows = [
        [name, each["status"] or "done", each["seconds"], each["limit"]]
        for name, each in ended.items()
    ]
    parts = [markdown_table(["stage", "status", "s", "limit"], rows)]
    for stage in stages:
        log = options.out / f"{stage.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        if table := [line for line in lines if line.startswith("|")]:
            parts.append("\n".join([f"## {stage.name}", "", f"    {lines[0]}", "", *table]))
    report = "\n\n".join(parts)
    (options.out / "report.md").write_text(f"{report}\n", encoding="utf-8")
    return report


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("on_gpu", __doc__).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stages.jsonl").touch()
    stages = [stage for stage in STAGES if options.pretrained or "{model}" not in stage.command]
    ended = {each["stage"] for each in read_records([options.out / "stages.jsonl"])}
    chosen = [stage for stage in stages if not options.only or stage.name in options.only]
    left = [stage for stage in chosen if options.only or stage.name not in ended]
    for _, together in groupby(left, key=lambda stage: stage.group or stage.name):
        if time.monotonic() < deadline:
            group = list(together)
            with ThreadPoolExecutor(len(group)) as pool:
                list(
                    pool.map(
                        partial(run, options=options, deadline=deadline, num_beside=len(group)),
                        group,
                    )
                )
            write_report(stages, options)
    print(write_report(stages, options))
    ended = {each["stage"]: each["status"] for each in read_records([options.out / "stages.jsonl"])}
    return int(any(ended.get(stage.name, "not run") != 0 for stage in chosen))


if __name__ == "__main__":
    sys.exit(main())
