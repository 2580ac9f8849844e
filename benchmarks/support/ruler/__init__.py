"""Generates text tasks of any length: RULER's eleven synthetic ones, and three for a small model.

Its modules ``scoring`` and ``smollm2`` ask a model such tasks, and load the small one.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from .frequency import CommonWords, FrequentWords
from .needles import NEEDLE_TASKS, SMALL_TASKS
from .task import Budget, Task
from .tracking import Tracking

RULER_TASKS = {**NEEDLE_TASKS, "vt": Tracking(), "cwe": CommonWords(), "fwe": FrequentWords()}
TASKS = {**SMALL_TASKS, **RULER_TASKS}


def make_task(task: str, seed: int, num_tokens: int, tokenizer: Callable[..., Any]) -> Task:
    """Make a task of the named kind; equal arguments make equal tasks.

    The kinds are those of Hsieh et al., *RULER: What's the Real Context Size of Your Long-Context Language
    Models?* Words, sentences and their order are drawn here; prose takes the place of the essays that RULER
    downloads.

    Args:
        task: a name in ``TASKS``.
        seed: number of the task.
        num_tokens: largest length of the context, which is hardly shorter.
        tokenizer: the model's.

    Raises:
        ValueError: the task is unknown, or does not fit.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
    budget = Budget(
        num_tokens, lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    )
    return TASKS[task].make(Random(f"{task} {seed} {num_tokens}"), budget)
