"""Compare prefill methods and visual-token pruning on videos: accuracy on held-out clips, retained
tokens, and TTFT.

    python benchmarks/accuracy.py --preset methods --json accuracy.jsonl
    python benchmarks/accuracy.py --preset systems --clips 150 --json systems.jsonl \
        --plot systems.png
    torchrun --nproc-per-node 4 benchmarks/accuracy.py --preset importance --clips 20
    python benchmarks/accuracy.py --table accuracy.jsonl

Tasks follow VNBench: retrieval, ordering and counting of needles that are edited into a scene or
inserted as separate shots. Clips are real H.264 files. Methods are interleaved on every question,
so that drift in the machine's speed affects all equally. Single-host methods run on one host; the
others on simulated hosts (support.simulated) or those of torchrun, with the same answers. With
--json every clip is written as soon as it is done, and clips that the file already has are skipped.

On one host, a reducer's ranking is compared with random selection of as many tokens ("dycoke,
random, 0.5"), and with the needles' tokens plus random others ("dycoke, needles kept, 0.5").
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm

from apbv import HostGroup
from apbv.demo import draft_path

from support import captions
from support.arguments import parser_of, presets_of
from support.exams import (
    Candidate,
    Exam,
    load_demo,
    numbers_of_hosts,
    run_on,
    sit,
    ways_of,
    with_reference,
)
from support.records import columns_of, measure_what_is_left, plot, table
from support.simulated import share_weights
from support.summaries import grouped, mean_cell, percent_cell, sum_counts

PRESETS = presets_of("accuracy")


def _key(record: dict) -> str:
    """Return the identity of a measurement; its label may change."""
    names = ("grid", "shots", "split", "seed", "hosts", "settings", "tasks")
    values = [list(record["right"]) if name == "tasks" else record[name] for name in names]
    return json.dumps(values, sort_keys=True)


def measure(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every clip, way and number of hosts that is not known yet; collective."""
    engine = load_demo(options.model, hosts, options.dtype)
    is_demo = options.preset != "captions"
    draft = load_demo(draft_path()).model if is_demo else None
    done = set(hosts.gather_json([_key(record) for record in known])[0])
    for shots in options.shots:
        exam = Exam(options.grid, shots, options.folder, tuple(options.tasks), options.split)
        exam = exam if is_demo else captions.exam_like(exam, engine.tokenizer)
        same = {"benchmark": "accuracy", "grid": exam.grid, "shots": shots, "split": options.split}
        ways = ways_of(PRESETS[options.preset], shots * exam.grid**2)
        full = {label: way for label, way in ways.items() if label == "full"}
        ways = {
            label: way
            for label, way in ways.items()
            if not options.labels or label in options.labels
        }
        for seed in tqdm(range(options.clips), unit="clip", disable=hosts.rank != 0 or None):
            about = {**same, "seed": seed, "right": exam.tasks}
            left = defaultdict(dict)
            for label, way in ways.items():
                for number in numbers_of_hosts(way.prefill.method, options, hosts):
                    is_known = _key({**about, "hosts": number, "settings": way.settings}) in done
                    if not is_known and (hosts.size == 1 or not way.keeps):
                        left[number][label] = way
            references = {} if full else None
            for number, of_number, wanted in with_reference(left, full):

                def job(host, model, exam=exam, seed=seed, left=of_number, references=references):
                    own = draft and share_weights(draft)
                    return sit(
                        Candidate(model, engine.processor, host, own), exam, seed, left, references
                    )

                for record in run_on(number, hosts, engine.model, job):
                    if record["label"] in wanted:
                        yield {**same, **record, "simulated": number > hosts.size}


def summarise(records: list[dict]) -> list[dict]:
    """Sum the records of every way over its clips, in the order in which they first come; times are
    medians."""
    rows = []
    for (grid, shots, hosts, label), of_way in grouped(
        records, "grid", "shots", "hosts", "label"
    ).items():
        times = "ttft_ms", "prefill_ms"
        medians = {name: statistics.median(ms for r in of_way for ms in r[name]) for name in times}
        kept = statistics.mean(
            n / r["num_visual_tokens"] for r in of_way for n in r["num_visual_kept"]
        )
        row = {
            "label": label,
            "hosts": hosts,
            "clip": f"{shots} shots of {grid} x {grid}",
            "clips": len(of_way),
        }
        # Records that are older, or of presets without full attention, have no divergence from it.
        for name in ("needles_kept", "kl", "agrees"):
            found = [value for record in of_way for value in record.get(name, ())]
            row[name] = mean_cell(found, ".3f") if found else None
        rows.append(
            {
                **row,
                **medians,
                "kept": kept,
                "right": sum_counts(record["right"] for record in of_way),
            }
        )
    full = {row["clip"]: row["ttft_ms"] for row in rows if row["label"] == "full"}
    return [
        {**row, "speedup": full[row["clip"]] / row["ttft_ms"] if row["clip"] in full else None}
        for row in rows
    ]


def show(options: argparse.Namespace, records: list[dict]) -> None:
    """Print the table of all ways, and plot accuracy against time (the APB-V paper's Figure 1) and
    tokens kept."""
    rows = summarise(records)

    def cell(task: str, row: dict) -> str:
        if task not in row["right"]:
            return ""
        # Tokens of a description are not independent, so that no interval holds.
        right, total = row["right"][task]
        return f"{100 * right / total:.1f}" if task == "describe" else percent_cell(right, total)

    tasks = dict.fromkeys(task for row in rows for task in row["right"])
    print(
        table(
            rows,
            columns_of("accuracy")
            | {task: lambda row, task=task: cell(task, row) for task in tasks},
        )
    )
    if options.plot:
        panels: dict[str, dict] = {"time to first token, ms": {}, "visual tokens in the KV, %": {}}
        for row in rows:
            hosts = f", {row['hosts']} hosts" if row["hosts"] > 1 else ""
            label = re.sub(r", 0\.\d+$", "", row["label"]) + hosts
            share = 100 * statistics.mean(right / total for right, total in row["right"].values())
            for curves, x in zip(panels.values(), (row["ttft_ms"], 100 * row["kept"]), strict=True):
                curves.setdefault(label, []).append((x, share))
        plot(options.plot, panels, "right answers, mean of the tasks, %")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("accuracy", __doc__, {"preset": PRESETS}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_what_is_left(parse_arguments(arguments), measure, show)


if __name__ == "__main__":
    sys.exit(main())
