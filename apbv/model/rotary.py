"""Rotary frequencies that depend on a sequence's length: ``dynamic`` NTK scaling, and ``longrope``.

transformers takes the largest position of a forward pass for the length, and remembers it in the
model. Where a prompt is split over hosts, each of them would take its own largest position, and
several sequences that one model computes at a time would change one another's frequencies. The
module here keeps nothing: a prompt's length is told for its forward pass, and every new token of an
answer has the frequencies of the sequence that it ends, as where a model generates one token at a
time.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Decoder = TypeVar("Decoder", bound=PreTrainedModel)

_BY_LENGTH = ("dynamic", "longrope")


def rope_by_length(config: PreTrainedConfig) -> str | None:
    """Return a text model's type of rotary embedding if it depends on the length; else None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type")
    return rope_type if rope_type in _BY_LENGTH else None


class RotaryByLength(nn.Module):
    """Computes what a model's own rotary embedding would, with the frequencies of a given length.

    Args:
        own: the module of the model, which stays as it is.
    """

    def __init__(self, own: Any):
        super().__init__()
        self._own: Any = own
        self._rotate = unwrap(type(own).forward)  # without what changes the module's frequencies
        self._prompt = threading.local()

    @contextmanager
    def of_prompt(self, length: int) -> Iterator[None]:
        """Give all tokens that this thread computes the frequencies of a prompt.

        Args:
            length: one past the largest position in the whole prompt.
        """
        self._prompt.length = length
        try:
            yield
        finally:
            self._prompt.length = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for the tokens of ``x``, as the model's own module does.

        Args:
            position_ids: ``[B, S]``, or ``[3, B, S]`` with M-RoPE.
        """
        length = getattr(self._prompt, "length", None)
        if length is not None:
            return self._with_frequencies_of(length, x, position_ids)
        lengths = position_ids + 1
        if lengths.dim() == 3:
            lengths = lengths.amax(dim=0)
        lengths = self._told_apart(lengths)
        first, *others = lengths.unique().tolist()
        cos, sin = self._with_frequencies_of(first, x, position_ids)
        for other in others:
            here = (lengths == other)[..., None]
            other_cos, other_sin = self._with_frequencies_of(other, x, position_ids)
            cos = torch.where(here, other_cos, cos)
            sin = torch.where(here, other_sin, sin)
        return cos, sin

    def _told_apart(self, lengths: Tensor) -> Tensor:
        """Replace lengths by the smallest ones that have the same frequencies."""
        config = self._own.config
        if rope_by_length(config) == "dynamic":
            return lengths.clamp_min(config.max_position_embeddings)
        longest_short = config.rope_parameters["original_max_position_embeddings"]
        return lengths.clamp(longest_short, longest_short + 1)

    def _with_frequencies_of(
        self, length: int, x: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self._own.config
        rope_type = rope_by_length(config)
        assert rope_type is not None  # else the module's own frequencies serve all
        frequencies = ROPE_INIT_FUNCTIONS[rope_type]
        module = copy.copy(self._own)
        inv_freq, attention_scaling = frequencies(config, x.device, seq_len=length)
        module.attention_scaling = attention_scaling
        module._buffers = {**module._buffers, "inv_freq": inv_freq}
        return self._rotate(module, x, position_ids)


def with_rotary_by_length(decoder: Decoder) -> Decoder:
    """Return a decoder with the same weights, with :class:`RotaryByLength` if frequencies vary."""
    if rope_by_length(decoder.config) is None:
        return decoder
    decoder = copy.copy(decoder)
    decoder._modules = {
        **decoder._modules,
        "rotary_emb": RotaryByLength(decoder.get_submodule("rotary_emb")),
    }
    return decoder
