"""Measure on one GPU what the results need, in stages that have a process and a time limit of their own.

    python benchmarks/on_gpu.py --minutes 12 --out gpu
    python benchmarks/on_gpu.py --minutes 15 --out gpu --pretrained Qwen/Qwen2.5-Coder-0.5B-Instruct
    python benchmarks/on_gpu.py --rehearse --out rehearsal  # the same stages at tiny sizes, on a CPU

A stage that fails or takes too long is recorded, and the next one begins. Checks, whose speed says nothing, run
beside each other, as do the parts of a stage on accuracy. In --out, stages.jsonl says how stages ended, report.md
shows what was measured beside what was predicted and wanted, and all tables; each stage has a log and records. The
same command goes on with stages that have not ended.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from apbv.launch.options import positive
from apbv.stats import append_json_lines

from support import gpu_tables
from support.records import markdown_table, read_records

ROOT = Path(__file__).parents[1]
# As the script pytest does: with the root on the path, kernels/ would hide a package of that name.
PYTEST = shlex.quote("import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))")
TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 1"
BIG, SMALL, METHODS = "--model qwen2.5-vl-7b", "--model llama-small", "--methods full zigzag_ring apbv --hosts 8"
RULER_TASKS = "vt niah_single_2 niah_multikey_1 niah_multivalue"


@dataclass(frozen=True)
class Stage:
    """One measurement.

    Attributes:
        name: of its files.
        seconds: its time limit.
        command: the command line; ``python`` is this interpreter, and ``{out}`` the directory for the results.
        tiny: options that a rehearsal adds, and that override the command's.
        group: stages of one group run at the same time; None: the stage runs alone.
        keeps_records: whether ``--json`` is added.
    """

    name: str
    seconds: float
    command: str
    tiny: str = ""
    group: str | None = None
    keeps_records: bool = True

    def arguments(self, options: argparse.Namespace) -> list[str]:
        """Return the command line, split."""
        words = shlex.split(self.command.replace("{out}", str(options.out.resolve()))) + (
            shlex.split(self.tiny) if options.rehearse else []
        )
        kept = ["--json", f"{options.out.resolve() / self.name}.jsonl"] if self.keeps_records else []
        return [sys.executable if word == "python" else word for word in words] + kept


CHECKS = [
    Stage("doctor", 120, "python -m apbv.doctor", "--only machine backends", "checks"),
    Stage(
        "tests",
        150,
        f"python -c {PYTEST} -q -n 8 --dist loadfile --color no tests/kernels tests/gpu/test_real_gpu.py",
        "--collect-only -n 0",
        "checks",
        keeps_records=False,
    ),
    Stage("nccl", 120, f"{TORCHRUN} -m apbv.doctor --only hosts demo", "--only machine", "checks"),
    Stage("infer", 90, f"{TORCHRUN} launch/infer.py --model demo", "", "checks"),
    Stage(
        "memcheck",
        150,
        "compute-sanitizer --tool memcheck python -m apbv.doctor --only kernels",
        "--only machine",
        "checks",
    ),
]
SPEED = [
    Stage(
        "prefill",
        200,
        f"python benchmarks/throughput.py {BIG} {METHODS} --tokens 8192 16384 32768 65536 131072 --rounds 2",
        f"{SMALL} --tokens 300 --hosts 2",
    ),
    Stage(
        "batch",
        150,
        f"python benchmarks/decoding.py {BIG} --dtype bfloat16 --tokens 8192 32768 --batch 1 4 16 --rounds 3",
        f"{SMALL} --tokens 40 --batch 1 2 --answer-tokens 3 --rounds 1",
    ),
    Stage(
        "video",
        200,
        f"python benchmarks/throughput.py --model qwen2.5-vl-3b {METHODS} --frames 64 --resolutions 1440p "
        "--rounds 1",
        "--model qwen2.5-vl-small --frames 8 --resolutions 144p --hosts 2",
    ),
    Stage(
        "steps",
        60,
        f"python benchmarks/decoding.py {BIG} --dtype bfloat16 --tokens 131072 --rounds 5",
        f"{SMALL} --tokens 40 --rounds 1",
    ),
    Stage(
        "operators",
        150,
        "python benchmarks/operators.py --tokens 131072 --rounds 5 "
        "--ops segmented_attention verify_attention kv_importance select_topk merge_states",
        "--tokens 600 --preset quick --rounds 1",
    ),
    Stage(
        "tiles",
        180,
        "python benchmarks/operators.py --tune {out}/tiles.json --tokens 131072 --rounds 5",
        "--tokens 600 --preset quick --rounds 1 --warmup 1 --dtype float16",
        keeps_records=False,
    ),
    Stage(
        "profile",
        90,
        f"python benchmarks/throughput.py {BIG} --methods apbv --hosts 8 --tokens 131072 --rounds 1 "
        "--profile {out}",
        f"{SMALL} --tokens 300 --hosts 2",
        keeps_records=False,
    ),
    Stage(
        "long",
        150,
        f"python benchmarks/throughput.py {BIG} {METHODS} --tokens 262144 --rounds 1 --warmup 0",
        f"{SMALL} --tokens 300 --hosts 2",
    ),
]
MORE = [
    Stage(
        "server",
        75,
        "python benchmarks/serving.py --concurrency 1 4 16",
        "--requests 3 --concurrency 1 3 --frames 16",
    ),
    Stage(
        "drafts",
        75,
        "python benchmarks/speculative.py --scale 6 --clips 4 --tasks describe ordering --dtype float32 "
        "--rounds 1 --strategies vanilla hippo std ngram",
        "--clips 1 --shots 16 --max-new-tokens 8 --strategies vanilla ngram --scale 2",
    ),
    Stage(
        "sparse",
        90,
        "python benchmarks/operators.py --tokens 32768 "
        "--ops segmented_attention block_sparse_attention antidiagonal_scores block_means",
        "--tokens 600 --preset quick --rounds 1",
    ),
    Stage(
        "file",
        90,
        "python benchmarks/video.py --preset road --stages first_token --ways apbv transformers "
        "--vision-hidden 256 --threads 8 --seconds 60 --rounds 1",
        "--resolution 96x192 --seconds 4 --frames 8 --vision-depth 2 --vision-hidden 64 --threads 1",
    ),
]


def with_pretrained(model: str) -> list[Stage]:
    """List the stages that need the weights of a text model: accuracy first."""
    rows = "full zigzag_ring apbv apb star 'apbv, no passing'"
    asked = "--prompt 'Explain step by step how a hash table resolves collisions.' --video none --dtype float32"
    return [
        *(
            Stage(
                f"ruler-{tokens}",
                300,
                f"python benchmarks/ruler.py --model {model} --dtype bfloat16 --tokens {tokens} --hosts 4 8 "
                f"--samples 100 --tasks {RULER_TASKS} --rows {rows}",
                "--tokens 700 --hosts 2 --samples 1 --tasks vt --rows full apbv",
                "ruler",
            )
            for tokens in (8192, 16384, 32000)
        ),
        Stage(
            "server-pretrained",
            75,
            f"python benchmarks/serving.py --model {model} {asked} --concurrency 1 4 16 --requests 32 "
            "--ignore-eos --max-new-tokens 128",
            "--requests 2 --concurrency 1 2 --max-new-tokens 4",
        ),
        Stage(
            "drafts-pretrained",
            75,
            f"python benchmarks/speculative.py --model {model} --prompts benchmarks/support/prompts.jsonl "
            "--rounds 1 --dtype float32 --strategies ngram --max-new-tokens 96",
            "--max-new-tokens 4",
        ),
    ]


def run_beside(stages: list[Stage], options: argparse.Namespace, deadline: float) -> None:
    """Run stages at the same time, and record how each ended; one that ``deadline`` cuts short has not ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if len(stages) > 1:  # they share the cores
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(stages)))
    running = {}
    for stage in stages:
        if not stage.name.startswith("ruler"):  # which goes on from its records
            (options.out / f"{stage.name}.jsonl").unlink(missing_ok=True)
        log = (options.out / f"{stage.name}.log").open("w")
        log.write(f"{shlex.join(stage.arguments(options))}\n")
        log.flush()
        own = {**environment, "APBV_TEST_ON_GPU": "1"} if stage.name == "tests" else environment
        same = {"cwd": ROOT, "env": own, "stdout": log, "stderr": log, "start_new_session": True}
        with log, suppress(FileNotFoundError):  # a program that this machine lacks
            running[stage.name] = subprocess.Popen(stage.arguments(options), **same)
    began = time.monotonic()
    left = {stage.name: stage for stage in stages}
    while left:
        now = time.monotonic()
        for name, stage in list(left.items()):
            process = running.get(name)
            status = "missing" if process is None else process.poll()
            is_over, is_cut = now - began > stage.seconds, now > deadline
            if status is None and not (is_over or is_cut):
                continue
            if status is None:
                end(process)
                status = "over" if is_over else "cut"
            del left[name]
            found = {"stage": name, "status": status, "seconds": round(now - began, 1), "limit": stage.seconds}
            print(found, flush=True)
            if status != "cut":
                append_json_lines(options.out / "stages.jsonl", [found])
        time.sleep(0.2)


