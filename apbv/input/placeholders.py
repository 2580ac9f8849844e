"""Tokenising a prompt of a hundred thousand placeholders as if each run of them were one.

A processor writes a placeholder's text once for every visual token, and the tokenizer turns each copy into the
same id. For a video of 150,000 visual tokens that takes a second; repeating the id takes a hundredth of one.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .visual import PromptError

# What a processor returns with one entry for every token; all else is about pixels.
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def process(processor, text: str, **inputs) -> Mapping[str, Any]:
    """Call a transformers processor on one text, and return what it would by itself, in tensors.

    The processor is not changed: a copy of it, which shares its parts, hands a shortened text to the tokenizer,
    and transformers checks that the tokenizer found as many placeholders as there are in that.

    Args:
        processor: that of a video model; it is used by one thread at a time.
        text: the prompt, with one placeholder for each image, video or sound.
        inputs: the processor's further arguments, such as ``images`` or ``videos``.
    """
    return _tokenized(processor, text, processor.get_text_with_replacements, inputs)


def process_apart(
    processor, text: str, sources: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[Mapping[str, Any]], list[tuple[str, int]]]:
    """Call a transformers processor on one text and on its sources, one after the other.

    Together a processor takes only videos of as many frames as one another, where it has no grid for each.

    Args:
        processor: as of :func:`process`.
        text: likewise.
        sources: the processor's arguments for each source: a video, which may have its sound with it, all images,
            which may be a list in a list, or a sound.
        names: what errors call them.

    Returns:
        What it returns for each source, with the whole prompt's tokens in the last; and for each image, video and
        sound, in prompt order, its kind (``"image"``, ``"video"`` or ``"audio"``), and how many tokens of this
        kind stand for it; those of a video's sound, which lie between, do not count.

    Raises:
        PromptError: the text has other placeholders than there are sources, or the processor refuses one.
    """
    replacements: dict[str, list[str]] = {f"{kind}_replacements": [] for kind in ("images", "videos", "audio")}
    found: list[tuple[str, int]] = []

    def collected(texts: list[str], *args: Sequence[str], **kwargs: Sequence[str]) -> tuple[list[str], list]:
        for name, new in (dict(zip(replacements, args, strict=False)) | kwargs).items():
            replacements[name] += new
        return texts, []

    def whole(*args, **kwargs) -> tuple[list[str], list]:
        collected(*args, **kwargs)
        wanted = sum(map(len, replacements.values()))
        try:
            texts, (offsets,) = processor.get_text_with_replacements([text], **replacements)
        except StopIteration:
            offsets = []
        if len(offsets) != wanted:
            raise PromptError(
                f"the prompt shows {wanted} images and videos, but its text has placeholders for more or fewer"
            )
        for each in offsets:
            kinds = ("audio",) if each["type"] == "audio" else ("image", "video")
            tokens = _placeholders(processor, kinds)
            found.append((each["type"], sum(map(each["replacement"].count, tokens))))
        return texts, [offsets]

    batches = []
    for number, source in enumerate(sources):
        kind = next(kind for kind in ("videos", "images", "audio") if kind in source)
        token = getattr(processor, f"{kind.removesuffix('s')}_token")
        replace = whole if number == len(sources) - 1 else collected
        count = sum(len(each) if isinstance(each, list) else 1 for each in source[kind])
        try:
            batches.append(_tokenized(processor, token * count, replace, source))
        except PromptError:
            raise
        except ValueError as error:
            raise PromptError(f"{names[number]}: {error}") from error
    return batches, found


def _tokenized(
    processor, text: str, replace: Callable[..., tuple[list[str], list]], inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Call a processor, with another function in place of its ``get_text_with_replacements``."""
    placeholders = _placeholders(processor)
    runs: list[int] = []

    def shortened(*args, **kwargs) -> tuple[list[str], list]:
        (expanded,), offsets = replace(*args, **kwargs)
        return [_shorten(expanded, placeholders, runs)], offsets

    one_of_each = copy.copy(processor)
    one_of_each.get_text_with_replacements = shortened
    output = one_of_each(text=[text], return_tensors="pt", **inputs)
    input_ids = output["input_ids"][0]
    counts = torch.ones_like(input_ids)
    counts[torch.isin(input_ids, torch.tensor(list(placeholders.values())))] = torch.tensor(
        runs, dtype=counts.dtype
    )
    for name in _PER_TOKEN:
        if name in output:
            output[name] = output[name].repeat_interleave(counts, dim=1)
    return output


def _placeholders(processor, kinds: Sequence[str] = ("image", "video", "audio")) -> dict[str, int]:
    """The texts that stand for tokens of these kinds, with their ids; InternVL has one, for images and video."""
    names = [f"{kind}_token" for kind in kinds if hasattr(processor, f"{kind}_token_id")]
    return {getattr(processor, name): getattr(processor, f"{name}_id") for name in names}


def _shorten(text: str, placeholders: Mapping[str, int], runs: list[int]) -> str:
    """Leave one of every run of a placeholder, and append the runs' lengths in order."""

    def first(run: re.Match) -> str:
        runs.append(len(run.group()) // len(run.group(1)))
        return run.group(1)

    return re.sub(rf"({'|'.join(map(re.escape, placeholders))})\1*", first, text)
