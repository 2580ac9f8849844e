"""Reads a checkpoint's weights: all of the model's, in the right shapes, and none of its code."""

from collections.abc import Collection
from pathlib import Path
from traceback import walk_tb
from typing import Any

from transformers import PreTrainedModel

from ...errors import UnsupportedModelError

_MOST_NAMED = 3  # of weights that are not there


def load_weights(
    model_class: type[Any], path: str | Path | None, **options: Any
) -> PreTrainedModel:
    """Load a model by transformers, and reject a checkpoint that lacks weights.

    transformers would put random numbers in their place.

    Args:
        model_class: a class of transformers that has ``from_pretrained``.
        path: a directory, or a hub id; None if ``options`` have a ``state_dict``.
        options: further arguments of ``from_pretrained``.

    Raises:
        UnsupportedModelError: weights are missing, or have other shapes than the model's config
            says; the message names them.
    """
    try:
        model, report = model_class.from_pretrained(
            path,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which are refused below, with the others
            **options,
        )
    except RuntimeError as error:
        incomplete = _names_of_incomplete(error)
        if not incomplete:
            raise
        raise UnsupportedModelError(
            "the checkpoint lacks weights, or parts of them, of which the model's are made: "
            f"{named(incomplete)}"
        ) from error
    if report["missing_keys"]:
        raise UnsupportedModelError(
            f"the checkpoint lacks weights of the model: {named(report['missing_keys'])}"
        )
    if report["mismatched_keys"]:
        shapes = [
            f"{name} is {_shown(stored)}, not {_shown(expected)}"
            for name, stored, expected in report["mismatched_keys"]
        ]
        raise UnsupportedModelError(
            f"the checkpoint's weights have other shapes than its config says: {named(shapes)}"
        )
    return model


def _names_of_incomplete(error: RuntimeError) -> list[str]:
    """Return which weights transformers could not put together, or not fill with random numbers.

    Those are of experts, for instance, of which one is missing; these of integers, which no random
    numbers are for. Its error does not name them; the report about the checkpoint, which it has at
    hand where it raises, does.
    """
    for frame, _ in walk_tb(error.__traceback__):
        report = frame.f_locals.get("loading_info")
        if report is None:
            continue
        if isinstance(error, NotImplementedError):
            return list(report.missing_keys)
        return list(report.conversion_errors)
    return []


def named(names: Collection[str]) -> str:
    """Return the first names in alphabetical order, and how many more there are."""
    first = sorted(names)[:_MOST_NAMED]
    text = ", ".join(first)
    num_others = len(names) - len(first)
    if num_others:
        text += f", and {num_others} more"
    return text


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
