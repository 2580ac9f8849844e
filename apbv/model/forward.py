"""The loop over a decoder's layers: every forward pass of apbv runs here.

It calls transformers' own layers, and stands in for transformers' loop over them: between layers a
prefill asks whether it was cancelled and lets observers look on, after the first layers it adds
what a vision tower gives them, and it frees every layer's input, the first one's included.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..compat.versions import CACHE_ARGUMENT
from .attention import LayerAttention
from .linear_attention import LinearAttention
from .modules import decoder_layers, final_norm, rotary_embedding
from .parts import ModelParts


@dataclass
class LayerRows:
    """The rows that go through the layers; every layer replaces their hidden states.

    The loop and its steps hold hidden states here alone, so that those before a layer are freed
    after it. A caller should not keep the embeddings either.

    Attributes:
        hidden: ``[B, S, d]``, before the first layer the embeddings.
        positions: rotary positions ``[B, S]``, or ``[3, B, S]`` with M-RoPE, where ``[B, S]``
            stands for three that are equal.
        added: what is added after each of the first layers to the rows of :attr:`added_rows`,
            ``[added rows, d]`` each; dropped once added. These are deepstack's features of visual
            tokens (Qwen3-VL).
        added_rows: int64 ``[added rows]`` on the device; None: nothing is added.
        rotary: cosines and sines of the positions, ``[B, S, D]`` each, once the loop has begun.
    """

    hidden: Tensor
    positions: Tensor
    added: deque[Tensor] = field(default_factory=deque)
    added_rows: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None

    def add_next(self) -> None:
        """Add what the layer that has just run is followed by, if anything."""
        if self.added and self.added_rows is not None:
            # The layer's output is nobody else's.
            features = self.added.popleft().to(self.hidden)
            self.hidden[0].index_add_(0, self.added_rows, features)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but some, for the layers that follow.

        Args:
            rows: their numbers, int64 ``[kept]`` on the device, ascending.
        """
        if self.added and self.added_rows is not None:
            place_of_row = rows.new_full([self.hidden.shape[-2]], -1)
            place_of_row[rows] = torch.arange(len(rows), device=rows.device)
            places = place_of_row[self.added_rows]
            stays = (places >= 0).nonzero().flatten()
            self.added_rows = places[stays]
            self.added = deque(features[stays] for features in self.added)
        self.hidden = self.hidden.index_select(-2, rows)
        self.positions = self.positions.index_select(-1, rows)
        if self.rotary is not None:
            cos, sin = self.rotary
            self.rotary = (cos.index_select(-2, rows), sin.index_select(-2, rows))


class LayerStep:
    """Something that a forward pass does around its layers; the base class does nothing."""

    def before(self, layer: int, rows: LayerRows) -> None:
        """Called before each layer.

        Args:
            layer: its number in the decoder.
            rows: its input.
        """

    def on_attention(self, q: Tensor, k: Tensor, scale: float, layer: int) -> None:
        """Called in a prefill before each layer's attention is computed.

        Args:
            q, k: ``[1, Hq, S, D]`` and ``[1, Hkv, T, D]``, post-RoPE.
            scale: what the scores are multiplied by.
            layer: the layer's number among those of attention.
        """

    def after(self, layer: int, rows: LayerRows) -> None:
        """Called after each layer.

        Args:
            layer: its number in the decoder.
            rows: its output, which this may change, also in length (:meth:`LayerRows.keep`).
        """

    def on_output(self, hidden: Tensor) -> None:
        """Called with the output ``[B, S, d]`` of the last norm."""


def run_layers(
    parts: ModelParts,
    rows: LayerRows,
    cache: Cache | None,
    attention: LayerAttention,
    *,
    linear: LinearAttention | None = None,
    steps: Sequence[LayerStep] = (),
) -> Tensor:
    """Run all layers of a decoder and its last norm.

    apbv's attention must be in force (:func:`apbv.model.attention.apbv_attention`).

    Args:
        parts: the model.
        rows: the input; afterwards they hold no hidden states.
        cache: gets the rows' keys and values; None if ``attention`` keeps them by itself.
        attention: computes the attention of each layer that has some.
        linear: computes the linear attention of a hybrid's other layers.
        steps: what is done between layers, in this order.

    Returns:
        The hidden states ``[B, S, d]`` after the last norm.
    """
    decoder = parts.language_model
    if parts.uses_mrope and rows.positions.dim() == 2:
        rows.positions = rows.positions.expand(3, -1, -1)
    rows.rotary = rotary_embedding(decoder)(rows.hidden, rows.positions)
    # What transformers' layers hand on to their attention.
    passed_on: dict[str, Any] = {CACHE_ARGUMENT: cache, "apbv": attention}
    if linear is not None:
        passed_on["linear"] = linear
    for number, layer in enumerate(decoder_layers(decoder)):
        for step in steps:
            step.before(number, rows)
        rows.hidden = layer(
            rows.hidden,
            attention_mask=None,
            position_embeddings=rows.rotary,
            **passed_on,
        )
        rows.add_next()
        for step in steps:
            step.after(number, rows)
    hidden = rows.hidden
    del rows.hidden
    hidden = final_norm(decoder)(hidden)
    for step in steps:
        step.on_output(hidden)
    return hidden
