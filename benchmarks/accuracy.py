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
others on simulated hosts or those of torchrun, with the same answers. With --json every clip is
written as soon as it is done, and clips that the file already has are skipped.

On one host, a reducer's ranking is compared with random selection of as many tokens ("dycoke,
random, 0.5"), and with the needles' tokens plus random others ("dycoke, needles kept, 0.5").
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from functools import partial

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin

from apbv import HostGroup
from apbv.demo import draft_path
from apbv.testing.simulated import share_weights

from support import captions
from support.arguments import parser_of, presets_of
from support.exams import (
    Candidate,
    Exam,
    Reference,
    Way,
    load_demo,
    numbers_of_hosts,
    run_on,
    sit,
    ways_of,
    with_reference,
)
from support.records import columns_of, measure_what_is_left, plot, table
from support.summaries import grouped, mean_cell, percent_cell, sum_counts

PRESETS = presets_of("accuracy")


def _key(record: dict) -> str:
    """Return the identity of a measurement; its label may change."""
    names = ("grid", "shots", "split", "seed", "hosts", "settings")
    values = [record[name] for name in names]
    tasks = list(record["right"])
    return json.dumps([*values, tasks], sort_keys=True)


def measure(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every clip, way and number of hosts that is not known yet; collective."""
    engine = load_demo(options.model, hosts, options.dtype)
    is_demo = options.preset != "captions"
    draft = load_demo(draft_path()).model if is_demo else None
    done = set(hosts.gather_json([_key(record) for record in known])[0])
    # None: shown only in a terminal.
    hides_progress = None if hosts.rank == 0 else True
    for shots in options.shots:
        # The exam, and the ways to take it.
        exam = Exam(options.grid, shots, options.folder, tuple(options.tasks), options.split)
        if not is_demo:
            exam = captions.exam_like(exam, engine.tokenizer)
        same = {"benchmark": "accuracy", "grid": exam.grid, "shots": shots, "split": options.split}
        all_ways = ways_of(PRESETS[options.preset], shots * exam.grid**2)
        reference = {}
        if "full" in all_ways:
            reference["full"] = all_ways["full"]
        ways = {}
        for label, way in all_ways.items():
            if not options.labels or label in options.labels:
                ways[label] = way

        for seed in tqdm(range(options.clips), unit="clip", disable=hides_progress):
            # What is not known, by number of hosts. What chooses tokens works on one host only.
            left: dict[int, dict[str, Way]] = {}
            for label, way in ways.items():
                if hosts.size > 1 and way.keeps:
                    continue
                for num_hosts in numbers_of_hosts(way.prefill.method, options, hosts):
                    record = {
                        **same,
                        "seed": seed,
                        "right": exam.tasks,
                        "hosts": num_hosts,
                        "settings": way.settings,
                    }
                    if _key(record) not in done:
                        left.setdefault(num_hosts, {})[label] = way

            # Answer.
            references = {} if reference else None
            for num_hosts, ways_of_number, labels_left in with_reference(left, reference):
                job = partial(
                    _sit,
                    processor=engine.processor,
                    draft=draft,
                    exam=exam,
                    seed=seed,
                    ways=ways_of_number,
                    references=references,
                )
                for record in run_on(num_hosts, hosts, engine.model, job):
                    if record["label"] in labels_left:
                        yield {**same, **record, "simulated": num_hosts > hosts.size}


def _sit(
    hosts: HostGroup,
    model: PreTrainedModel,
    processor: ProcessorMixin,
    draft: PreTrainedModel | None,
    exam: Exam,
    seed: int,
    ways: dict[str, Way],
    references: dict[str, Reference] | None,
) -> list[dict]:
    """Let a model take an exam; see :func:`support.exams.sit`."""
    if draft is not None:
        draft = share_weights(draft)
    return sit(Candidate(model, processor, hosts, draft), exam, seed, ways, references)


def summarise(records: list[dict]) -> list[dict]:
    """Sum the records of every way over its clips, in the order in which they first come.

    Times are medians.
    """
    rows = []
    by_way = grouped(records, "grid", "shots", "hosts", "label")
    for (grid, shots, hosts, label), records_of_way in by_way.items():
        shares_kept = []
        for record in records_of_way:
            for num_kept in record["num_visual_kept"]:
                shares_kept.append(num_kept / record["num_visual_tokens"])
        row = {
            "label": label,
            "hosts": hosts,
            "clip": f"{shots} shots of {grid} x {grid}",
            "clips": len(records_of_way),
        }
        # Records that are older, or of presets without full attention, have no divergence from it.
        for name in ("needles_kept", "kl", "agrees"):
            values = _all_values(records_of_way, name)
            row[name] = mean_cell(values, ".3f") if values else None
        for name in ("ttft_ms", "prefill_ms"):
            row[name] = statistics.median(_all_values(records_of_way, name))
        row["kept"] = statistics.mean(shares_kept)
        row["right"] = sum_counts(record["right"] for record in records_of_way)
        rows.append(row)
    full_ms = {row["clip"]: row["ttft_ms"] for row in rows if row["label"] == "full"}
    for row in rows:
        row["speedup"] = None
        if row["clip"] in full_ms:
            row["speedup"] = full_ms[row["clip"]] / row["ttft_ms"]
    return rows


def _all_values(records: list[dict], name: str) -> list[float]:
    """Return a figure of all questions of some records; none where records lack it."""
    values = []
    for record in records:
        values += record.get(name, ())
    return values


def _task_cell(task: str, row: dict) -> str:
    """Return the text of a row in the column of a task."""
    if task not in row["right"]:
        return ""
    right, total = row["right"][task]
    if task == "describe":
        # Tokens of a description are not independent, so that no interval holds.
        return f"{100 * right / total:.1f}"
    return percent_cell(right, total)


def show(options: argparse.Namespace, records: list[dict]) -> None:
    """Print the table of all ways, and plot accuracy against time and tokens kept.

    The plot against time is the APB-V paper's Figure 1.
    """
    rows = summarise(records)
    columns = dict(columns_of("accuracy"))
    for row in rows:
        for task in row["right"]:
            columns[task] = partial(_task_cell, task)
    print(table(rows, columns))
    if options.plot:
        by_time: dict[str, list[tuple[float, float]]] = {}
        by_tokens: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            # Ways that differ only in the share of tokens are points of the same curve.
            label = re.sub(r", 0\.\d+$", "", row["label"])
            if row["hosts"] > 1:
                label += f", {row['hosts']} hosts"
            shares = [right / total for right, total in row["right"].values()]
            percent = 100 * statistics.mean(shares)
            by_time.setdefault(label, []).append((row["ttft_ms"], percent))
            by_tokens.setdefault(label, []).append((100 * row["kept"], percent))
        panels = {"time to first token, ms": by_time, "visual tokens in the KV, %": by_tokens}
        plot(options.plot, panels, "right answers, mean of the tasks, %")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("accuracy", __doc__, {"preset": PRESETS}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_what_is_left(parse_arguments(arguments), measure, show)


if __name__ == "__main__":
    sys.exit(main())
