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
answer attends to most (support.passed_pairs). Hosts are simulated, or those of torchrun. Several
--processes share a GPU that one leaves idle; times are then not recorded. With --json every sample
is written as soon as it is done, and samples that the file already has are skipped.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig
from apbv.input.prompts.rendering import Question, render_prompt
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
T = TypeVar("T")


def rows_of(num_tokens: int) -> dict[str, PrefillConfig]:
    """Return the rows for a context length by label."""
    return {label: way.prefill for label, way in ways_of(PRESETS["rows"], num_tokens).items()}


class Job(NamedTuple):
    """What one sample still has to be asked.

    Attributes:
        same: what all its records share: model, dtype, task, num_tokens and index.
        left: the rows to ask, by number of hosts and by label.
    """

    same: dict
    left: dict[int, dict[str, PrefillConfig]]


class Sample:
    """A task, which every row answers.

    It is rendered in the chat template; the question and the answer's beginning are the query
    block.
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, parts: ModelParts):
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
        """Answer by each row, and return a record of each on host 0; collective.

        The first row of all is ``full``, with which the others are compared.
        """
        parts = inspect_model(model)
        inputs = self._inputs(parts, hosts)
        records = []
        for label, config in rows.items():
            began = time.monotonic()
            said, state = answer_greedily(parts, inputs, hosts, config, self._task.max_new_tokens)
            times = state.timer.summary(len(said))
            comparison = self._reference.compare(parts, state, self.expected, hosts)
            if hosts.rank > 0:
                continue
            text = self._tokenizer.decode(said, skip_special_tokens=True)
            anchor_len = None
            passing_len = None
            if state.layout.is_split:
                anchor_len = state.layout.anchor_len
                # At most a block's length.
                passing_len = state.layout.max_passed
            record = {
                "label": label,
                "method": state.method,
                "anchor_len": anchor_len,
                "passing_len": passing_len,
                "said": text,
                "right": self._share_of_answers(text),
                **comparison,
                # Of simulated hosts by their clocks.
                "ttft_ms": times["ttft_ms"],
                # On this machine, of all hosts, with the comparison.
                "seconds": time.monotonic() - began,
            }
            records.append(record)
        return records

    def _share_of_answers(self, text: str) -> float:
        """Return the share of expected strings that an answer contains, in any case.

        This is RULER's string_match_all.
        """
        num_right = 0
        for answer in self._task.answers:
            if answer.lower() in text.lower():
                num_right += 1
        return num_right / len(self._task.answers)

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
            InvalidRequestError: the task does not fit into its length.
        """
        same = job.same
        tokenizer = self._engine.tokenizer
        with self._hosts.local_stage("making a task"):
            task = make_task(same["task"], same["index"], same["num_tokens"], tokenizer)
            sample = Sample(task, tokenizer, inspect_model(self._engine.model))
        reference = {"full": PrefillConfig(method="full")}
        for num_hosts, rows, labels_left in with_reference(job.left, reference):
            for record in self._answer_all(sample, num_hosts, rows):
                if record["label"] not in labels_left:
                    continue
                record = {"benchmark": "ruler", **same, "hosts": num_hosts, **record}
                if not self._timed:
                    record["ttft_ms"] = None
                yield record

    def _answer_all(
        self, sample: Sample, num_hosts: int, rows: dict[str, PrefillConfig]
    ) -> Iterator[dict]:
        """Yield a record of each row; rows that pass on other pairs come last."""
        usual_rows = {}
        rows_of_other_pairs = {}
        for label, config in rows.items():
            if label.endswith((RANDOM, OF_THE_ANSWER)):
                rows_of_other_pairs[label] = config
            else:
                usual_rows[label] = config
        if usual_rows:
            yield from self._run(num_hosts, partial(sample.answer, rows=usual_rows))
        for label, config in rows_of_other_pairs.items():
            if label.endswith(RANDOM):
                passing_pairs = drawn()
            else:
                pairs = AnswersPairs()
                find = partial(sample.find_pairs, pairs=pairs, config=config)
                with pairs.finding(len(sample.expected)):
                    self._run(num_hosts, find)
                passing_pairs = pairs.passing()
            with passing_pairs:
                yield from self._run(num_hosts, partial(sample.answer, rows={label: config}))

    def _run(self, num_hosts: int, job: Callable[[HostGroup, PreTrainedModel], T]) -> T:
        """Run a job on a number of hosts; see :func:`support.exams.run_on`."""
        if self._timed:
            return run_on(num_hosts, self._hosts, self._engine.model, job)
        return run_on(num_hosts, self._hosts, self._engine.model, job, clock=None)


