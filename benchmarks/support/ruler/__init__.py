"""Generates RULER's eleven synthetic text tasks at any length."""

from collections.abc import Callable
from random import Random
from typing import Any

from .frequency import make_common_words, make_frequent_words
from .needles import NEEDLE_TASKS
from .task import Budget, Task
from .tracking import make_chain

TASKS = {**NEEDLE_TASKS, "vt": make_chain, "cwe": make_common_words, "fwe": make_frequent_words}


def make_task(task: str, seed: int, num_tokens: int, tokenizer: Callable[..., Any]) -> Task:
    """Make a task of the named kind; equal arguments make equal tasks.

    The kinds are those of Hsieh et al., *RULER: What's the Real Context Size of Your Long-Context
    Language Models?* Words, sentences and their order are drawn here; prose takes the place of the
    essays that RULER downloads.

    Args:
        task: a name in ``TASKS``.
        num_tokens: largest length of the context, which is hardly shorter.
        tokenizer: the model's.

    Raises:
        ValueError: the task does not fit.
    """

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    return TASKS[task](Random(f"{task} {seed} {num_tokens}"), Budget(num_tokens, count))
