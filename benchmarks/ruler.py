"""Score a model on RULER's synthetic text tasks at any length, prefilled by any method on real hosts.

    python benchmarks/ruler.py --model Qwen/Qwen3-8B --method full --tokens 1024 2048 --samples 50
    torchrun --nproc-per-node 8 benchmarks/ruler.py --model Qwen/Qwen3-8B --tokens 131072 --json ruler.jsonl

The eleven tasks of RULER (Hsieh et al.) are needles in a haystack (single_1 to _3, multikey_1 to _3, multivalue,
multiquery), variable tracking (vt), common words (cwe) and frequent words (fwe). As in RULER the answer's
beginning is given, and what is scored is the share of the expected strings that the answer contains. The texts are
drawn here.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from apbv import HostGroup, ModelInputs
from apbv.hosts import run_on_hosts
from apbv.input.rendering import Question, render_prompt
from apbv.launch.options import (
    OptionParser,
    add_host_options,
    add_prefill_options,
    check,
    load_engine,
    prepare_process,
)
from apbv.model.parts import ModelParts, inspect_model

from support.arguments import COUNT, add_shared
from support.exams import answer_greedily
from support.records import report
from support.ruler import TASKS, Task, make_task
from support.summaries import percent_cell


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


def matched(text: str, answers: Sequence[str]) -> float:
    """Return the share of expected strings that an answer contains, in any case: RULER's string_match_all."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Yield a record for every task and length: what ran, and how many answers were right; collective.

    An answer with a part of the expected strings counts in part.

    Raises:
        ValueError: a task does not fit into a length.
    """
    disable_progress_bar()  # every host would show one for loading the weights
    prepare_process(options, hosts)
    engine = load_engine(options, hosts)
    parts, tokenizer, config = inspect_model(engine.model), engine.tokenizer, engine.prefill_config
    for num_tokens, task in product(options.tokens, options.tasks):
        right = 0.0
        title = f"{task}, {num_tokens} tokens"
        for index in tqdm(range(options.samples), desc=title, disable=hosts.rank != 0 or None, leave=False):
            with hosts.local_stage("making a task"):
                sample = make_task(task, index, num_tokens, tokenizer)
                inputs = read_task(parts, tokenizer, sample, hosts)
            said, state = answer_greedily(parts, inputs, hosts, config, sample.max_new_tokens)
            right += matched(tokenizer.decode(said, skip_special_tokens=True), sample.answers)
        split = state.layout.is_split
        yield {
            "benchmark": "ruler",
            "model": options.model,
            "task": task,
            "num_tokens": num_tokens,
            "hosts": hosts.size,
            "total": options.samples,
            "right": right,
            "method": state.method,
            "importance": config.importance if split else None,
            "anchor_len": state.layout.anchor_len if split else None,
            "passing_len": state.layout.max_passed if split else None,  # at most a block's length
        }


COLUMNS = {
    "task": "{task}",
    "tokens": "{num_tokens}",
    "method": "{method}",
    "hosts": "{hosts}",
    "importance": "{importance}",
    "l_a": "{anchor_len}",
    "l_p": "{passing_len}",
    # A little too wide for answers that are right in part: none varies more than right or wrong.
    "% right (95 % interval)": lambda record: percent_cell(record["right"], record["total"]),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="demo, a directory, or a hub id")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK")
    parser.add_argument("--tokens", type=COUNT, nargs="+", default=[2048], help="lengths of the context")
    parser.add_argument("--samples", type=COUNT, default=20)
    add_shared(parser, "json")
    add_prefill_options(parser)
    add_host_options(parser)
    parser.set_defaults(speculate="off", captioner=None)
    options = parser.parse_args(arguments)
    check(parser, options)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_on_hosts(
        lambda hosts: report(options, measure(options, hosts), COLUMNS, hosts),
        options.timeout,
        options.tensor_parallel,
        options.device,
    )


if __name__ == "__main__":
    sys.exit(main())
