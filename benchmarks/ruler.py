"""Score a text model on RULER's synthetic tasks, with every method on the same samples.

    python benchmarks/ruler.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --tasks vt \
        --tokens 2048 --hosts 2 4 8
    torchrun --nproc-per-node 8 benchmarks/ruler.py --model Qwen/Qwen3-8B --tokens 131072 \
        --rows full apbv
    python benchmarks/ruler.py --model DIR --tokens 32768 --hosts 8 --processes 12 \
        --minutes 10 --json ruler.jsonl
    python benchmarks/ruler.py --table ruler.jsonl

The eleven tasks of RULER (Hsieh et al.) are needles in a haystack (single_1 to _3, multikey_1 to
_3, multivalue, multiquery), variable tracking (vt), common words (cwe) and frequent words (fwe). As
in RULER the answer's beginning is given, and the score is the share of expected strings that the
answer contains. The texts are generated here. Rows are also compared by the token distributions of
a right answer given their KV: the mean KL divergence from ``full``, which separates rows with far
fewer samples. Some rows pass on other pairs than ``apbv`` does: drawn at random, or those that the
answer attends to most (support.passed_pairs). Hosts are simulated (support.simulated), or those of
torchrun. Several --processes share a GPU that one leaves idle; times are then not recorded. With
--json every sample is written as soon as it is done, and samples that the file already has are
skipped.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig
from apbv.input.rendering import Question, render_prompt
from apbv.model.parts import ModelParts, inspect_model

from support.arguments import DEFAULT_DTYPES, parser_of, presets_of
from support.exams import (
    Reference,
    answer_greedily,
    numbers_of_hosts,
    run_on,
    ways_of,
    with_reference,
)
from support.passed_pairs import OF_THE_ANSWER, RANDOM, AnswersPairs, drawn
from support.records import Curves, markdown_table, measure_what_is_left, plot
from support.ruler import TASKS, Task, make_task
from support.ruler.tables import difference_table, kl_table
from support.summaries import grouped, mean_cell, percent_cell

PRESETS = presets_of("ruler")


def rows_of(num_tokens: int) -> dict[str, PrefillConfig]:
    """Return the rows for a context length by label."""
    return {label: way.prefill for label, way in ways_of(PRESETS["rows"], num_tokens).items()}


class Job(NamedTuple):
    """What one sample still has to be asked.

    Attributes:
        same: what all its records share: model, dtype, task, num_tokens, index.
        left: the rows by label, by number of hosts.
    """

    same: dict
    left: dict[int, dict[str, PrefillConfig]]


class Sample:
    """A task, which every row answers."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, parts: ModelParts):
        """Render the task in the chat template; the question and the answer's beginning are the
        query block."""
        self._task = task
        self._tokenizer = tokenizer
        self.expected = tokenizer(" " + " ".join(task.answers), add_special_tokens=False).input_ids
        self._reference = Reference()
        rendered = render_prompt(parts, tokenizer, Question(task.question, context=task.context))
        self._batch = tokenizer(
            rendered.text + task.answer_start,
            add_special_tokens=not rendered.has_template,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        starts = self._batch.pop("offset_mapping")[0, :, 0]
        self._query_start = int((starts < rendered.query_char).sum())

    def answer(
        self, hosts: HostGroup, model: PreTrainedModel, rows: dict[str, PrefillConfig]
    ) -> list[dict]:
        """Answer by each row, ``full`` first of all, and return a record of each on host 0;
        collective."""
        parts = inspect_model(model)
        found = []
        inputs = self._inputs(parts, hosts)
        for label, config in rows.items():
            began = time.monotonic()
            said, state = answer_greedily(parts, inputs, hosts, config, self._task.max_new_tokens)
            times = state.timer.summary(len(said))
            compared = self._reference.compare(parts, state, self.expected, hosts)
            if hosts.rank > 0:
                continue
            text = self._tokenizer.decode(said, skip_special_tokens=True)
            layout = state.layout
            # RULER's string_match_all: the share of expected strings that the answer contains, in
            # any case.
            right = statistics.fmean(each.lower() in text.lower() for each in self._task.answers)
            found.append(
                {
                    "label": label,
                    "method": state.method,
                    "anchor_len": layout.anchor_len if layout.is_split else None,
                    "passing_len": layout.max_passed
                    if layout.is_split
                    else None,  # at most a block's length
                    "said": text,
                    "right": right,
                    **compared,
                    "ttft_ms": times["ttft_ms"],  # of simulated hosts on their clocks
                    "seconds": time.monotonic()
                    - began,  # on this machine, all hosts and the comparison
                }
            )
        return found

    def find_pairs(
        self, hosts: HostGroup, model: PreTrainedModel, pairs: AnswersPairs, config: PrefillConfig
    ) -> None:
        """Find the pairs of the right answer; collective."""
        parts = inspect_model(model)
        pairs.find(parts, self._inputs(parts, hosts), self.expected, hosts, config)

    def _inputs(self, parts: ModelParts, hosts: HostGroup) -> ModelInputs:
        with hosts.local_stage("reading a task"):
            return ModelInputs.from_processor(
                parts, self._batch, hosts, query_start=self._query_start
            )


class Examinee:
    """A model that answers samples; collective.

    Args:
        timed: whether hosts have the machine to themselves; else their times are left out.
    """

    def __init__(self, options: argparse.Namespace, hosts: HostGroup, timed: bool):
        self._engine = Engine.from_pretrained(
            options.model, hosts=hosts, dtype=dtype_of(options, hosts)
        )
        self._hosts = hosts
        self._timed = timed

    def answer(self, job: Job) -> Iterator[dict]:
        """Yield a record of every row that a job asks for.

        Raises:
            ValueError: the task does not fit into its length.
        """
        same, left = job
        with self._hosts.local_stage("making a task"):
            made = make_task(
                same["task"], same["index"], same["num_tokens"], self._engine.tokenizer
            )
            sample = Sample(made, self._engine.tokenizer, inspect_model(self._engine.model))
        for number, rows, wanted in with_reference(left, {"full": PrefillConfig(method="full")}):
            for record in self._answer_all(sample, number, rows):
                if record["label"] in wanted:
                    times = {} if self._timed else {"ttft_ms": None}
                    yield {"benchmark": "ruler", **same, "hosts": number, **record, **times}

    def _answer_all(
        self, sample: Sample, number: int, rows: dict[str, PrefillConfig]
    ) -> Iterator[dict]:
        """Yield a record of each row, last of all of those that pass on other pairs."""
        others = [label for label in rows if label.endswith((RANDOM, OF_THE_ANSWER))]
        clock = {} if self._timed else {"clock": None}
        ask = partial(run_on, number, self._hosts, self._engine.model, **clock)
        if usual := {label: config for label, config in rows.items() if label not in others}:
            yield from ask(partial(sample.answer, rows=usual))
        for label in others:
            pairs = AnswersPairs()
            config = rows[label]
            if label.endswith(OF_THE_ANSWER):
                with pairs.finding(len(sample.expected)):
                    ask(partial(sample.find_pairs, pairs=pairs, config=config))
            with pairs.passing() if label.endswith(OF_THE_ANSWER) else drawn():
                yield from ask(partial(sample.answer, rows={label: config}))


def dtype_of(options: argparse.Namespace, hosts: HostGroup) -> str:
    return options.dtype or DEFAULT_DTYPES[hosts.device.type]


def jobs_of(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[Job]:
    """Yield what is left of all samples, one of every length and task before the next;
    collective."""
    about = ("model", "dtype", "task", "num_tokens", "index", "hosts", "label")
    done = hosts.gather_json([[record[name] for name in about] for record in known])[0]
    for index, num_tokens, task in product(range(options.samples), options.tokens, options.tasks):
        same = {"model": options.model, "dtype": dtype_of(options, hosts), "task": task}
        same |= {"num_tokens": num_tokens, "index": index}
        left = defaultdict(dict)
        for label, config in rows_of(num_tokens).items():
            for number in (
                numbers_of_hosts(config.method, options, hosts) if label in options.rows else ()
            ):
                if [*same.values(), number, label] not in done:
                    left[number][label] = config
        if left:
            yield Job(same, left)


def measure(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every sample, row and number of hosts that is not known yet; collective.

    Raises:
        ValueError: a task does not fit into a length, or several hosts were to start several
            processes each.
    """
    if options.processes > 1 and hosts.size > 1:
        raise ValueError("--processes share simulated hosts' machine: without torchrun")
    jobs = list(jobs_of(options, hosts, known))
    stop = math.inf if options.minutes is None else time.time() + 60 * options.minutes
    answered = (
        in_processes(options, jobs, stop)
        if options.processes > 1
        else in_turn(options, hosts, jobs, stop)
    )
    yield from chain.from_iterable(
        tqdm(answered, total=len(jobs), unit="sample", disable=hosts.rank != 0 or None)
    )


def in_turn(
    options: argparse.Namespace, hosts: HostGroup, jobs: list[Job], stop: float
) -> Iterator[Iterable[dict]]:
    """Yield the records of one job after the other, until a time."""
    examinee = Examinee(options, hosts, timed=True)
    for job in jobs:
        if hosts.broadcast_ints([time.time() > stop], 1)[0]:
            return
        yield examinee.answer(job)


def in_processes(options: argparse.Namespace, jobs: list[Job], stop: float) -> Iterator[list[dict]]:
    """Yield the records of jobs that processes answer at the same time, until a time, as they are
    done."""
    arguments = (options.processes, get_context("forkserver"), _begin, (options,))
    with ProcessPoolExecutor(*arguments) as pool:
        for done in as_completed([pool.submit(_answer, job, stop) for job in jobs]):
            yield done.result()


_examinee: Examinee | None = None  # of one of several processes


def _begin(options: argparse.Namespace) -> None:
    global _examinee
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    _examinee = Examinee(options, HostGroup.single(), timed=False)


def _answer(job: Job, stop: float) -> list[dict]:
    return [] if time.time() > stop else list(_examinee.answer(job))


def show(options: argparse.Namespace, records: list[dict]) -> None:
    """Print a row for every way over its samples, with the mean difference of each from ``full``'s
    same sample."""
    records = [record for record in records if record["label"] in options.rows]
    exact = {
        (r["task"], r["num_tokens"], r["index"]): r["right"]
        for r in records
        if r["label"] == "full"
    }
    lines = []
    rows = grouped(records, "task", "num_tokens", "hosts", "label")
    for (task, num_tokens, hosts, label), of_row in rows.items():
        right = [record["right"] for record in of_row]
        known = [
            (r, exact[place]) for r in of_row if (place := (task, num_tokens, r["index"])) in exact
        ]
        points = [100 * (r["right"] - of_full) for r, of_full in known]
        lengths = [of_row[0][name] or "–" for name in ("anchor_len", "passing_len")]
        agrees = f"{100 * statistics.fmean(record['agrees'] for record in of_row):.0f}"
        cells = [percent_cell(sum(right), len(right)), mean_cell(points, "+.1f") if points else ""]
        cells += [mean_cell([record["kl"] for record in of_row], ".3f"), agrees]
        lines.append([task, num_tokens, hosts, label, *lengths, len(right), *cells])
    header = (
        "task,tokens,hosts,row,l_a,l_p,samples,% right,points to `full`,KL,same first choice (%)"
    )
    tables = [
        markdown_table(header.split(","), lines),
        kl_table(records),
        difference_table(records),
    ]
    print(*tables, sep="\n\n", flush=True)
    if options.plot:
        draw(options.plot, records)


def draw(path: Path, records: list[dict]) -> None:
    """Plot what :func:`curves_of` returns, with the divergence on a logarithmic axis."""
    panels = curves_of(records)
    if panels:
        plot(path, panels, "KL divergence from full attention (nats per token)", yscale="log")


def curves_of(records: list[dict]) -> dict[str, Curves]:
    """Return the plot's panels: the divergence by length for each number of hosts, and by TTFT at
    one length.

    A point is the mean over all samples of its row, as in :func:`support.ruler.tables.kl_table`.
    Rows with no more than half as many samples as others at the same length are left out, and so is
    ``full``. The last panel shows the length with times of most rows, on the largest number of
    hosts.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    approximate = [record for record in records if record["label"] != "full"]
    for (hosts, num_tokens), of_place in sorted(
        grouped(approximate, "hosts", "num_tokens").items()
    ):
        curves = panels.setdefault(f"tokens, {hosts} hosts", {})
        for label, of_row in rows_with_most_samples(of_place).items():
            curves.setdefault(label, []).append((num_tokens, mean_of(of_row, "kl")))

    timed = [record for record in approximate if record.get("ttft_ms")]
    if timed:
        hosts = max(record["hosts"] for record in timed)
        of_length = grouped(timed, "num_tokens")
        (num_tokens,) = max(of_length, key=lambda length: len(grouped(of_length[length], "label")))
        at_this_place = [
            r for r in approximate if (r["num_tokens"], r["hosts"]) == (num_tokens, hosts)
        ]
        curves = panels.setdefault(f"TTFT in s, {num_tokens:,} tokens, {hosts} hosts", {})
        for label, of_row in rows_with_most_samples(at_this_place).items():
            with_time = [record for record in of_row if record.get("ttft_ms")]
            if with_time:
                curves[label] = [(mean_of(with_time, "ttft_ms") / 1e3, mean_of(of_row, "kl"))]
    return panels


def rows_with_most_samples(records: list[dict]) -> dict[str, list[dict]]:
    """Return all records of the rows that have more than half as many samples as the row with
    most."""
    rows = {label: of_row for (label,), of_row in grouped(records, "label").items()}
    most = max(map(len, rows.values()))
    return {label: of_row for label, of_row in rows.items() if 2 * len(of_row) > most}


def mean_of(records: list[dict], name: str) -> float:
    """Return the mean of a figure of some records."""
    return statistics.fmean(record[name] for record in records)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("ruler", __doc__, {"tasks": TASKS, "rows": rows_of(1)}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_what_is_left(parse_arguments(arguments), measure, show)


if __name__ == "__main__":
    sys.exit(main())