def dtype_of(options: argparse.Namespace, hosts: HostGroup) -> str:
    return options.dtype or DEFAULT_DTYPES[hosts.device.type]


def jobs_of(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[Job]:
    """Yield what is left of all samples; collective.

    One sample of every length and task comes before the next.

    Args:
        known: the records that are there, on host 0.
    """
    # What host 0 knows, for all hosts: the values that tell records apart.
    names = ("model", "dtype", "task", "num_tokens", "index", "hosts", "label")
    known_values = []
    for record in known:
        known_values.append([record[name] for name in names])
    known_values = hosts.gather_json(known_values)[0]

    dtype = dtype_of(options, hosts)
    for index, num_tokens, task in product(range(options.samples), options.tokens, options.tasks):
        same = {
            "model": options.model,
            "dtype": dtype,
            "task": task,
            "num_tokens": num_tokens,
            "index": index,
        }
        left: dict[int, dict[str, PrefillConfig]] = {}
        for label, config in rows_of(num_tokens).items():
            if label not in options.rows:
                continue
            for num_hosts in numbers_of_hosts(config.method, options, hosts):
                values = [options.model, dtype, task, num_tokens, index, num_hosts, label]
                if values not in known_values:
                    left.setdefault(num_hosts, {})[label] = config
        if left:
            yield Job(same, left)


def measure(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every sample, row and number of hosts that is not known yet; collective.

    Raises:
        InvalidRequestError: a task does not fit into a length, or several hosts were to start
            several processes each.
    """
    if options.processes > 1 and hosts.size > 1:
        raise InvalidRequestError("--processes share simulated hosts' machine: without torchrun")
    jobs = list(jobs_of(options, hosts, known))
    stop = math.inf if options.minutes is None else time.time() + 60 * options.minutes
    if options.processes > 1:
        records_of_jobs = in_processes(options, jobs, stop)
    else:
        records_of_jobs = in_turn(options, hosts, jobs, stop)
    # None: shown only in a terminal.
    hides_progress = None if hosts.rank == 0 else True
    for records in tqdm(records_of_jobs, total=len(jobs), unit="sample", disable=hides_progress):
        yield from records


def in_turn(
    options: argparse.Namespace, hosts: HostGroup, jobs: list[Job], stop: float
) -> Iterator[Iterable[dict]]:
    """Yield the records of one job after the other.

    Args:
        stop: the time after which no job begins, by host 0's ``time.time()``.
    """
    examinee = Examinee(options, hosts, timed=True)
    for job in jobs:
        (is_over,) = hosts.broadcast_ints([time.time() > stop], 1)
        if is_over:
            return
        yield examinee.answer(job)


def in_processes(options: argparse.Namespace, jobs: list[Job], stop: float) -> Iterator[list[dict]]:
    """Yield the records of jobs that several processes answer, as they are done.

    Args:
        stop: the time after which no job begins, by ``time.time()``.
    """
    with ProcessPoolExecutor(
        options.processes, get_context("forkserver"), initializer=_begin, initargs=(options,)
    ) as pool:
        futures = [pool.submit(_answer, job, stop) for job in jobs]
        for future in as_completed(futures):
            yield future.result()


# Of one of several processes.
_examinee: Examinee | None = None


def _begin(options: argparse.Namespace) -> None:
    global _examinee
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    _examinee = Examinee(options, HostGroup.single(), timed=False)


def _answer(job: Job, stop: float) -> list[dict]:
    if time.time() > stop:
        return []
    return list(_examinee.answer(job))


def show(options: argparse.Namespace, records: list[dict]) -> None:
    """Print the tables of records, and plot them.

    The first table has a line for every row of every task, length and number of hosts, with its
    mean difference from ``full`` on the same samples.
    """
    records = [record for record in records if record["label"] in options.rows]
    right_of_full = {}
    for record in records:
        if record["label"] == "full":
            sample = (record["task"], record["num_tokens"], record["index"])
            right_of_full[sample] = record["right"]

    lines = []
    by_row = grouped(records, "task", "num_tokens", "hosts", "label")
    for (task, num_tokens, hosts, label), records_of_row in by_row.items():
        right = [record["right"] for record in records_of_row]
        points = []
        for record in records_of_row:
            sample = (task, num_tokens, record["index"])
            if sample in right_of_full:
                points.append(100 * (record["right"] - right_of_full[sample]))
        line = [
            task,
            num_tokens,
            hosts,
            label,
            records_of_row[0]["anchor_len"] or "–",
            records_of_row[0]["passing_len"] or "–",
            len(right),
            percent_cell(sum(right), len(right)),
            mean_cell(points, "+.1f") if points else "",
            mean_cell([record["kl"] for record in records_of_row], ".3f"),
            f"{100 * mean_of(records_of_row, 'agrees'):.0f}",
        ]
        lines.append(line)
    header = [
        "task",
        "tokens",
        "hosts",
        "row",
        "l_a",
        "l_p",
        "samples",
        "% right",
        "points to `full`",
        "KL",
        "same first choice (%)",
    ]
    tables = [markdown_table(header, lines), kl_table(records), difference_table(records)]
    print("\n\n".join(tables), flush=True)
    if options.plot:
        draw(options.plot, records)


def draw(path: Path, records: list[dict]) -> None:
    """Plot what :func:`curves_of` returns, with the divergence on a logarithmic axis."""
    panels = curves_of(records)
    if panels:
        plot(path, panels, "KL divergence from full attention (nats per token)", yscale="log")


def curves_of(records: list[dict]) -> dict[str, Curves]:
    """Return the plot's panels: the divergence by length, and by TTFT at one length.

    There is a panel by length for each number of hosts. A point is the mean over all samples of its
    row, as in :func:`support.ruler.tables.kl_table`. Rows with no more than half as many samples as
    others at the same length are left out, and so is ``full``. The last panel shows the length with
    times of most rows, on the largest number of hosts.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    approximate = [record for record in records if record["label"] != "full"]

    # By length.
    by_place = grouped(approximate, "hosts", "num_tokens")
    for hosts, num_tokens in sorted(by_place):
        curves = panels.setdefault(f"tokens, {hosts} hosts", {})
        rows = rows_with_most_samples(by_place[hosts, num_tokens])
        for label, records_of_row in rows.items():
            point = (num_tokens, mean_of(records_of_row, "kl"))
            curves.setdefault(label, []).append(point)

    # By TTFT.
    timed = [record for record in approximate if record.get("ttft_ms")]
    if timed:
        hosts = max(record["hosts"] for record in timed)
        num_tokens = length_of_most_rows(timed)
        curves = panels.setdefault(f"TTFT in s, {num_tokens:,} tokens, {hosts} hosts", {})
        rows = rows_with_most_samples(by_place.get((hosts, num_tokens), []))
        for label, records_of_row in rows.items():
            with_time = [record for record in records_of_row if record.get("ttft_ms")]
            if with_time:
                seconds = mean_of(with_time, "ttft_ms") / 1e3
                curves[label] = [(seconds, mean_of(records_of_row, "kl"))]
    return panels


def length_of_most_rows(records: list[dict]) -> int:
    """Return the length that most rows have records of, the first of several."""
    most_rows = 0
    for (num_tokens,), records_of_length in grouped(records, "num_tokens").items():
        num_rows = len(grouped(records_of_length, "label"))
        if num_rows > most_rows:
            most_rows = num_rows
            length = num_tokens
    return length


def rows_with_most_samples(records: list[dict]) -> dict[str, list[dict]]:
    """Return the records of rows with more than half as many samples as the row with most."""
    by_row = grouped(records, "label")
    most = max(len(records_of_row) for records_of_row in by_row.values())
    chosen = {}
    for (label,), records_of_row in by_row.items():
        if 2 * len(records_of_row) > most:
            chosen[label] = records_of_row
    return chosen


def mean_of(records: list[dict], name: str) -> float:
    """Return the mean of a figure of some records."""
    return statistics.fmean(record[name] for record in records)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("ruler", __doc__, {"tasks": TASKS, "rows": rows_of(1)})
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_what_is_left(parse_arguments(arguments), measure, show)


if __name__ == "__main__":
    sys.exit(main())
