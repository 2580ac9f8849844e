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
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
from apbv.stats import append_json_lines

from support.arguments import parser_of, read_toml
from support.records import markdown_table, read_records

ROOT = Path(__file__).parents[1]


def with_options(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return a command line with other options, in place of options of the same names.

    An option's values follow it.
    """
    replaced = {word for word in others if word.startswith("--")}
    result: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            is_replaced = word in replaced
        if not is_replaced:
            result.append(word)
    return [*result, *others]


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
        arguments = [places.get(word, word) for word in words]
        if self.records:
            arguments += ["--json", f"{options.out.resolve() / self.name}.jsonl"]
        return arguments


def read_stages(path: Path) -> list[Stage]:
    """Read the stages of a file."""
    return [Stage(name, **stage) for name, stage in read_toml(path).items()]


STAGES = read_stages(ROOT / "benchmarks" / "support" / "gpu_stages.toml")


def run(stage: Stage, options: argparse.Namespace, deadline: float, num_beside: int = 1) -> None:
    """Run a stage, and record how it ended; one that ``deadline`` cuts short has not ended.

    Args:
        deadline: by ``time.monotonic()``.
        num_beside: how many stages share the cores.
    """
    # Prepare the environment and the files.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if stage.name == "tests":
        environment["APBV_TEST_ON_GPU"] = "1"
    if num_beside > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_beside))
    if not stage.name.startswith("ruler"):
        # Stages of ruler.py go on from their records.
        (options.out / f"{stage.name}.jsonl").unlink(missing_ok=True)

    # Run.
    command = stage.arguments(options)
    began = time.monotonic()
    with (options.out / f"{stage.name}.log").open("w") as log:
        log.write(f"{shlex.join(command)}\n")
        log.flush()
        seconds_left = max(0.0, deadline - began)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            status = process.wait(min(stage.seconds, seconds_left))
        except FileNotFoundError:
            # This machine lacks the program.
            status = "missing"
        except subprocess.TimeoutExpired:
            end(process)
            status = "over" if stage.seconds < seconds_left else "cut"

    # Record.
    seconds = round(time.monotonic() - began, 1)
    record = {"stage": stage.name, "status": status, "seconds": seconds, "limit": stage.seconds}
    print(record, flush=True)
    if status != "cut":
        append_json_lines(options.out / "stages.jsonl", [record])


def end(process: subprocess.Popen) -> None:
    """End a stage's processes: first by a signal that they can answer, and then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5.0)


def write_report(stages: list[Stage], options: argparse.Namespace) -> str:
    """Write how the stages ended, and the tables that they printed."""
    # How they ended; a status of 0 is success.
    rows = []
    for name, record in read_ended(options).items():
        rows.append([name, record["status"] or "done", record["seconds"], record["limit"]])
    parts = [markdown_table(["stage", "status", "s", "limit"], rows)]

    # Their tables, below the command, which is a log's first line.
    for stage in stages:
        log = options.out / f"{stage.name}.log"
        if not log.exists():
            continue
        lines = log.read_text(errors="replace").splitlines()
        table = [line for line in lines if line.startswith("|")]
        if table:
            parts.append("\n".join([f"## {stage.name}", "", f"    {lines[0]}", "", *table]))
    report = "\n\n".join(parts)
    (options.out / "report.md").write_text(f"{report}\n", encoding="utf-8")
    return report


def read_ended(options: argparse.Namespace) -> dict[str, dict]:
    """Read the last record of every stage that has ended, by its name."""
    records = read_records([options.out / "stages.jsonl"])
    return {record["stage"]: record for record in records}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("on_gpu", __doc__).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stages.jsonl").touch()

    # Choose stages: those that --only names, or all that have not ended.
    stages = [stage for stage in STAGES if options.pretrained or "{model}" not in stage.command]
    if options.only:
        chosen = [stage for stage in stages if stage.name in options.only]
        left = chosen
    else:
        chosen = stages
        ended = read_ended(options)
        left = [stage for stage in stages if stage.name not in ended]

    # Run them, those of a group beside each other.
    for group in groups_of(left):
        if time.monotonic() < deadline:
            with ThreadPoolExecutor(len(group)) as pool:
                futures = [
                    pool.submit(run, stage, options, deadline, len(group)) for stage in group
                ]
                for future in futures:
                    future.result()
            write_report(stages, options)
    print(write_report(stages, options))

    ended = read_ended(options)
    has_succeeded = all(
        stage.name in ended and ended[stage.name]["status"] == 0 for stage in chosen
    )
    return 0 if has_succeeded else 1


def groups_of(stages: list[Stage]) -> list[list[Stage]]:
    """Return the stages that run together: adjacent ones of the same group."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and stage.group is not None and groups[-1][-1].group == stage.group:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


if __name__ == "__main__":
    sys.exit(main())
