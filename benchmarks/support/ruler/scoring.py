"""Asks a model text tasks, prefilled in several ways, and scores its answers."""

from collections.abc import Sequence

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.input.rendering import Question, render_prompt
from apbv.model.parts import ModelParts, inspect_model

from ..exams.candidate import answer_greedily
from . import Task, make_task


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
