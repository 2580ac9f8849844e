"""Measure exact match of every way to prefill, on held-out clips with the demo model and on text with SmolLM2.

    python benchmarks/accuracy.py --preset methods --json accuracy.jsonl
    python benchmarks/accuracy.py --preset importance --hosts 8 --clips 150 --shots 256
    torchrun --nproc-per-node 4 benchmarks/accuracy.py --preset methods
    python benchmarks/accuracy.py --preset ruler
    python benchmarks/accuracy.py --table accuracy.jsonl

The tasks have the form of VNBench: retrieval, ordering and counting of needles that are edited into a running
scene or inserted as shots of their own, at places drawn uniformly. Clips of the test split are real H.264 files.
Without torchrun the hosts are simulated (support.simulated): same arithmetic and exchanges in one process, and
hence the same answers.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch

from apbv import Engine, HostGroup, PrefillConfig
from apbv.hosts import run_on_hosts
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE

from support import clips
from support.arguments import add_clip_options, add_json_option, add_table_option
from support.exams.candidate import score_on
from support.exams.exam import EXACT_TASKS, Exam, clips_folder
from support.exams.settings import paper_lengths, passing_methods, sparse_choices
from support.on_hosts import run_on
from support.records import keep_records, read_records
from support.ruler.needles import SMALL_TASKS
from support.ruler.scoring import score_ruler
from support.ruler.smollm2 import load_smollm2
from support.summaries import percent_cell
from support.tables import markdown_table

LONGEST = 2**30  # passing whole blocks on


def _methods(num_tokens: int) -> dict[str, PrefillConfig]:
    """Configure all methods, with the paper's l_a and l_p as fractions of n, and APB-V also with its defaults."""
    passing, sparse = passing_methods(num_tokens), sparse_choices()
    named = {name: PrefillConfig(method=name) for name in METHODS if name not in {**passing, **sparse}}
    named |= {name: PrefillConfig(method=name, sparse=blocks) for name, blocks in sparse.items()}
    return {**named, **passing, "apbv, default lengths": PrefillConfig()}


def _importance(num_tokens: int) -> dict[str, PrefillConfig]:
    anchor, _ = paper_lengths(num_tokens)
    return {
        f"{name}, l_p = {length}": PrefillConfig(importance=name, anchor_len=anchor, passing_len=length)
        for name in IMPORTANCE
        for length in (1, 2, 4, 8, 16, 32)
    }


def _parts(num_tokens: int) -> dict[str, PrefillConfig]:
    both = passing_methods(num_tokens)["apbv"]
    return {"full": PrefillConfig(method="full"), "apbv": both} | {
        "w/o A": replace(both, anchor_len=0),
        "w/o P": replace(both, passing_len=0),
        "w/o A and P": replace(both, anchor_len=0, passing_len=0),
    }


def _passing(num_tokens: int) -> dict[str, PrefillConfig]:
    anchor, _ = paper_lengths(num_tokens)
    lengths = {f"l_p = {length}": length for length in (0, 2, 4, 8, 16, 32)} | {"no compression": LONGEST}
    return {name: PrefillConfig(anchor_len=anchor, passing_len=length) for name, length in lengths.items()}


def _anchor(num_tokens: int) -> dict[str, PrefillConfig]:
    _, passing = paper_lengths(num_tokens)
    return {
        f"l_a = {length}": PrefillConfig(anchor_len=length, passing_len=passing)
        for length in (0, 4, 8, 16, 32, 64, 128)
    }


def _anchor_query(num_tokens: int) -> dict[str, PrefillConfig]:
    ways = {name: config for name, config in _methods(num_tokens).items() if name in ("full", "apb", "apbv")}
    without_passing = {f"{name}, l_p = 0": replace(ways[name], passing_len=0) for name in ("apb", "apbv")}
    plain = {name: config for name, config in (ways | without_passing).items() if name != "full"}
    asked = {f"{name}, question in A": replace(config, anchor_query=True) for name, config in plain.items()}
    return ways | without_passing | asked


PRESETS: dict[str, Callable[[int], dict[str, PrefillConfig]]] = {
    "methods": _methods,  # Table 1, and with several numbers of hosts Table 6
    "importance": _importance,
    "table3": _parts,
    "table8": _passing,
    "table9": _anchor,
    "anchor_query": _anchor_query,
}