def end(process: subprocess.Popen) -> None:
    """End a stage's processes: by a signal that they can answer, and for good after five seconds."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)


def write_report(stages: list[Stage], options: argparse.Namespace) -> str:
    """Write how the stages ended, the tables of the results' pages, and those that the stages printed."""
    ended = {each["stage"]: each for each in read_records([options.out / "stages.jsonl"])}
    rows = [[name, each["status"] or "done", each["seconds"], each["limit"]] for name, each in ended.items()]
    parts = [markdown_table(["stage", "status", "s", "limit"], rows)]
    files = [options.out / f"{stage.name}.jsonl" for stage in stages if stage.keeps_records]
    parts.append(gpu_tables.report(read_records(file for file in files if file.exists())))
    for stage in stages:
        log = options.out / f"{stage.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        if table := [line for line in lines if line.startswith("|")]:
            parts.append("\n".join([f"## {stage.name}", "", f"    {lines[0]}", "", *table]))
    report = "\n\n".join(parts)
    (options.out / "report.md").write_text(f"{report}\n", encoding="utf-8")
    return report


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=positive(float), default=15.0, help="time for all stages (default 15)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="DIR", help="directory for the results")
    parser.add_argument("--pretrained", metavar="MODEL", help="a text model's directory or hub id")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="only these stages, again if they have ended")
    parser.add_argument("--rehearse", action="store_true", help="run the stages at tiny sizes, on a CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stages.jsonl").touch()
    stages = [*CHECKS, *SPEED, *(with_pretrained(options.pretrained) if options.pretrained else ()), *MORE]
    ended = {each["stage"] for each in read_records([options.out / "stages.jsonl"])}
    chosen = [stage for stage in stages if not options.only or stage.name in options.only]
    left = [stage for stage in chosen if options.only or stage.name not in ended]
    for _, together in groupby(left, key=lambda stage: stage.group or stage.name):
        if time.monotonic() < deadline:
            run_beside(list(together), options, deadline)
            write_report(stages, options)
    print(write_report(stages, options))
    ended = {each["stage"]: each["status"] for each in read_records([options.out / "stages.jsonl"])}
    return int(any(ended.get(stage.name, "not run") != 0 for stage in chosen))


if __name__ == "__main__":
    sys.exit(main())
