"""Score a text model on RULER's synthetic tasks, with every method on the same samples.

    python benchmarks/ruler.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --tasks vt --tokens 2048 --hosts 2 4 8
    torchrun --nproc-per-node 8 benchmarks/ruler.py --model Qwen/Qwen3-8B --tokens 131072 --rows full apbv
    python benchmarks/ruler.py --table ruler.jsonl

The eleven tasks of RULER (Hsieh et al.) are needles in a haystack (single_1 to _3, multikey_1 to _3, multivalue,
multiquery), variable tracking (vt), common words (cwe) and frequent words (fwe). As in RULER the answer's
beginning is given, and the score is the share of expected strings that the answer contains. The texts are
generated here. Rows are also compared by the token distributions of a right answer given their KV: the mean KL
divergence from ``full``, which separates rows with far fewer samples. Two rows pass on as many pairs as ``apbv``:
drawn at random, and those that the answer attends to most (support.passed_pairs). Hosts are simulated
(support.simulated), or those of torchrun. With --json every sample is written as soon as it is done, and samples
that the file already has are skipped.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, SparseConfig
from apbv.config import SPARSE_NAMES
from apbv.input.rendering import Question, render_prompt
from apbv.launch.options import positive
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.methods import METHODS

from support.arguments import COUNT, DEFAULT_DTYPES, add_shared
from support.exams import Reference, answer_greedily, run_on
from support.passed_pairs import OF_THE_ANSWER, RANDOM, AnswersPairs, drawn
from support.records import markdown_table, measure_what_is_left, plot
from support.ruler import TASKS, Task, make_task
from support.ruler.tables import difference_table, kl_table
from support.summaries import grouped, mean_cell, percent_cell


def rows_of(num_tokens: int) -> dict[str, PrefillConfig]:
    """Return the rows for a context length by label; settings that a label does not name have their defaults."""
    short = {"anchor_len": -(-num_tokens // 64), "passing_len": -(-num_tokens // 128)}
    # Half of the shortest passing block by default, which would pass on whole blocks of short prompts.
    half, authors = {"passing_len": 128}, {"importance": "dot", "anchor_query": True}
    of_apbv = {
        "": {},
        ", dot": {"importance": "dot"},
        ", l_p = 128": half,
        ", l_p = 128, softmax": {"importance": "softmax", **half},
        ", l_p = 128, dot": {"importance": "dot", **half},
        ", l_p = 128, dot, question in the anchor": {**authors, **half},
        ", l_p = n/32": {"passing_len": -(-num_tokens // 32)},
        ", n/64, n/128": short,
        ", n/64, n/128, dot": {"importance": "dot", **short},
        ", as its authors": {**authors, **short},
        ", l_p = 32": {"passing_len": 32},
        ", l_p = 32, softmax": {"passing_len": 32, "importance": "softmax"},
        ", l_p = 32, dot": {"passing_len": 32, "importance": "dot"},
        ", no passing": {"passing_len": 0},
        ", l_p = 128, no anchor": {"anchor_len": 0, **half},
        ", no anchor": {"anchor_len": 0},
        ", sparse blocks": {"sparse": SparseConfig(method="spargeattn")},
        **{other: {} for other in (RANDOM, OF_THE_ANSWER)},
        **{f", n/64, n/128{other}": short for other in (RANDOM, OF_THE_ANSWER)},
    }
    rows = {name: PrefillConfig(method=name) for name in ("full", "zigzag_ring", "star", "apb", *SPARSE_NAMES)}
    rows["apb, as its authors"] = PrefillConfig(method="apb", **authors)
    return rows | {f"apbv{label}": PrefillConfig(**settings) for label, settings in of_apbv.items()}


def read_task(parts: ModelParts, tokenizer: PreTrainedTokenizerBase, task: Task, hosts: HostGroup) -> ModelInputs:
    """Render a task in the model's chat template; the question and the answer's beginning are the query block."""
    rendered = render_prompt(parts, tokenizer, Question(task.question, context=task.context))
    batch = tokenizer(
        rendered.text + task.answer_start,
        add_special_tokens=not rendered.has_template,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    starts = batch.pop("offset_mapping")[0, :, 0]
    query_start = int((starts < rendered.query_char).sum())
    return ModelInputs.from_processor(parts, batch, hosts, query_start=query_start)


class Sample:
    """A task, which every row answers."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase):
        self._task, self._tokenizer = task, tokenizer
        self.expected = tokenizer(" " + " ".join(task.answers), add_special_tokens=False).input_ids
        self._reference = Reference()

    def answer(self, hosts: HostGroup, model: PreTrainedModel, rows: dict[str, PrefillConfig]) -> list[dict]:
        """Answer by each row, ``full`` first of all, and return a record of each on host 0; collective."""
        parts, found = inspect_model(model), []
        inputs = self._inputs(parts, hosts)
        for label, config in rows.items():
            began = time.monotonic()
            said, state = answer_greedily(parts, inputs, hosts, config, self._task.max_new_tokens)
            times = state.timer.summary(len(said))
            compared = self._reference.compare(parts, state, self.expected, hosts)
            if hosts.rank > 0:
                continue
            text, layout = self._tokenizer.decode(said, skip_special_tokens=True), state.layout
            # RULER's string_match_all: the share of expected strings that the answer contains, in any case.
            right = statistics.fmean(each.lower() in text.lower() for each in self._task.answers)
            found.append(
                {
                    "label": label,
                    "method": state.method,
                    "anchor_len": layout.anchor_len if layout.is_split else None,
                    "passing_len": layout.max_passed if layout.is_split else None,  # at most a block's length
                    "said": text,
                    "right": right,
                    **compared,
                    "ttft_ms": times["ttft_ms"],  # of simulated hosts on their clocks
                    "seconds": time.monotonic() - began,  # on this machine, all hosts and the comparison
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
            return read_task(parts, self._tokenizer, self._task, hosts)


def answer_all(
    sample: Sample, number: int, hosts: HostGroup, model: PreTrainedModel, rows: dict[str, PrefillConfig]
) -> Iterator[dict]:
    """Yield a record of each row, last of all of those that pass on other pairs; collective."""
    others = [label for label in rows if label.endswith((RANDOM, OF_THE_ANSWER))]
    if usual := {label: config for label, config in rows.items() if label not in others}:
        yield from run_on(number, hosts, model, partial(sample.answer, rows=usual))
    for label in others:
        pairs, row = AnswersPairs(), {label: rows[label]}
        if label.endswith(OF_THE_ANSWER):
            with pairs.finding(len(sample.expected)):
                run_on(number, hosts, model, partial(sample.find_pairs, pairs=pairs, config=rows[label]))
        with drawn() if label.endswith(RANDOM) else pairs.passing():
            yield from run_on(number, hosts, model, partial(sample.answer, rows=row))


def measure(options: argparse.Namespace, hosts: HostGroup, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every sample, row and number of hosts that is not known yet; collective.

    Raises:
        ValueError: a task does not fit into a length.
    """
    dtype = options.dtype or DEFAULT_DTYPES[hosts.device.type]
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=dtype)
    tokenizer, about = engine.tokenizer, ("model", "dtype", "task", "num_tokens", "index", "hosts", "label")
    done = hosts.gather_json([[record[name] for name in about] for record in known])[0]
    asked = [*product(options.tokens, range(options.samples), options.tasks)]
    stop = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    for num_tokens, index, task in tqdm(asked, unit="sample", disable=hosts.rank != 0 or None):
        if hosts.broadcast_ints([time.monotonic() > stop], 1)[0]:
            return
        same = {"model": options.model, "dtype": dtype, "task": task, "num_tokens": num_tokens, "index": index}
        left = {number: {} for number in ([hosts.size] if hosts.size > 1 else sorted({1, *options.hosts}))}
        for (label, config), number in product(rows_of(num_tokens).items(), left):
            runs_here = hosts.size > 1 or METHODS[config.method].splits == (number > 1)
            if runs_here and label in options.rows and [*same.values(), number, label] not in done:
                left[number][label] = config
        if not any(left.values()):
            continue
        with hosts.local_stage("making a task"):
            sample = Sample(make_task(task, index, num_tokens, tokenizer), tokenizer)
        wanted = {number: set(rows) for number, rows in left.items()}
        # The other rows are compared with this one.
        left[min(left)] = {"full": PrefillConfig(method="full"), **left[min(left)]}
        for number, rows in left.items():
            for record in answer_all(sample, number, hosts, engine.model, rows):
                if record["label"] in wanted[number]:
                    yield {"benchmark": "ruler", **same, "hosts": number, **record}


def show(options: argparse.Namespace, records: list[dict]) -> None:
    """Print a row for every way over its samples, with the mean difference of each from ``full``'s same sample."""
    records = [record for record in records if record["label"] in options.rows]
    exact = {(r["task"], r["num_tokens"], r["index"]): r["right"] for r in records if r["label"] == "full"}
    lines = []
    rows = grouped(records, "task", "num_tokens", "hosts", "label")
    for (task, num_tokens, hosts, label), of_row in rows.items():
        right = [record["right"] for record in of_row]
        points = [100 * (r["right"] - exact.get((task, num_tokens, r["index"]), math.nan)) for r in of_row]
        lengths = [of_row[0][name] or "–" for name in ("anchor_len", "passing_len")]
        agrees = f"{100 * statistics.fmean(record['agrees'] for record in of_row):.0f}"
        cells = [percent_cell(sum(right), len(right)), mean_cell(points, "+.1f")]
        cells += [mean_cell([record["kl"] for record in of_row], ".3f"), agrees]
        lines.append([task, num_tokens, hosts, label, *lengths, len(right), *cells])
    header = "task,tokens,hosts,row,l_a,l_p,samples,% right,points to `full`,KL,same first choice (%)"
    tables = [markdown_table(header.split(","), lines), kl_table(records), difference_table(records)]
    print(*tables, sep="\n\n", flush=True)
    if options.plot:
        draw(options.plot, records)


def draw(path: Path, records: list[dict]) -> None:
    """Plot the divergence by length for each number of hosts, on the samples that all rows of a length have."""
    panels: dict[str, dict[str, list[tuple]]] = {}
    split = [record for record in records if record["label"] != "full"]
    for (hosts, num_tokens), together in sorted(grouped(split, "hosts", "num_tokens").items()):
        rows = {
            label: {(record["task"], record["index"]): record["kl"] for record in of_row}
            for (label,), of_row in grouped(together, "label").items()
        }
        shared = set.intersection(*map(set, rows.values()))
        for label, kl in rows.items() if shared else ():
            curves = panels.setdefault(f"tokens, {hosts} hosts", {})
            curves.setdefault(label, []).append((num_tokens, statistics.fmean(kl[sample] for sample in shared)))
    if panels:
        plot(path, panels, "KL divergence from full attention (nats per token)")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a directory, or a hub id")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK")
    parser.add_argument("--tokens", type=COUNT, nargs="+", default=[2048], help="context lengths (default 2048)")
    parser.add_argument("--samples", type=COUNT, default=20)
    parser.add_argument("--minutes", type=positive(float), help="begin no further sample after these")
    parser.add_argument(
        "--rows", nargs="+", default=list(rows_of(1)), choices=rows_of(1), metavar="ROW", help="default: all"
    )
    add_shared(parser, "dtype", "json", "plot", "table", hosts=[4])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_what_is_left(parse_arguments(arguments), measure, show)


if __name__ == "__main__":
    sys.exit(main())
