"""This module gives a host's tokens their rotary positions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..input.model_inputs import ModelInputs


def local_positions(inputs: ModelInputs, spans: Sequence[range], copied: Sequence[range]) -> Tensor:
    """Return the rotary positions of spans of the prompt, ``[3, 1, S]`` or ``[1, S]``.

    An anchor's copy is a prompt with the question in front of the context: the question begins where the context
    would, and moves it on by its own length. All other tokens have their places in the prompt.

    Args:
        spans: tokens of the prompt, first of all those of ``copied``.
        copied: prefix, question and start of the context, as in :class:`~apbv.layout.ContextLayout`; empty where
            nothing is copied.
    """
    positions = [inputs.position_ids[..., span.start : span.stop] for span in spans]
    if copied:
        question, context = positions[1], inputs.position_ids[..., copied[0].stop]
        positions[1] = question - question[..., :1] + context[..., None]
        positions[2] = positions[2] + question[..., -1:] - question[..., :1] + 1
    return torch.cat(positions, dim=-1)
