"""Score a demo model on held-out clips by exact match per task, prefilled by any method on any hosts.

    python benchmarks/exam.py --method full --grids 2 6 --shots 64 256 --clips 100 --json scores.jsonl
    python benchmarks/exam.py --hosts 2 4 8 --shots 256 --passing-len 0 16 default --json scores.jsonl
    torchrun --nproc-per-node 4 benchmarks/exam.py --shots 256 --passing-len 0 16 default
    python benchmarks/exam.py --table scores.jsonl

Every clip is rendered, written as an H.264 file, decoded from it, prefilled and answered greedily. Clips with an
even number have edited needles, the others inserted ones. With `--hosts` the hosts are simulated in one process
(support.simulated), under torchrun they are real; the answers are the same.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, PrefillConfig
from apbv.config import IMPORTANCE_NAMES, METHOD_NAMES
from apbv.demo import model_path
from apbv.hosts import run_on_hosts
from apbv.stats import append_json_lines

from support import clips
from support.arguments import add_folder_option, add_json_option, add_table_option, length_or_default
from support.exams.candidate import score_on
from support.exams.exam import Exam, clips_folder
from support.records import read_records
from support.summaries import share_cell
from support.tables import markdown_table


def markdown(records: Sequence[dict]) -> str:
    """Format records as a table: a row per clip size and prefill, a column per task, intervals in brackets."""
    rows: dict[tuple, dict[str, list[int]]] = {}
    for record in records:
        asked = record["passing_len_asked"]
        passing = (
            "–"
            if record["method"] == "full"
            else str(record["passing_len"]) + (" (default)" if asked is None else "")
        )
        size = (f"{record['grid']} x {record['grid']}", record["shots"], record["tokens"])
        cells = rows.setdefault((*size, record["method"], record["hosts"], passing), {})
        cell = cells.setdefault(record["task"], [0, 0])
        cell[0] += record["right"]
        cell[1] += record["total"]
    columns = [task for task in clips.TASKS if any(task in cells for cells in rows.values())]
    header = ["grid", "shots", "tokens", "method", "hosts", "l_p", *columns]
    return markdown_table(
        header, [[*key, *(_cell(task, cells) for task in columns)] for key, cells in rows.items()]
    )


def _cell(task: str, cells: dict[str, list[int]]) -> str:
    if task not in cells:
        return ""
    right, total = cells[task]
    if task == "describe":  # tokens of one answer are not independent, so that no interval holds
        return f"{right / total:.3f}"
    return share_cell(right, total)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path(), help="checkpoint folder")
    parser.add_argument("--method", choices=METHOD_NAMES, default="apbv")
    parser.add_argument("--importance", choices=IMPORTANCE_NAMES, default=PrefillConfig().importance)
    parser.add_argument("--hosts", type=int, nargs="+", help="numbers of simulated hosts (default: the real ones)")
    parser.add_argument(
        "--passing-len", type=length_or_default, nargs="+", default=[None], help='numbers, or "default"'
    )
    parser.add_argument("--grids", type=int, nargs="+", default=[2], choices=clips.GRIDS)
    parser.add_argument("--shots", type=int, nargs="+", default=[64], help="lengths of the clips")
    parser.add_argument("--tasks", nargs="+", default=list(clips.TASKS), choices=clips.TASKS)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_folder_option(parser)
    add_json_option(parser)
    add_table_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.table:
        print(markdown(read_records(options.table)))
        return 0
    disable_progress_bar()
    return run_on_hosts(lambda hosts: run(options, hosts))


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Score on clips of every size and on every number of hosts, and print and write the figures."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    asked = {"method": options.method, "importance": options.importance}
    configs = [PrefillConfig(passing_len=length, **asked) for length in options.passing_len]
    folder = clips_folder(options.folder)
    sizes = [(grid, num_shots) for grid in options.grids for num_shots in options.shots]
    for (grid, num_shots), num_hosts in itertools.product(sizes, options.hosts or [hosts.size]):
        exam = Exam(grid, num_shots, options.clips, tuple(options.tasks), options.split)
        began = time.monotonic()
        records = score_on(num_hosts, engine, exam, configs, folder)
        if hosts.rank == 0:
            print(f"{time.monotonic() - began:.0f} s\n{markdown(records)}", flush=True)
            if options.json:
                append_json_lines(options.json, records)


if __name__ == "__main__":
    sys.exit(main())