def clip_records(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield the records of one preset for every length and number of hosts, with the configs' names as labels."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype="float32")
    folder = clips_folder(options.folder)
    for num_shots in options.shots:
        exam = Exam(options.grid, num_shots, options.clips, EXACT_TASKS, options.split)
        for number in [hosts.size] if hosts.size > 1 else options.hosts:
            configs = chosen(PRESETS[options.preset](num_shots * options.grid**2), number, options)
            for record in score_on(number, engine, exam, list(configs.values()), folder):
                yield {"label": list(configs)[record.pop("config")], **record}


def chosen(
    configs: dict[str, PrefillConfig], num_hosts: int, options: argparse.Namespace
) -> dict[str, PrefillConfig]:
    """Choose the rows to run; on one host every method is exact full attention, which runs once."""
    if num_hosts == 1:
        return {"full": PrefillConfig(method="full")}
    return {name: config for name, config in configs.items() if not options.labels or name in options.labels}


def ruler_records(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield the records of the text tasks, in the same form."""
    model, tokenizer = load_smollm2(torch.float32)
    model = model.to(hosts.device)
    numbers = [hosts.size] if hosts.size > 1 else options.hosts
    for num_tokens in options.tokens:
        for task in SMALL_TASKS:
            for number in numbers:
                configs = chosen(_methods(num_tokens) | {"w/o P": PrefillConfig(passing_len=0)}, number, options)

                def sit(host, twin, task=task, configs=configs, num_tokens=num_tokens) -> list[dict]:
                    ways = list(configs.values())
                    return score_ruler(twin, tokenizer, host, ways, task, num_tokens, options.clips, options.seed)

                for label, record in zip(configs, run_on(number, hosts, model, sit), strict=True):
                    yield {"label": label, "tokens": num_tokens, **record, "simulated": number != hosts.size}


def markdown(records: list[dict]) -> str:
    """Format records: a row per label, hosts and length; a column per task and kind of needle, with intervals."""
    rows: dict[tuple, dict[str, list[int]]] = {}
    for record in records:
        length = f"{record['shots']} shots, " if "shots" in record else ""
        key = (f"{length}{record['tokens']} tokens", record["hosts"], record["label"])
        cells = rows.setdefault(key, {})
        names = [record["task"]] + ([f"{record['task']}, {record['needles']}"] if "needles" in record else [])
        for name in names:
            cell = cells.setdefault(name, [0, 0])
            cell[0] += record["right"]
            cell[1] += record["total"]
    columns = list(dict.fromkeys(name for cells in rows.values() for name in sorted(cells, key=_column_order)))
    header = ["clip", "hosts", "prefill", *columns]
    shown = [[*key, *(_cell(cells.get(name)) for name in columns)] for key, cells in rows.items()]
    return markdown_table(header, shown, align="---")


def _column_order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a column: tasks come first, then each task's kinds of needle."""
    task, _, needles = name.partition(", ")
    return bool(needles), EXACT_TASKS.index(task) if task in EXACT_TASKS else len(EXACT_TASKS), name


def _cell(counts: list[int] | None) -> str:
    return "" if counts is None else percent_cell(*counts)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=[*PRESETS, "ruler"], default="methods")
    parser.add_argument("--model", default="demo", help="demo, or a folder with such a checkpoint")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="simulated; not under torchrun")
    parser.add_argument("--shots", type=int, nargs="+", default=[256], help="lengths of the clips")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048], help="lengths of the texts (ruler)")
    parser.add_argument("--clips", type=int, default=150, help="clips or texts per task")
    parser.add_argument("--labels", nargs="+", help="only these rows of the preset")
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    add_clip_options(parser)
    add_json_option(parser)
    add_table_option(parser)
    options = parser.parse_args(arguments)
    if min(options.hosts) < 1 or options.clips < 1:
        parser.error("--hosts and --clips must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.table:
        print(markdown(read_records(options.table)))
        return 0
    return run_on_hosts(lambda hosts: run(options, hosts))


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Score, and print and write the figures."""
    made = ruler_records if options.preset == "ruler" else clip_records
    records = []
    try:
        for record in made(options, hosts):
            stamp = {"benchmark": "accuracy", "preset": options.preset, "model": options.model}
            if options.preset == "ruler":
                stamp["model"] = "SmolLM2-135M-Instruct"
            records += keep_records(
                [{**stamp, **record}], "accuracy.py", options.json if hosts.rank == 0 else None
            )
    except ImportError as error:
        print(f"skipped: {error}")
        return
    if hosts.rank == 0:
        print(markdown(records))


if __name__ == "__main__":
    sys.exit(main())
