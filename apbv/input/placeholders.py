"""Tokenising a prompt of a hundred thousand placeholders as if each run of them were one.

A processor writes a placeholder's text once for every visual token, and the tokenizer turns each copy into the
same id. For a video of 150,000 visual tokens that takes a second; repeating the id takes a hundredth of one.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch

# What a processor returns with one entry for every token; all else is about pixels.
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def process(processor, text: str, **inputs) -> Mapping[str, Any]:
    """Call a transformers processor on one text, and return what it would by itself, in tensors.

    The processor is not changed: a copy of it, which shares its parts, hands a shortened text to the tokenizer,
    and transformers checks that the tokenizer found as many placeholders as there are in that.

    Args:
        processor: that of a video model; it is used by one thread at a time.
        text: the prompt, with one placeholder for each image or video.
        inputs: the processor's further arguments, such as ``images`` or ``videos``.
    """
    placeholders = _placeholders(processor)
    runs: list[int] = []

    def shortened(*args, **kwargs) -> tuple[list[str], list]:
        (expanded,), offsets = processor.get_text_with_replacements(*args, **kwargs)
        return [_shorten(expanded, placeholders, runs)], offsets

    one_of_each = copy.copy(processor)
    one_of_each.get_text_with_replacements = shortened
    output = one_of_each(text=[text], return_tensors="pt", **inputs)
    input_ids = output["input_ids"][0]
    counts = torch.ones_like(input_ids)
    counts[torch.isin(input_ids, torch.tensor(list(placeholders.values())))] = torch.tensor(runs)
    for name in _PER_TOKEN:
        if name in output:
            output[name] = output[name].repeat_interleave(counts, dim=1)
    return output


def _placeholders(processor) -> dict[str, int]:
    """The texts that stand for visual tokens, with their ids; InternVL has one, for images and video."""
    names = [name for name in ("image_token", "video_token") if hasattr(processor, f"{name}_id")]
    return {getattr(processor, name): getattr(processor, f"{name}_id") for name in names}


def _shorten(text: str, placeholders: Mapping[str, int], runs: list[int]) -> str:
    """Leave one of every run of a placeholder, and append the runs' lengths in order."""

    def first(run: re.Match) -> str:
        runs.append(len(run.group()) // len(run.group(1)))
        return run.group(1)

    return re.sub(rf"({'|'.join(map(re.escape, placeholders))})\1*", first, text)
